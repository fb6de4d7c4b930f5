"""Episodes of a trained policy, as an evaluation plays them, as a video. The policy sees exactly what it saw in training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import qfleet
from qfleet import machine
from qfleet.acting.actor import FrameStack
from qfleet.acting.policy import Policy
from qfleet.config import ConfigError, EnvConfig
from qfleet.envs import Envs, ids, spaces
from qfleet.envs.atari import Atari
from qfleet.envs.base import EnvStep
from qfleet.envs.local import InProcess, env_seeds
from qfleet.runtime.evaluation import MAX_EPISODE_STEPS, Chance
from qfleet.types import Array, Spec

MIN_HEIGHT = 320  # smaller pictures (Atari, MinAtar) are enlarged by a whole factor


def record(run: str | Path, out: Path, episodes: int = 1, seed: int = 0, fps: int = 30) -> list[float]:
    """Play episodes of a run (or a checkpoint in it) into `out` (.mp4 or .gif) and return their returns."""
    if episodes < 1 or fps < 1:
        raise ConfigError(f"episodes is {episodes} and fps is {fps}, but both must be at least 1.")
    if out.suffix not in (".mp4", ".gif"):
        raise ConfigError(f"cannot record {out.name!r}: the name must end in .mp4 or .gif.")
    imageio = _imageio()
    policy = qfleet.load(run)
    env_spec = ids.find(policy.config.env.id)
    with filmed(policy.config.env, policy.spec, seed) as (envs, picture):
        chance = Chance(policy.config.runtime.eval_epsilon, seed, policy.spec.num_actions)
        frames = play(policy, envs, picture, episodes, chance)
        with ids.explained(env_spec, {}):  # drawing may need a package that stepping does not, such as pygame
            first, _ = next(frames)
        out.parent.mkdir(parents=True, exist_ok=True)
        speed = {"duration": 1000 / fps, "loop": 0} if out.suffix == ".gif" else {"fps": fps}
        returns = []
        with imageio.get_writer(out, **speed) as writer:
            writer.append_data(prepare(first))
            for frame, total in frames:
                writer.append_data(prepare(frame))
                if total is not None:
                    returns.append(total)
    return returns


def play(
    policy: Policy, envs: Envs, picture: Callable[[], Any], episodes: int, chance: Chance
) -> Iterator[tuple[Any, float | None]]:
    """Every picture of the episodes, with the return beside the last one of each."""
    stack, total, length = FrameStack(envs.spec, 1), 0.0, 0
    obs, first = envs.reset(), np.ones(1, np.bool_)
    yield picture(), None
    while episodes:
        s = envs.step(chance(policy.act(stack.push(obs, first))))
        obs, first, total, length = s.obs, s.first, total + float(s.reward[0]), length + 1
        over = bool(s.terminated[0] or s.truncated[0]) or length == MAX_EPISODE_STEPS
        yield picture(), total if over else None
        if over:
            episodes, total, length = episodes - 1, 0.0, 0


@contextmanager
def filmed(config: EnvConfig, spec: Spec, seed: int) -> Iterator[tuple[Envs, Callable[[], Any]]]:
    """One environment as in training, and a function that gives its present picture."""
    env_spec = ids.find(config.id)
    game = ids.atari_game(env_spec)
    if game is not None:
        with AtariInColour(game, config, seed) as atari:
            yield atari, lambda: atari.picture
        return
    if "rgb_array" not in (modes := _render_modes(env_spec, config)):
        raise ConfigError(
            f"{config.id} cannot be recorded: it draws {modes or 'nothing'}, but a video needs 'rgb_array'."
        )
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws into memory; looking for a screen, it complains
    env = ids.build(env_spec, {**config.kwargs, "render_mode": "rgb_array"})
    observations = spaces.observations(env.observation_space, config.id)
    actions = spaces.actions(env.action_space, config.id)
    with InProcess(config.id, spec, [env], env_seeds(seed, 1), observations, actions, []) as envs:
        yield envs, env.render


class AtariInColour(Atari):
    """The training environment and a twin of it in colour and full size.

    Both get the same seed and the same actions, so they play the same game, no-op starts and sticky actions included.
    """

    def __init__(self, game: str, config: EnvConfig, seed: int) -> None:
        super().__init__(game, config, env_seeds(seed, 1), threads=1)
        colour = {**config.kwargs, "grayscale": False, "img_height": 210, "img_width": 160}
        self._twin = Atari(game, replace(config, kwargs=colour), env_seeds(seed, 1), threads=1)

    def reset(self, seed: int | None = None) -> Array:
        self.picture: Array = self._twin.reset(seed)[0]  # [210, 160, 3]
        return super().reset(seed)

    def step(self, actions: Array) -> EnvStep:
        self.picture = self._twin.step(actions).obs[0]
        return super().step(actions)

    def close(self) -> None:
        self._twin.close()
        super().close()


def prepare(frame: Any) -> Array:
    """A picture [H, W, 3] as uint8, large enough to look at, with sides that are multiples of 16.

    A video codec resizes (and blurs) other sizes. The last row and column are repeated, so no border appears.
    """
    picture = np.asarray(frame)
    if picture.dtype != np.uint8:
        picture = np.rint(picture * 255).astype(np.uint8)  # MinAtar draws numbers in [0, 1]
    factor = -(-MIN_HEIGHT // len(picture)) if len(picture) < MIN_HEIGHT else 1
    picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, -height % 16), (0, -width % 16), (0, 0)), mode="edge")


def _render_modes(env_spec: Any, config: EnvConfig) -> list[str]:
    env = ids.build(env_spec, config.kwargs)
    modes = list(env.metadata.get("render_modes") or [])
    env.close()
    return modes


def _imageio() -> Any:
    try:
        import imageio.v2
        import imageio_ffmpeg  # noqa: F401  (imageio finds it by itself)
    except ImportError as e:
        raise ConfigError(
            f"recording a video needs {e.name}, which is not installed: {machine.install('video')}"
        ) from None
    return imageio.v2
