import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

import qfleet
from qfleet import envs, networks, recipes, video
from qfleet.acting.policy import Policy
from qfleet.config import Config, override
from qfleet.envs.atari import Atari
from qfleet.envs.local import env_seeds


class Blind(gym.Env):
    """Draws nothing."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}


gym.register("Blind-v0", entry_point=Blind)


def untrained(config: Config) -> Policy:
    torch.manual_seed(3)
    with envs.make(config.env, seed=1, num_envs=1, threads=1) as made:
        return Policy(networks.build(config, made.spec), config, made.spec)


@pytest.fixture
def policy_of(monkeypatch):
    """qfleet.load gives an untrained policy of this environment."""

    def use(env_id: str, **overrides: object) -> Policy:
        policy = untrained(override(recipes.make("dqn", env_id), overrides))
        monkeypatch.setattr(qfleet, "load", lambda run: policy, raising=False)
        return policy

    return use


def read(path: Path, height: int, width: int) -> np.ndarray:
    """The frames of an mp4 [N, height, width, 3], decoded by ffmpeg itself."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def test_every_step_is_a_frame(tmp_path, policy_of):
    policy_of("CartPole-v1")
    out = tmp_path / "new" / "episode.mp4"
    returns = video.record("run", out, episodes=2, seed=3)
    # CartPole gives 1 per step, so the steps can be counted; each episode has one picture more than steps.
    assert len(returns) == 2 and len(read(out, 400, 608)) == sum(returns) + 2


def test_a_gif_loops_at_the_speed_asked_for(tmp_path, policy_of):
    policy_of("CartPole-v1")
    (total,) = video.record("run", tmp_path / "e.gif", seed=3, fps=25)
    with Image.open(tmp_path / "e.gif") as gif:
        assert gif.size == (608, 400) and gif.info["loop"] == 0
        shown = [frame.info["duration"] for frame in ImageSequence.Iterator(gif)]
    assert sum(shown) == 40 * (total + 1)  # milliseconds; equal pictures are merged into one that stays longer


def test_the_same_seed_records_the_same_episode_and_another_does_not(tmp_path, policy_of):
    policy_of("CartPole-v1")
    out = tmp_path / "e.gif"
    first = video.record("run", out, episodes=2, seed=1)
    assert video.record("run", out, episodes=2, seed=1) == first
    assert any(video.record("run", out, episodes=2, seed=s) != first for s in (2, 3, 4))


def test_an_endless_episode_is_cut(tmp_path, policy_of, monkeypatch):
    monkeypatch.setattr(video, "MAX_EPISODE_STEPS", 5)
    policy_of("CartPole-v1")
    assert video.record("run", tmp_path / "e.gif", seed=3) == [5.0]


def test_minatar_is_enlarged(tmp_path, policy_of, monkeypatch):
    monkeypatch.setattr(video, "MAX_EPISODE_STEPS", 3)
    policy_of("MinAtar/Breakout-v1")
    video.record("run", tmp_path / "e.mp4")
    assert len(read(tmp_path / "e.mp4", 320, 320)) == 4


def small_and_grey(picture: np.ndarray) -> np.ndarray:
    """[210, 160, 3] -> [84, 84]: luminance, then means over areas."""
    luminance = picture @ np.array([0.299, 0.587, 0.114])
    return luminance.repeat(2, axis=0).repeat(21, axis=1).reshape(84, 5, 84, 40).mean(axis=(1, 3))


def test_atari_is_seen_as_in_training_and_filmed_in_colour():
    config = override(recipes.make("dqn", "breakout"), {"env.sticky_actions": 0.25}).env
    actions = np.random.default_rng(0).integers(4, size=(400, 1))
    ends = 0
    with (
        Atari("breakout", config, env_seeds(7, 1), threads=1) as plain,
        video.AtariInColour("breakout", config, 7) as filmed,
    ):
        np.testing.assert_array_equal(filmed.reset(), plain.reset())
        for action in actions:
            seen, expected = filmed.step(action), plain.step(action)
            for name in ("obs", "reward", "terminated", "first"):
                np.testing.assert_array_equal(getattr(seen, name), getattr(expected, name), err_msg=name)
            ends += int(seen.terminated[0])
            # The twin plays the same game: its picture, made grey and small, is what the policy sees. (Maxima over two
            # frames are taken per colour, so a moving pixel may differ.)
            off = np.abs(small_and_grey(filmed.picture) - seen.obs[0]) > 2
            assert off.mean() < 0.005
    assert ends >= 1, "the test must cover the start of a new game"


def test_atari_is_recorded(tmp_path, policy_of, monkeypatch):
    monkeypatch.setattr(video, "MAX_EPISODE_STEPS", 6)
    policy = policy_of("pong")
    shapes = []
    act = policy.act
    monkeypatch.setattr(policy, "act", lambda obs: shapes.append(obs.shape) or act(obs))
    video.record("run", tmp_path / "e.mp4")
    frames = read(tmp_path / "e.mp4", 432, 320)
    assert len(frames) == 7
    assert shapes == [(1, 4, 84, 84)] * 6
    red, green, blue = frames[-1][200, 100].astype(int)  # Pong's court is brown
    assert red > green > blue


def test_prepare_pads_without_a_border_and_keeps_pixels():
    frame = np.random.default_rng(0).integers(256, size=(401, 600, 3), dtype=np.uint8)
    padded = video.prepare(frame)
    assert padded.shape == (416, 608, 3)
    np.testing.assert_array_equal(padded[:401, :600], frame)
    np.testing.assert_array_equal(padded[401:, :600], np.broadcast_to(frame[-1], (15, 600, 3)))
    tiny = video.prepare(np.array([[[0.0, 0.5, 1.0]]]))  # one pixel of numbers in [0, 1]
    assert tiny.shape == (320, 320, 3) and (tiny == np.array([0, 128, 255], np.uint8)).all()


def test_what_cannot_be_recorded_is_refused(tmp_path, policy_of, monkeypatch):
    with pytest.raises(ValueError, match=r"'e\.avi'.*\.mp4 or \.gif"):
        video.record("run", tmp_path / "e.avi")
    with pytest.raises(ValueError, match="episodes is 0"):
        video.record("run", tmp_path / "e.mp4", episodes=0)
    policy_of("Blind-v0", **{"env.vectorize": "inprocess"})
    with pytest.raises(ValueError, match=r"Blind-v0 cannot be recorded: it draws nothing"):
        video.record("run", tmp_path / "e.mp4")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ValueError, match=r'needs imageio_ffmpeg.*pip install "qfleet\[video\]"'):
        video.record("run", tmp_path / "e.mp4")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_drawing_package_is_named(tmp_path, policy_of, monkeypatch):
    policy_of("CartPole-v1")
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ValueError, match="CartPole-v1 needs a package that is not installed: pygame"):
        video.record("run", tmp_path / "e.mp4")
