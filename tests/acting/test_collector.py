"""Exploration: epsilon-greedy to the draw, and actions that are held."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qfleet import envs, networks, recipes, rng
from qfleet.acting.actor import HostActor
from qfleet.acting.collector import Collector, epsilon
from qfleet.acting.policy import Policy
from qfleet.config import ActingConfig, override

ENVS = 4


def collector(**values: object) -> Collector:
    config = override(
        recipes.make("dqn", "CartPole-v1"),
        {
            "env.num_envs": ENVS,
            "runtime.steps_per_round": 4 * ENVS,
            "learner.n_step": 1,
            **{k.replace("__", "."): v for k, v in values.items()},
        },
    )
    made = envs.make(config.env, seed=3, threads=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = networks.build(config, made.spec).eval()
    out = Collector(config, [made], HostActor(config, made.spec, Policy(net, config, made.spec), [ENVS]))
    out.start()
    return out


def actions_of(c: Collector, rounds: int) -> np.ndarray:
    return np.concatenate([c.collect().action.numpy().copy() for _ in range(rounds)])  # [rows, ENVS]


def test_epsilon_falls_linearly_and_the_ladder_gives_every_environment_its_own() -> None:
    c = ActingConfig(epsilon_start=1.0, epsilon_end=0.1, epsilon_steps=100)
    assert [epsilon(c, step, 1)[0] for step in (0, 50, 100, 200)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    np.testing.assert_allclose(
        epsilon(ActingConfig(epsilon_start=0.4, epsilon_end=0.4, ladder=7.0), 0, 3), [0.4, 0.4**4.5, 0.4**8]
    )


@pytest.mark.parametrize("eps", [0.0, 0.3, 1.0])
def test_epsilon_greedy_follows_its_draws(eps: float) -> None:
    """Greedy where the draw says so, else the drawn action: worked out beside it from the same random numbers."""
    c = collector(acting__epsilon_start=eps, acting__epsilon_end=eps)
    key = rng.key(c.config.seed, "explore")
    rows = c.collect()
    greedy = c.actor._policy.act(rows.obs.numpy().reshape(-1, 4)).reshape(-1, ENVS)
    for t in range(4):
        u = rng.uniform(key, t, 2 * ENVS)
        expected = np.where(u[:ENVS] < eps, (u[ENVS:] * 2).astype(int), greedy[t])
        np.testing.assert_array_equal(rows.action[t], expected)


def test_held_actions_last_as_drawn() -> None:
    """With epsilon 1 and 2,000 steps, lengths of runs that begin anew: P(k) = 1 / (k (k + 1)), cut at `hold`."""
    c = collector(acting__epsilon_start=1.0, acting__epsilon_end=1.0, acting__hold=8)
    begun: list[int] = []
    for t in range(2000):
        c._now_first[:] = t == 0
        free = c._hold_left == 0
        explore, _ = c._explore(slice(ENVS), np.ones(ENVS), t)
        assert explore.all()
        begun += [int(k) + 1 for k in c._hold_left[free]]
    share = np.bincount(begun, minlength=9)[1:] / len(begun)
    exact = [1 / (k * (k + 1)) for k in range(1, 8)] + [1 / 8]
    np.testing.assert_allclose(share, exact, atol=0.03)


def test_a_held_action_stays_the_same_and_ends_with_the_episode() -> None:
    c = collector(acting__epsilon_start=0.2, acting__epsilon_end=0.2, acting__hold=50)
    c._now_first[:] = False
    c._held[:], c._hold_left[:] = [1, 0, 1, 0], [3, 3, 3, 0]
    c._now_first[2] = True
    held, action = c._explore(slice(ENVS), np.zeros(ENVS), 0)  # no new exploration
    assert held.tolist() == [True, True, False, False] and action[:2].tolist() == [1, 0]
    assert c._hold_left.tolist() == [2, 2, 0, 0]


def test_held_actions_are_in_the_state() -> None:
    a, b = collector(acting__hold=20), collector(acting__hold=20)
    a.collect()
    b.load_state(a.state())
    assert (a._hold_left > 0).any()
    np.testing.assert_array_equal(actions_of(a, 3), actions_of(b, 3))


@pytest.mark.parametrize("what", ["reset", "send", "recv", "state", "load_state"])
def test_nobody_is_waited_for_once_it_has_failed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = collector()
    state = c.state()
    seen = []

    def fail(*args: Any) -> Any:
        seen.append(c.waiting)
        raise ConnectionRefusedError("the simulator hung up")

    monkeypatch.setattr(c.groups[0], what, fail)
    with pytest.raises(ConnectionRefusedError):
        c._ahead = what in ("send", "recv")  # of steps in flight
        if what == "reset" or what == "send":
            c.start()
        elif what == "load_state":
            c.load_state(state)
        else:
            c.state()
    assert len(seen) == 1 and seen[0] is not None and c.waiting is None


def test_holding_changes_later_actions_not_the_draws() -> None:
    plain, held = collector(acting__hold=1), collector(acting__hold=2)
    a, b = actions_of(plain, 5), actions_of(held, 5)
    np.testing.assert_array_equal(a[0], b[0])  # nothing is held yet: the same draws
    assert not np.array_equal(a, b)
