"""What a step means, the same in every kind: next-step reset, own seeds, ids and messages."""

from __future__ import annotations

import sys
from typing import Any

import env_toys
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from qfleet import rng
from qfleet.config import ConfigError, EnvConfig
from qfleet.envs import Envs, make


def env(id: str, num_envs: int = 2, seed: int = 1, threads: int = 2, **settings: Any) -> Envs:
    return make(EnvConfig(id=id, num_envs=num_envs, **settings), seed=seed, threads=threads)


def stream(envs: Envs, steps: int, seed: int = 0) -> list[Any]:
    """Everything that comes out of `steps` random steps after a reset."""
    actions = np.random.default_rng(seed).integers(0, envs.spec.num_actions, (steps, envs.num_envs))
    out = [envs.reset().copy()]
    for a in actions:
        out.extend(x.copy() for x in envs.step(a))
    return out


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["inprocess", "subprocess"])
@pytest.mark.parametrize("cut", [False, True])
def test_the_step_after_an_end_is_a_reset(kind: str, cut: bool) -> None:
    rows = []
    with env("env_toys:Counter-v0", num_envs=3, vectorize=kind, kwargs={"length": 2, "cut": cut}) as envs:
        assert envs.kind == kind
        assert envs.reset().tolist() == [[1, 0, -1]] * 3
        for action in (3, 2, 1, 0):
            s = envs.step(np.array([0, action, 0]))
            assert not s.life_lost.any()
            rows.append((s.obs[1].tolist(), *(float(x[1]) for x in s[1:5])))
    assert rows == [  # obs, reward, terminated, truncated, first
        ([1, 1, 3], 4, 0, 0, 0),
        ([1, 2, 2], 3, not cut, cut, 0),
        ([2, 0, -1], 0, 0, 0, 1),  # the action 1 was ignored
        ([2, 1, 0], 1, 0, 0, 0),
    ]


@pytest.mark.parametrize("id", ["Acrobot-v1", "LunarLander-v3"])
def test_worker_processes_give_the_same_stream(id: str) -> None:
    with env(id, num_envs=3, vectorize="inprocess") as a, env(id, num_envs=3, vectorize="subprocess") as b:
        assert same(stream(a, 300), stream(b, 300))


@pytest.mark.parametrize("kind", ["inprocess", "native"])
def test_seeds_decide_the_stream(kind: str) -> None:
    runs = []
    for seed in (1, 1, 2):
        with env("CartPole-v1", seed=seed, vectorize=kind) as envs:
            runs.append(stream(envs, 100))
    assert same(runs[0], runs[1]) and not same(runs[0], runs[2])
    assert not np.array_equal(runs[0][0][0], runs[0][0][1])  # and every environment has its own


def test_each_environment_gets_its_own_seed() -> None:
    with env("CartPole-v1", num_envs=2, seed=7, vectorize="inprocess") as envs:
        got = envs.reset()
        for i in range(2):
            single = gym.make("CartPole-v1")
            assert np.array_equal(got[i], single.reset(seed=rng.derive(7, f"environment {i}"))[0])


@pytest.mark.parametrize("kind", ["inprocess", "native", "subprocess"])
def test_only_the_first_reset_is_seeded_unless_asked(kind: str) -> None:
    with env("CartPole-v1", vectorize=kind) as envs:
        first, second = envs.reset().copy(), envs.reset().copy()
        assert not np.array_equal(first, second)
        assert np.array_equal(envs.reset(seed=1), first)


def test_step_time_decides_the_kind() -> None:
    with env("env_toys:Slow-v0", num_envs=8) as slow, env("env_toys:Counter-v0", num_envs=8) as fast:
        assert (slow.kind, fast.kind) == ("subprocess", "inprocess")
    with env("env_toys:Slow-v0", num_envs=8, threads=1) as alone:
        assert alone.kind == "inprocess"


