"""Q-learning on a maze small enough for the exact answer, and DQN that has to reproduce it.

    python examples/maze.py                                             solves it three times and compares
    qfleet train examples.maze:Maze-v0 --learner.gamma 0.9              or on the command line, from the repository's root

The same action values are found in three ways, each knowing less than the one before:

    value iteration     knows the maze and computes Q* exactly
    tabular Q-learning  sees only its own steps and keeps a table of numbers
    DQN (qfleet)        sees only its own steps and keeps a neural network

Every move costs 1 (reward −1); the move onto the goal is rewarded with +10 instead, and the episode ends. Moves are
deterministic, and walking into a wall or off the grid leaves you where you are. With d moves to go, the best return is therefore
10·γ^(d−1) − (1 + γ + … + γ^(d−2)), which for γ = 0.9 is 20·0.9^(d−1) − 10.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

import qfleet

GAMMA = 0.9
ALPHA = 0.1

# --- the maze ------------------------------------------------------------------------------------------------------------

DRAWING = """
S . . . # .
. . # . # .
# . # . . .
. . # # # .
. # . . # .
. . . . . G
"""  # S: where the printed paths start. G: the goal. #: a wall.

Table = npt.NDArray[np.float64]  # [cells, actions]: one action value each

GRID = [line.split() for line in DRAWING.strip().splitlines()]
MOVES = {"↑": (-1, 0), "→": (0, 1), "↓": (1, 0), "←": (0, -1)}  # actions 0 to 3: (rows, columns)
OPEN = [(r, c) for r, line in enumerate(GRID) for c, mark in enumerate(line) if mark != "#"]
# Observation i means the place CELLS[i]. The goal comes last, so the cells to act in are those below GOAL.
CELLS = sorted(OPEN, key=lambda at: GRID[at[0]][at[1]] == "G")
GOAL = len(CELLS) - 1
START = next(i for i, (r, c) in enumerate(CELLS) if GRID[r][c] == "S")


def moved(cell: int, move: tuple[int, int]) -> int:
    """The cell a move leads to: the same one where a wall or the border is in the way."""
    there = (CELLS[cell][0] + move[0], CELLS[cell][1] + move[1])
    return CELLS.index(there) if there in CELLS else cell


NEXT = np.array([[moved(cell, move) for move in MOVES.values()] for cell in range(len(CELLS))])  # [cells, actions]
REWARD = np.where(NEXT == GOAL, 10.0, -1.0)  # [cells, actions]


class Maze(gym.Env[Any, Any]):
    """The maze as a gymnasium environment. Episodes start in any cell but the goal, so that all of them are learned."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Discrete(len(CELLS))  # qfleet makes it one-hot for the network
        self.action_space = gym.spaces.Discrete(len(MOVES))
        self.cell = START

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(GOAL))
        return self.cell, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        reward = float(REWARD[self.cell, action])
        self.cell = int(NEXT[self.cell, action])
        return self.cell, reward, self.cell == GOAL, False, {}

    def get_state(self) -> dict[str, Any]:
        """All that the future depends on, as plain numbers and strings: with it a stopped qfleet run goes on exactly."""
        return {"cell": self.cell, "random": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.cell = state["cell"]
        self.np_random.bit_generator.state = state["random"]


# The limit truncates an episode; that is not an end of the task, so learning bootstraps across it and Q* stays as it is.
gym.register("Maze-v0", entry_point=f"{__name__}:Maze", max_episode_steps=100)


# --- three ways to find the action values --------------------------------------------------------------------------------


def value_iteration(gamma: float = GAMMA) -> Table:
    """Q* by applying Bellman's equation to all cells at once until nothing changes any more, to the last bit."""
    q = np.zeros(NEXT.shape)
    while True:
        value = q.max(axis=1)  # [cells]
        value[GOAL] = 0.0  # the episode is over: nothing follows
        better = REWARD + gamma * value[NEXT]  # [cells, actions]
        if np.array_equal(better, q):
            return q
        q = better


def q_learning(
    episodes: int = 5_000, alpha: float = ALPHA, gamma: float = GAMMA, epsilon: float = 0.7, seed: int = 1
) -> Table:
    """Watkins' Q-learning with a table and a constant step size, which suffices because the maze is deterministic.

    It learns the values of the best actions whatever it does itself, so it may explore as much as this.
    """
    q = np.zeros(NEXT.shape)
    env, random = Maze(), np.random.default_rng(seed)
    for episode in range(episodes):
        cell, _ = env.reset(seed=seed if episode == 0 else None)
        over = False
        while not over:
            action = int(random.integers(len(MOVES)) if random.random() < epsilon else q[cell].argmax())
            following, reward, over, _, _ = env.step(action)
            target = reward + gamma * q[following].max()  # the goal's own values stay 0: nothing follows it
            q[cell, action] += alpha * (target - q[cell, action])
            cell = following
    return q


def dqn(run_dir: str | Path, seed: int = 1) -> Table:
    """The same with a network in place of the table: qfleet's plain DQN, a few seconds on one core."""
    run = qfleet.train(
        "Maze-v0",
        recipe="dqn",
        seed=seed,
        total_steps=6_000,
        run_dir=run_dir,
        device="cpu",
        progress=False,
        overrides={
            "env.vectorize": "inprocess",
            "network.hidden": (64,),
            "replay.min_steps": 500,
            "replay.samples_per_step": 64,
            "learner.batch_size": 64,
            "learner.gamma": GAMMA,
            "learner.lr": 3e-3,
            "learner.lr_schedule": "linear",  # to 0: the last updates settle the values
            "learner.target_interval": 50,
            "acting.epsilon_end": 0.5,
            "acting.epsilon_steps": 2_000,
            "runtime.eval_every": 0,
            "runtime.checkpoint_every": 0,
        },
    )
    q: Table = run.policy.q(np.eye(len(CELLS))).double().cpu().numpy()  # row i of the identity is cell i, one-hot
    return q


# --- looking at them ------------------------------------------------------------------------------------------------------


def greedy_path(q: Table, start: int = START) -> list[int]:
    """The cells from start to the goal by the best action in each; cut off when it goes round in circles."""
    path = [start]
    while path[-1] != GOAL and len(path) <= len(CELLS):
        path.append(int(NEXT[path[-1], q[path[-1]].argmax()]))
    return path


def draw(q: Table, path: list[int]) -> list[str]:
    """The lines of the maze with the best action in every cell of the path."""
    marks = [list(line) for line in GRID]
    for cell in path:
        row, column = CELLS[cell]
        marks[row][column] = "G" if cell == GOAL else list(MOVES)[q[cell].argmax()]
    return [" ".join(line) for line in marks]


def error(q: Table, exact: Table) -> float:
    """Largest difference over all actions in all cells where one is taken (in the goal the episode is over)."""
    return float(np.abs(q - exact)[:GOAL].max())


def main() -> None:
    exact = value_iteration()
    with tempfile.TemporaryDirectory() as folder:
        tables = {"Q* (value iteration)": exact, "tabular Q-learning": q_learning(), "qfleet DQN": dqn(folder)}

    print(
        f"\n{'at the start':22}" + "".join(f"{move:>9}" for move in MOVES) + "   moves   shortest from   largest error"
    )
    for name, q in tables.items():
        values = "".join(f"{value:9.4f}" for value in q[START])
        path = greedy_path(q)
        moves = len(path) - 1 if path[-1] == GOAL else "never"
        optimal = sum(len(greedy_path(q, cell)) == len(greedy_path(exact, cell)) for cell in range(GOAL))
        print(f"{name:22}{values}{moves:>8}{f'{optimal} of {GOAL}':>16}{error(q, exact):16.1e}")

    print()
    drawings = [[name, *draw(q, greedy_path(q))] for name, q in tables.items()]
    for line in zip(*drawings, strict=True):
        print("".join(f"{part:24}" for part in line).rstrip())


if __name__ == "__main__":
    main()
