"""Any gymnasium id in, streams of steps out. Autoreset is settled here and nowhere else.

`make` finds the environment (ids), translates its spaces (spaces) and steps it in one of four ways, all with the same
`Envs` interface and the same meaning of a step (base): native, inprocess (local), subprocess, atari.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from qfleet import machine
from qfleet.config import ConfigError, EnvConfig
from qfleet.envs import ids, native, spaces, subprocess
from qfleet.envs import state as states
from qfleet.envs.atari import FRAME_SKIP, Atari, Maker, Vector, spec_and_notes
from qfleet.envs.base import Envs, EnvStep, note_restart
from qfleet.envs.local import InProcess, env_seeds

if TYPE_CHECKING:
    from qfleet.types import Spec

__all__ = ["EnvStep", "Envs", "make", "make_groups"]

MANY_GAMES = 32  # Atari games from which on worker processes make and step them
GAMES_EACH = 64  # at most, if there are cores: a worker makes one after the other
PROBE_SECONDS = 0.03  # how long `auto` measures
WAKE_SECONDS, MESSAGE_SECONDS = 60e-6, 20e-6  # what workers cost a vector step: once, and for each of them (measured)


def make(
    config: EnvConfig,
    *,
    seed: int,
    num_envs: int | None = None,
    threads: int = 0,
    wait: bool = True,
    nice: int = 0,
) -> Envs:
    """num_envs (by default config.num_envs) environments, each with its own seed; threads 0 means one per core.

    Of worker processes: `wait` until they have made their environments (otherwise the first reset waits), `nice` priority.
    """
    num_envs = num_envs or config.num_envs
    env_spec = ids.find(config.id)
    game = ids.atari_game(env_spec)
    if game is not None:
        return _atari(game, config, env_seeds(seed, num_envs), threads or machine.cores(), wait, nice)
    if config.sticky_actions or config.life_loss:
        raise ConfigError(
            f"env.sticky_actions and env.life_loss are for Atari games; {config.id} is none: leave them out."
        )

    notes: list[str] = []
    vec = _native(config, env_spec, num_envs, notes)
    # Without a vector, one environment is made and thrown away: it tells the spaces and the speed.
    sample: Any = ids.build(env_spec, config.kwargs) if vec is None else vec
    single = "" if vec is None else "single_"
    observations = spaces.observations(getattr(sample, f"{single}observation_space"), config.id)
    actions = spaces.actions(getattr(sample, f"{single}action_space"), config.id)
    spec = _spec(observations, actions, config.frame_stack)
    if observations.note:
        notes.append(observations.note)
    if why := states.obstacle(sample):
        note_restart(notes, config.id, why)
    if vec is not None:
        return native.Native(config.id, spec, vec, seed, observations, actions, notes)

    workers = threads or machine.cores()
    kind = _choose(config, env_spec, sample, actions, num_envs, workers, notes)
    sample.close()
    seeds = env_seeds(seed, num_envs)
    if kind == "subprocess":
        maker = subprocess.GymMaker(env_spec, dict(config.kwargs), config.id.rpartition(":")[0])
        return subprocess.Subprocess(config.id, spec, maker, seeds, workers, notes, wait=wait, nice=nice)
    envs = [ids.build(env_spec, config.kwargs) for _ in range(num_envs)]
    return InProcess(config.id, spec, envs, seeds, observations, actions, notes)


def make_groups(
    config: EnvConfig, *, seed: int, groups: int, threads: int, wait: bool = True, nice: int = 0
) -> list[Envs]:
    """config.num_envs environments in equal groups that step independently of each other, made at the same time."""
    if groups == 1:
        return [make(config, seed=seed, threads=threads, wait=wait, nice=nice)]
    size, share = config.num_envs // groups, max(1, threads // groups)

    def one(group: int) -> Envs:
        return make(config, seed=seed + group, num_envs=size, threads=share, wait=wait, nice=nice)

    with ThreadPoolExecutor(groups) as pool:
        made = [pool.submit(one, group) for group in range(groups)]
    failed = [error for future in made if (error := future.exception())]
    if failed:
        for future in made:
            if future.exception() is None:
                future.result().close()
        raise failed[0]
    return [future.result() for future in made]


def _atari(game: str, config: EnvConfig, seeds: Sequence[int], threads: int, wait: bool, nice: int) -> Envs:
    """In this process, or in worker processes where there are so many games that making them takes long.

    Few workers with several threads each: the games of a worker go to its threads as these become free, so one that takes
    longer (it resets) holds up less than in many workers with a fixed share each.
    """
    if config.vectorize == "inprocess":
        raise ConfigError(
            "env.vectorize is 'inprocess', but Atari games are stepped by threads or processes: use native."
        )
    many = config.vectorize == "auto" and len(seeds) > MANY_GAMES and threads > 2
    if config.vectorize != "subprocess" and not many:
        return Atari(game, config, seeds, threads)
    one = Vector(game, config, 1, 1)
    one.close()
    spec, notes = spec_and_notes(game, config, one)
    workers = min(threads, max(2, -(-len(seeds) // GAMES_EACH)))
    maker = Maker(game, config, threads=max(2, threads // workers))
    return subprocess.Subprocess(game, spec, maker, seeds, workers, notes, FRAME_SKIP, wait, nice)


def _spec(observations: spaces.Observations, actions: spaces.Actions, frame_stack: int) -> Spec:
    from qfleet.types import Spec  # imports torch, which worker processes do without

    return Spec(
        obs_shape=observations.shape,
        obs_dtype=observations.dtype,
        num_actions=actions.count,
        frame_stack=frame_stack,
    )


def _native(config: EnvConfig, env_spec: Any, num_envs: int, notes: list[str]) -> Any | None:
    """The environment's own vector form, if it has a usable one and nothing else is asked for."""
    if config.vectorize not in ("auto", "native"):
        return None
    if env_spec.vector_entry_point is None:
        if config.vectorize == "native":
            raise ConfigError(
                f"env.vectorize is 'native', but {config.id} has no vector form: use auto, inprocess or subprocess."
            )
        return None
    try:
        return native.build(env_spec, config.kwargs, num_envs)
    except native.WrongReset as e:
        if config.vectorize == "native" or env_spec.entry_point is None:
            raise
        notes.append(f"stepped one by one: {e}")
        return None