def test_an_environment_of_the_main_script_stays_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_toys.Slow, "__module__", "__main__")
    monkeypatch.setitem(gym.registry, "Main-v0", gym.envs.registration.EnvSpec("Main-v0", env_toys.Slow))
    with env("Main-v0", num_envs=8) as envs:
        assert envs.kind == "inprocess"
        assert any("main script" in note for note in envs.notes)
    with pytest.raises(ConfigError, match="move it to a module"):
        env("Main-v0", vectorize="subprocess")


def test_a_registration_that_cannot_travel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gym.envs.registration.EnvSpec("Lambda-v0", lambda: env_toys.Counter())
    monkeypatch.setitem(gym.registry, "Lambda-v0", spec)
    with pytest.raises(ConfigError, match="cannot be sent to a worker"):
        env("Lambda-v0", vectorize="subprocess")


def test_wrong_observations_are_found() -> None:
    with (
        env("env_toys:WrongShape-v0", vectorize="inprocess") as envs,
        pytest.raises(RuntimeError, match=r"shape \(1,\)"),
    ):
        envs.reset()


def test_module_ids_import_from_the_working_directory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(
        "import gymnasium as gym\nfrom env_toys import Counter\ngym.register('Mine-v0', Counter)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    with env("my_tasks:Mine-v0", vectorize="subprocess") as envs:
        assert envs.reset().tolist() == [[1, 0, -1]] * 2
    gym.registry.pop("Mine-v0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "CartPol-v1"}, r"no environment 'CartPol-v1'. Did you mean CartPole-v1"),
        ({"id": "Ponk"}, "Did you mean pong"),
        ({"id": "env_toys:Countr-v0"}, "Did you mean env_toys:Counter-v0"),
        ({"id": "LunarLander-v2"}, "Did you mean LunarLander-v3"),
        ({"id": "MinAtar/Breakot-v1"}, "MinAtar/Breakout-v1"),
        ({"id": "no_such_module:Maze-v0"}, "cannot import 'no_such_module'"),
        ({"id": "Pendulum-v1"}, "DQN needs discrete actions"),
        ({"id": "CartPole-v1", "kwargs": {"gravty": 1}}, "env.kwargs .* do not suit CartPole-v1.*gravty"),
        ({"id": "MountainCar-v0", "kwargs": {"gravty": 1}}, "env.kwargs .* do not suit MountainCar-v0.*gravty"),
        ({"id": "MountainCar-v0", "vectorize": "native"}, "no vector form"),
        ({"id": "CartPole-v1", "sticky_actions": 0.25}, "are for Atari"),
    ],
)
def test_messages(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(EnvConfig(**settings), seed=1)


@pytest.mark.parametrize(
    ("id", "package", "forget", "message"),
    [
        ("LunarLander-v3", "Box2D", "gymnasium.envs.box2d", r"qfleet\[box2d\]"),
        ("MinAtar/Seaquest-v1", "minatar", "minatar", r"qfleet\[minatar\]"),
    ],
)
def test_a_missing_package_is_named(
    id: str, package: str, forget: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m == forget or m.startswith(forget + ".")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    if package == "minatar":
        monkeypatch.delitem(gym.registry, id, raising=False)
    with pytest.raises(ConfigError, match=message):
        make(EnvConfig(id=id), seed=1)


def test_constructor_arguments_arrive() -> None:
    with env("MinAtar/Breakout-v1", kwargs={"use_minimal_action_set": False}) as envs:
        assert envs.spec.num_actions == 6
        assert (envs.spec.obs_shape, envs.spec.obs_dtype) == ((10, 10, 4), "bool")


def test_frame_stack_is_in_the_spec() -> None:
    with env("CartPole-v1", frame_stack=4) as envs:
        assert envs.spec.input_shape == (4, 4)


def test_a_converted_observation_is_noted() -> None:
    with env("env_toys:Coded-v0", kwargs={"observed": spaces.Discrete(3, start=5), "values": [5, 7]}) as envs:
        assert envs.reset().tolist() == [[1, 0, 0]] * 2
        assert envs.step(np.zeros(2, np.int64)).obs.tolist() == [[0, 0, 1]] * 2
        assert any("one-hot" in note for note in envs.notes)
