"""The maze: value iteration, tabular Q-learning and qfleet's DQN agree with what a breadth-first search says."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from qfleet.config import EnvConfig
from qfleet.envs import Envs, ids, make

ROOT = Path(__file__).parent.parent
ID = "examples.maze:Maze-v0"
SIZE = 6
DQN_TOLERANCE = 0.05  # 144 seeds: median 1e-5, largest 0.022. An error below 0.34 cannot hide a best action


@pytest.fixture(scope="module")
def maze() -> Iterator[ModuleType]:
    """Imported as `qfleet train examples.maze:Maze-v0` does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])
        ids.find(ID)
        yield sys.modules["examples.maze"]


def neighbours(at: tuple[int, int]) -> list[tuple[int, int]]:
    """Where up, right, down and left lead, were there no walls."""
    r, c = at
    return [(r - 1, c), (r, c + 1), (r + 1, c), (r, c - 1)]


def distances(drawing: str) -> dict[tuple[int, int], int]:
    """Moves to the goal from every open cell, by breadth-first search over the characters of the drawing."""
    text = "".join(drawing.split())
    assert len(text) == SIZE * SIZE
    goal = divmod(text.index("G"), SIZE)
    found, queue = {goal: 0}, deque([goal])
    while queue:
        at = queue.popleft()
        for r, c in neighbours(at):
            if 0 <= r < SIZE and 0 <= c < SIZE and text[r * SIZE + c] != "#" and (r, c) not in found:
                found[r, c] = found[at] + 1
                queue.append((r, c))
    assert len(found) == sum(mark != "#" for mark in text)  # no cell is walled in
    return found


def best_return(d: int, gamma: float) -> float:
    """d - 1 moves at -1, then the one onto the goal at +10."""
    return 10 * gamma ** (d - 1) - sum(gamma**k for k in range(d - 1)) if d else 0.0


def moves(maze: ModuleType, q: Any) -> list[int]:
    return [len(maze.greedy_path(q, cell)) - 1 for cell in range(maze.GOAL)]


def shortest(maze: ModuleType) -> list[int]:
    found = distances(maze.DRAWING)
    return [found[at] for at in maze.CELLS[: maze.GOAL]]


# --- the environment ---------------------------------------------------------------------------------------------------


def test_moves_rewards_and_ends(maze: ModuleType) -> None:
    env = maze.Maze()
    check_env(env, skip_render_check=True)
    found = distances(maze.DRAWING)
    assert maze.CELLS[maze.START] == (0, 0) and maze.CELLS[maze.GOAL] == (5, 5) and found[0, 0] == 10
    for cell in range(maze.GOAL):
        for action, there in enumerate(neighbours(maze.CELLS[cell])):
            env.cell = cell
            observation, reward, terminated, truncated, _ = env.step(action)
            assert maze.CELLS[observation] == (there if there in found else maze.CELLS[cell])
            assert (reward, terminated) == ((10.0, True) if there == (5, 5) else (-1.0, False))
            assert not truncated


def test_episodes_start_in_every_cell_but_the_goal_and_are_limited(maze: ModuleType) -> None:
    env = gym.make("Maze-v0")
    starts = [env.reset(seed=3)[0]] + [env.reset()[0] for _ in range(400)]
    assert set(starts) == set(range(maze.GOAL))
    assert starts[:50] == [env.reset(seed=3)[0]] + [env.reset()[0] for _ in range(49)]
    env.reset(seed=1)
    env.unwrapped.cell = maze.START  # type: ignore[attr-defined]
    flags = [env.step(0)[2:4] for _ in range(100)]  # up, against the border
    assert flags == [(False, False)] * 99 + [(False, True)]


def drive(envs: Envs, steps: int, seed: int) -> list[Any]:
    actions = np.random.default_rng(seed).integers(0, 4, (steps, envs.num_envs))
    return [x.copy() for a in actions for x in envs.step(a)]