def _choose(
    config: EnvConfig,
    env_spec: Any,
    sample: gym.Env[Any, Any],
    actions: spaces.Actions,
    num_envs: int,
    workers: int,
    notes: list[str],
) -> str:
    """In this process or in workers: what was asked for, or whatever the measured step time makes faster."""
    if config.vectorize == "inprocess":
        return "inprocess"
    why_not = subprocess.obstacle(env_spec)
    if config.vectorize == "subprocess":
        if why_not:
            raise ConfigError(f"env.vectorize is 'subprocess', but {config.id} cannot run in one: {why_not}.")
        return "subprocess"
    workers = min(workers, num_envs)
    if workers == 1:
        return "inprocess"
    try:
        step = _step_seconds(sample, actions)
    except Exception as e:
        e.add_note(
            f"It failed while its speed was measured for {PROBE_SECONDS:g} s, before the run: --env.vectorize inprocess, or subprocess, leaves that out."
        )
        raise
    together = num_envs * step
    apart = -(-num_envs // workers) * step + WAKE_SECONDS + workers * MESSAGE_SECONDS
    if apart > 0.7 * together:  # a small gain is lost again when the learner wants the cores
        return "inprocess"
    if why_not:
        notes.append(f"{config.id} would be faster in worker processes, but {why_not}")
        return "inprocess"
    return "subprocess"


def _step_seconds(env: gym.Env[Any, Any], actions: spaces.Actions) -> float:
    """Typical time of a step, with its share of the resets.

    A mean would count the time other processes take, and so choose workers just when there is no core for them. Median and
    minimum do not; nor do they overlook an environment that waits for its simulator, as CPU time would.
    """
    cycle = actions.each(np.arange(min(actions.count, 64)))
    env.reset(seed=0)
    steps: list[float] = []
    resets: list[float] = []
    end = time.perf_counter() + PROBE_SECONDS
    while len(steps) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(cycle[len(steps) % len(cycle)])
        stepped = time.perf_counter()
        steps.append(stepped - began)
        if terminated or truncated:
            env.reset()
            resets.append(time.perf_counter() - stepped)
    return float(np.median(steps)) + min(resets, default=0.0) * len(resets) / len(steps)
