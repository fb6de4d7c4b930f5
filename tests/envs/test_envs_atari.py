"""Atari, against the emulator driven by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ale_py import ALEInterface, LoggerMode, roms

from qfleet.config import ConfigError, EnvConfig
from qfleet.envs import Envs, make


def atari(id: str, num_envs: int = 2, seed: int = 1, threads: int = 2, **settings: Any) -> Envs:
    return make(EnvConfig(id=id, num_envs=num_envs, **settings), seed=seed, threads=threads)


def test_every_step_equals_the_bare_emulator() -> None:
    """Rewards unclipped, ends, lives lost without a reset, and the reset row: 800 steps of Space Invaders."""
    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(roms.get_rom_path("space_invaders"))
    buttons = ale.getMinimalActionSet()
    rng = np.random.default_rng(0)
    over, lives, rewards, lost, games = False, ale.lives(), set(), 0, 0
    plain = {"noop_max": 0, "use_fire_reset": False}
    with atari("space_invaders", num_envs=1, life_loss=True, kwargs=plain) as envs:
        assert envs.spec.num_actions == len(buttons)
        envs.reset()
        for _ in range(800):
            action = int(rng.integers(len(buttons)))
            s = envs.step(np.array([action]))
            got = [float(x[0]) for x in s[1:]]
            if over:
                ale.reset_game()
                assert got == [0, 0, 0, 1, 0]
                over, lives, games = False, ale.lives(), games + 1
                continue
            reward = sum(ale.act(buttons[action]) for _ in range(4))
            over = ale.game_over()
            life = ale.lives() < lives and not over
            lives = ale.lives()
            assert got == [reward, over, 0, 0, life]
            rewards.add(reward)
            lost += life
    assert games >= 1 and lost >= 2 and max(rewards) > 1


def test_lives_are_reported_only_when_asked() -> None:
    rng = np.random.default_rng(0)
    with atari("breakout") as envs:
        envs.reset()
        steps = [envs.step(rng.integers(0, 4, 2)) for _ in range(250)]  # five lives last about 180 steps
    assert any(s.terminated.any() for s in steps) and not any(s.life_lost.any() for s in steps)


def test_the_stream_depends_on_the_seed_alone() -> None:
    """Not on the number of environments or threads; sticky actions and no-op starts are random, so seeds matter."""
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 4, (60, 4))

    def frames(num_envs: int, seed: int) -> Any:
        with atari("breakout", num_envs=num_envs, seed=seed, sticky_actions=0.25) as envs:
            out = [envs.reset()[:2].copy()]
            out += [envs.step(a).obs[:2].copy() for a in actions[:, :num_envs]]
        return np.stack(out)

    assert np.array_equal(frames(2, seed=1), frames(4, seed=1))
    assert not np.array_equal(frames(2, seed=1), frames(2, seed=2))


def test_worker_processes_play_the_same_games() -> None:
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 6, (150, 5))

    def steps(vectorize: str) -> list[Any]:
        with atari("pong", num_envs=5, seed=1, sticky_actions=0.25, life_loss=True, vectorize=vectorize, threads=2,
                   kwargs={"max_num_frames_per_episode": 400}) as envs:  # fmt: skip
            out = [envs.reset().copy()]
            for a in actions:
                envs.send(a)
                out += [field.copy() for field in envs.recv()]
            assert (envs.kind, envs.frame_skip, envs.state()) == (vectorize, 4, None)
            return out

    together, apart = steps("native"), steps("subprocess")
    assert all(np.array_equal(a, b) for a, b in zip(together, apart, strict=True))
    assert any(field.dtype == bool and field.any() for field in together)  # games were cut and began anew


def test_many_games_are_made_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.envs.MANY_GAMES", 2)
    with atari("pong", num_envs=2, threads=3) as few, atari("pong", num_envs=3, threads=3) as many:
        assert (few.kind, few.threads) == ("native", 3)
        assert (many.kind, many.threads) == ("subprocess", 4)  # two workers of two threads


@pytest.mark.parametrize("id", ["pong", "Pong", "ALE/Pong-v5", "PongNoFrameskip-v4", "Pong-v4"])
def test_names(id: str) -> None:
    with atari(id, num_envs=1, frame_stack=4) as envs:
        assert envs.kind == "native"
        assert (envs.spec.obs_shape, envs.spec.obs_dtype, envs.spec.num_actions) == ((84, 84), "uint8", 6)
        assert envs.spec.input_shape == (4, 84, 84)


def test_long_names() -> None:
    with atari("SpaceInvaders", num_envs=1) as envs:
        assert any("space_invaders" in note for note in envs.notes)


def test_notes_tell_the_protocol_and_what_resume_cannot() -> None:
    with atari("pong", num_envs=1, sticky_actions=0.25, life_loss=True) as envs:
        assert "sticky actions 0.25" in envs.notes[0] and "lost life" in envs.notes[0]
        assert envs.notes[1].startswith("episodes in flight restart on resume")
        assert envs.state() is None
        with pytest.raises(ValueError, match="no state"):
            envs.load_state({})


def test_a_cut_game_is_truncated() -> None:
    with atari("pong", num_envs=1, kwargs={"max_num_frames_per_episode": 40}) as envs:
        envs.reset()
        flags = [
            (bool(s.truncated[0]), bool(s.first[0])) for s in (envs.step(np.zeros(1, np.int64)) for _ in range(11))
        ]
    assert flags == [(False, False)] * 9 + [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kwargs": {"stack_num": 4}}, "env.frame_stack"),
        ({"kwargs": {"repeat_action_probability": 0.25}}, "env.sticky_actions"),
        ({"kwargs": {"autoreset_mode": "SameStep"}}, "leave it out"),
        ({"kwargs": {"colour": True}}, "do not suit Atari"),
        ({"vectorize": "inprocess"}, "use native"),
    ],
)
def test_messages(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(EnvConfig(id="pong", **settings), seed=1)