def test_a_saved_state_goes_on_identically(maze: ModuleType) -> None:
    config = EnvConfig(id=ID, num_envs=3, vectorize="inprocess")
    with make(config, seed=1) as a, make(config, seed=2) as b:
        assert not any("restart" in note for note in a.notes)
        a.reset()
        drive(a, 77, seed=0)
        state = json.loads(json.dumps(a.state()))
        after = drive(a, 1000, seed=1)
        assert sum(terminated.sum() for terminated in after[2::6]) > 10  # random starts followed
        b.load_state(state)
        again = drive(b, 1000, seed=1)
        assert all(np.array_equal(x, y) for x, y in zip(after, again, strict=True))


# --- the three answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.9, 0.5])
def test_value_iteration_equals_the_closed_form(maze: ModuleType, gamma: float) -> None:
    found = distances(maze.DRAWING)
    exact = np.empty((maze.GOAL, 4))
    for cell, action in np.ndindex(exact.shape):
        at = maze.CELLS[cell]
        there = neighbours(at)[action]
        d = found.get(there, found[at])  # a wall leaves us where we are
        exact[cell, action] = 10.0 if d == 0 else -1.0 + gamma * best_return(d, gamma)
    q = maze.value_iteration(gamma)
    np.testing.assert_allclose(q[: maze.GOAL], exact, rtol=0, atol=1e-13)
    if gamma == 0.9:  # 10 moves to go: 10·0.9⁹ − (1 − 0.9⁹) / 0.1, by hand
        assert q[maze.START].max() == pytest.approx(-2.2515902, abs=1e-7)
    assert moves(maze, q) == shortest(maze)


@pytest.mark.parametrize("seed", [1, 2])
def test_q_learning_converges_to_it(maze: ModuleType, seed: int) -> None:
    exact = maze.value_iteration()
    assert maze.error(maze.q_learning(episodes=200, seed=seed), exact) > 0.1  # it does take learning
    q = maze.q_learning(seed=seed)
    assert maze.error(q, exact) < 1e-3
    assert moves(maze, q) == shortest(maze)


def test_dqn_reproduces_it(maze: ModuleType, tmp_path: Path) -> None:
    q = maze.dqn(tmp_path / "run")
    assert moves(maze, q) == shortest(maze)  # from every cell, not from the start alone
    assert maze.error(q, maze.value_iteration()) < DQN_TOLERANCE


# --- what is printed ---------------------------------------------------------------------------------------------------


def test_a_policy_that_goes_round_in_circles_is_cut_off(maze: ModuleType) -> None:
    q = np.zeros((len(maze.CELLS), 4))  # up, for ever
    assert set(maze.greedy_path(q)) == {maze.START}


def test_the_table_and_the_paths(
    maze: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = np.zeros((len(maze.CELLS), 4))
    monkeypatch.setattr(maze, "dqn", lambda folder: wrong)
    maze.main()
    _, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[3:7] == ["↑", "→", "↓", "←"]
    table = {row[:22].strip(): row[22:].split() for row in rows[:3]}
    values = ["-3.0264", "-2.2516", "-3.7238", "-3.0264"]  # two bumps, 10 moves to go, 12 moves to go
    assert table["Q* (value iteration)"] == [*values, "10", "25", "of", "25", "0.0e+00"]
    assert table["tabular Q-learning"][:-1] == [*values, "10", "25", "of", "25"]
    assert table["qfleet DQN"] == ["0.0000"] * 4 + ["never", "0", "of", "25", "1.0e+01"]
    q = maze.value_iteration()
    assert maze.draw(q, maze.greedy_path(q)) == [
        "→ → → ↓ # .",
        ". . # ↓ # .",
        "# . # → → ↓",
        ". . # # # ↓",
        ". # . . # ↓",
        ". . . . . G",
    ]


def test_the_example_is_short() -> None:
    assert len((ROOT / "examples" / "maze.py").read_text().splitlines()) <= 250
