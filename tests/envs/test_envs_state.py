"""Snapshots: what follows a restored state is what followed the saved one, to the bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from qfleet.config import EnvConfig
from qfleet.envs import Envs, make
from qfleet.envs.state import NoSnapshot, _Decoder, _Encoder

TASKS = [
    ("CartPole-v1", "native"),
    ("CartPole-v1", "inprocess"),
    ("MountainCar-v0", "inprocess"),
    ("Acrobot-v1", "inprocess"),
    ("FrozenLake-v1", "inprocess"),
    ("Taxi-v4", "inprocess"),
    ("CliffWalking-v1", "inprocess"),
    ("Blackjack-v1", "inprocess"),
    ("MinAtar/Breakout-v1", "inprocess"),
    ("MinAtar/Freeway-v1", "inprocess"),
    ("MinAtar/Asterix-v1", "inprocess"),
    ("MinAtar/Seaquest-v1", "inprocess"),
    ("MinAtar/SpaceInvaders-v1", "inprocess"),
    ("env_toys:Limited-v0", "inprocess"),
]


def env(id: str, kind: str, num_envs: int = 3, seed: int = 1) -> Envs:
    return make(EnvConfig(id=id, num_envs=num_envs, vectorize=kind), seed=seed, threads=2)  # type: ignore[arg-type]


def drive(envs: Envs, steps: int, seed: int) -> list[Any]:
    actions = np.random.default_rng(seed).integers(0, envs.spec.num_actions, (steps, envs.num_envs))
    return [x.copy() for a in actions for x in envs.step(a)]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def through_a_file(node: Any) -> Any:
    """As a checkpoint would keep it: arrays by themselves, everything else as JSON."""
    if isinstance(node, dict):
        return {str(k): through_a_file(v) for k, v in node.items()}
    if isinstance(node, np.ndarray):
        assert node.dtype.kind in "biuf"
        return np.frombuffer(node.tobytes(), node.dtype).reshape(node.shape)  # read-only, as arrays from a file may be
    return json.loads(json.dumps(node))


@pytest.mark.parametrize(("id", "kind"), TASKS)
def test_a_restored_run_goes_on_identically(id: str, kind: str) -> None:
    with env(id, kind) as a, env(id, kind, seed=99) as fresh:
        a.reset()
        ended = False
        for part in range(3):  # at three points, one of them with a reset pending where episodes are short
            drive(a, 60 + part, seed=part)
            state = a.state()
            assert state is not None and not any("restart" in note for note in a.notes)
            kept = through_a_file(state)
            after = drive(a, 450, seed=10 + part)
            ended |= any(x.any() for x in after[4::6])
            fresh.load_state(kept)
            assert same(after, drive(fresh, 450, seed=10 + part))
            assert np.array_equal(a.reset(), fresh.reset())  # the random numbers are where they were, too
        assert ended or "Freeway" in id  # otherwise resets were not tested (a Freeway game is 2,500 steps)


def test_a_pending_reset_is_part_of_the_state() -> None:
    for id, kind in (("CartPole-v1", "native"), ("CartPole-v1", "inprocess")):
        with env(id, kind) as a, env(id, kind) as b:
            a.reset()
            while not (s := a.step(np.ones(3, np.int64))).terminated.any():
                pass
            state = a.state()
            over = s.terminated.copy()
            assert state is not None
            b.load_state(state)
            assert np.array_equal(b.step(np.ones(3, np.int64)).first, over)


@pytest.mark.parametrize("id", ["MountainCar-v0", "env_toys:Limited-v0"])
def test_state_is_the_same_in_workers(id: str) -> None:
    with env(id, "subprocess") as a, env(id, "inprocess") as b, env(id, "subprocess") as c:
        a.reset()
        drive(a, 50, 0)
        state = a.state()
        assert state is not None
        after = drive(a, 100, 1)
        b.load_state(state)
        c.load_state(through_a_file(state))
        assert same(after, drive(b, 100, 1)) and same(after, drive(c, 100, 1))


def test_a_saved_state_does_not_change_afterwards() -> None:
    with env("MinAtar/Breakout-v1", "inprocess") as a:
        a.reset()
        state = a.state()
        assert state is not None
        before = json.dumps(state, default=lambda x: x.tolist())
        drive(a, 100, 0)
        assert json.dumps(state, default=lambda x: x.tolist()) == before


@pytest.mark.parametrize("kind", ["inprocess", "subprocess"])
@pytest.mark.parametrize(
    ("id", "told_before"), [("LunarLander-v3", True), ("env_toys:Counter-v0", True), ("env_toys:Unsaveable-v0", False)]
)
def test_no_state_is_said_once(id: str, told_before: bool, kind: str) -> None:
    with env(id, kind) as envs:
        assert any(note.startswith("episodes in flight restart on resume: " + id) for note in envs.notes) == told_before
        envs.reset()
        assert envs.state() is None and envs.state() is None
        assert sum(note.startswith("episodes in flight restart on resume: " + id) for note in envs.notes) == 1


@pytest.mark.parametrize("kind", ["native", "inprocess"])
def test_another_number_of_environments_is_refused(kind: str) -> None:
    with env("CartPole-v1", kind) as a, env("CartPole-v1", kind, num_envs=2) as b:
        a.reset()
        state = a.state()
        assert state is not None
        with pytest.raises(ValueError, match="of 3 environments, but there are 2"):
            b.load_state(state)


def test_shared_objects_stay_shared() -> None:
    rng, numbers = np.random.RandomState(3), [1, 2]
    encoder = _Encoder()
    node = encoder.value(
        {"a": rng, "b": (rng, numbers), 3: numbers, "f": np.float32(0.1), "s": np.array([b"x", b"yz"])}
    )
    back = _Decoder(encoder.arrays).value(json.loads(json.dumps(node)))
    assert back["a"] is back["b"][0] and back["b"][1] is back[3] and back[3] == [1, 2]
    assert back["a"].rand() == rng.rand()
    assert back["f"] == np.float32(0.1) and type(back["f"]) is np.float32
    assert back["s"].tolist() == [b"x", b"yz"]
    with pytest.raises(NoSnapshot, match="set"):
        encoder.value({1, 2})
