"""The config tree: overrides, conversions, and messages that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfleet import config as configs
from qfleet import recipes
from qfleet.api import compose
from qfleet.config import Config, ConfigError, override


def test_override_converts_text_to_the_type_of_the_field() -> None:
    c = override(
        Config(),
        {
            "learner.lr": "3e-4",
            "network.hidden": "64,32",
            "learner.double": "true",
            "total_steps": "1e5",
            "runtime.stop-at": "475",
            "learner.compile": True,
        },
    )
    assert c.learner.lr == 3e-4
    assert c.network.hidden == (64, 32)
    assert c.learner.double is True
    assert c.total_steps == 100_000 and isinstance(c.total_steps, int)
    assert c.runtime.stop_at == 475.0
    assert c.learner.compile == "on"
    assert override(c, {"runtime.stop_at": "none"}).runtime.stop_at is None
    assert override(c, {"network.hidden": "[64, 32]"}).network.hidden == (64, 32)


def test_names_from_elsewhere_lead_to_settings_there_are() -> None:
    known = {path for path, _, _ in configs.paths()}
    assert set(configs.ELSEWHERE.values()) <= known and not known & set(configs.ELSEWHERE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replay.capcity": 5}, r"unknown setting 'replay.capcity'. Did you mean replay.capacity"),
        ({"lr": 1}, r"unknown setting 'lr'. Did you mean learner.lr"),
        ({"learning_rate": 1}, r"unknown setting 'learning_rate'. Did you mean learner.lr"),
        ({"replay.buffer_size": 1}, r"Did you mean replay.capacity"),
        ({"learner.batch_size": 10**6}, r"no update would ever be made"),
        ({"acting.hold": 0}, r"acting.hold is 0, but it must be at least 1"),
        ({"runtime.eval_epsilon": 1.5}, r"runtime.eval_epsilon is 1.5, but it must be between 0 and 1"),
        ({"learner.lr": "fast"}, r"learner.lr is 'fast', but it must be a number"),
        ({"learner.lr": -1}, r"learner.lr is -1.0, but it must be positive"),
        ({"total_steps": "1.5"}, r"total_steps is '1.5', but it must be a whole number"),
        ({"network.hidden": "64,wide"}, r"network.hidden is 'wide', but it must be a whole number"),
        ({"network.hidden": 6.4}, r"network.hidden is 6.4, but it must be whole numbers, as in 256,256"),
        ({"sync.weights": 3.1}, r"sync.weights is 3.1, but it must be numbers, as in 3,1"),
        (
            {"sync.damping": "sqrt"},
            r"sync.damping is 'sqrt', but it has no effect with sync.mode sync: leave it out, or use --sync.mode async or ssp",
        ),
        (
            {"sync.mode": "async", "sync.window": 3},
            r"sync.window is 3, but it has no effect with sync.mode async: .* --sync.mode window\.",
        ),
        ({"sync.mode": "async", "sync.rho": 1.0}, r"sync.rho is 1.0, but it has no effect with sync.mode async"),
        (
            {"sync.mode": "window", "sync.staleness": 0},
            r"sync.staleness is 0, but it has no effect with sync.mode window",
        ),
        ({"sync.local_steps": 8}, r"no effect with sync.mode sync: .* localsgd or diloco or easgd or admm"),
        ({"sync.topk": 0.1}, r"sync.topk is 0.1, but it has no effect with sync.codec fp32: .* --sync.codec topk"),
        (
            {"sync.transport": "allreduce", "sync.servers": 2},
            r"no effect with sync.transport allreduce: .* server or auto",
        ),
        (
            {"learners": 4, "total_steps": 1200, "learner.batch_size": 512},
            r"batch_size \* learners / samples_per_step.*no update would ever be made",
        ),
        (
            {"learners": 2, "total_steps": 1200, "sync.mode": "diloco"},
            r"1,200 steps are 12 updates of each learner, but in diloco they meet every 16 \(sync.local_steps\)",
        ),
        ({"learner.double": "maybe"}, r"learner.double is 'maybe', but it must be true or false"),
        ({"learner.optimizer": "adm"}, r"allowed: adam, rmsprop, sgd. Did you mean adam"),
        ({"network.kind": "natur"}, r"Did you mean nature"),
        ({"runtime.schedule": "pipelined"}, r"add --runtime.lag 1"),
        ({"replay.min_steps": 10**6}, r"no update would ever be made"),
        ({"replay.capacity": 8}, r"raise it to at least"),
        ({"learner.munchausen": True, "learner.double": True}, r"exclude each other"),
        ({"learner.munchausen": True, "network.dist": "c51"}, r"not c51"),
        ({"network.v_max": -20.0}, r"above network.v_min"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(Config(), values)


def test_settings_of_a_mode_are_taken_by_it() -> None:
    for name, (other, values) in configs.ONLY_WITH.items():
        default = getattr(configs.SyncConfig(), name)
        given: object = {str: "sqrt", bool: not default, float: 0.25}.get(type(default), 2)
        for value in values:
            transport = {"sync.transport": "allreduce"} if value == "powersgd" else {}
            made = override(Config(), {f"sync.{name}": given, f"sync.{other}": value, **transport})
            assert getattr(made.sync, name) == given != default
    # One learner makes all updates: nobody is met. Two make half as many, enough for shorter steps.
    override(Config(), {"total_steps": 1200, "sync.mode": "diloco"})
    override(Config(), {"learners": 2, "total_steps": 1200, "sync.mode": "diloco", "sync.local_steps": 12})
    override(Config(), {"learners": 2, "total_steps": 1200, "learner.batch_size": 512})


@pytest.mark.parametrize("recipe", recipes.NAMES)
@pytest.mark.parametrize("env", ["CartPole-v1", "LunarLander-v3", "MinAtar/Breakout-v1", "pong", "Other-v0"])
def test_every_recipe_is_complete_and_survives_yaml(recipe: str, env: str, tmp_path: Path) -> None:
    c = recipes.make(recipe, env)
    configs.dump_yaml(c, tmp_path / "c.yaml", {"torch": "2.13"})
    values = {k: v for k, v in configs.load_yaml(tmp_path / "c.yaml").items() if not k.startswith("resolved")}
    assert override(Config(), values) == c


def test_unknown_recipe_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'rainbo'. Did you mean rainbow"):
        recipes.make("rainbo", "CartPole-v1")


@pytest.mark.parametrize(
    ("env", "family"),
    [
        ("CartPole-v1", "cartpole"),
        ("MountainCar-v0", "mountaincar"),
        ("MountainCarContinuous-v0", "general"),
        ("mypackage.envs:LunarLander-v3", "lunarlander"),
        ("MinAtar/Freeway-v1", "minatar"),
        ("pong", "atari"),
        ("ALE/Breakout-v5", "atari"),
        ("PongNoFrameskip-v4", "atari"),
        ("mypackage:Task-v0", "general"),
    ],
)
def test_family(env: str, family: str) -> None:
    assert recipes.family(env) == family


@pytest.mark.parametrize("env_id", ["pong", "ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_on_a_gpu_a_game_can_have_settings_of_its_own(env_id: str) -> None:
    def of(recipe: str, name: str, gpu: bool) -> tuple[int, int]:
        learner = recipes.make(recipe, name, gpu=gpu).learner
        return learner.batch_size, learner.n_step

    assert of("double", env_id, gpu=True) == (128, 3)
    assert of("double", "space_invaders", gpu=True) == (128, 1)  # of its family
    assert of("dqn", env_id, gpu=True) == (256, 1)
    assert of("double", env_id, gpu=False) == (32, 1)
    assert recipes.game("ALE/SpaceInvaders-v5") == "space_invaders"


@pytest.mark.parametrize(
    ("num_envs", "expected"), [(128, 2), (511, 1), (510, 2), (512, 4), (514, 2), (1024, 4), (7, 1)]
)
def test_games_on_a_gpu_are_divided_into_equal_groups(num_envs: int, expected: int) -> None:
    assert recipes.groups(recipes.make("double", "pong", gpu=True), num_envs) == expected
    assert recipes.groups(recipes.make("double", "CartPole-v1", gpu=True), num_envs) == 1
    given = {"env.num_envs": str(num_envs), "device": "cuda", "address": "elsewhere:1"}
    assert compose("pong", "double", None, given).runtime.groups == expected
    assert compose("pong", "double", None, {**given, "runtime.groups": 1}).runtime.groups == 1


def test_yaml_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        configs.load_yaml(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        configs.load_yaml(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="must hold settings"):
        configs.load_yaml(tmp_path / "list.yaml")
