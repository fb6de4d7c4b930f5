"""Before the first round: what depends on the machine is settled, said, and the run's folder made."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from qfleet import __version__, envs, machine
from qfleet.config import Config, ConfigError, override
from qfleet.device import gpu, gpu_count, has_bf16, has_gpu
from qfleet.replay import Replay


def pick_device(name: str, same_as: torch.device | None = None) -> str:
    if name == "auto":
        return str(same_as) if same_as is not None else "cuda" if has_gpu() else "cpu"
    if name != "cpu" and not re.fullmatch(r"cuda(:\d+)?", name):
        raise ConfigError(
            f"device is {name!r}; allowed are auto, cpu, cuda and cuda:N. (ROCm GPUs are called cuda, too.)"
        )
    if name != "cpu" and not has_gpu():
        raise ConfigError(f"device is {name!r}, but torch sees no GPU here. Use --device cpu, or run `qfleet doctor`.")
    return name


def kind_of(name: str) -> str:
    """cpu or cuda: what `auto` is on this machine; a GPU that was asked for may be on another one."""
    return pick_device(name) if name == "auto" else name.partition(":")[0]


def device_of(name: str, local: int = 0) -> torch.device:
    """The device of that name, numbered, so that equal devices compare equal: `cuda` alone is the current one, or, with several
    learners on this machine, that of the learner's number among them."""
    if name != "cuda":
        return torch.device(name)
    return gpu(local % gpu_count() if local else None)


def resolve(config: Config, made: envs.Envs, device: torch.device, replay_device: torch.device) -> Config:
    """What may depend on the machine, settled once: a resumed or repeated run reads it from config.yaml."""
    # Overlapping pays only with a core left over for the environments: on 2 cores a learner of 2 threads that shares
    # them trains Pong at 157 steps/s, and in turn with them at 186 (same lag, same numbers).
    busy = config.learner.threads if device.type == "cpu" else 1
    pipelined = config.runtime.lag == 1 and machine.cores() > busy
    if device != replay_device and device.type == replay_device.type:
        raise ConfigError(
            f"replay.device is {config.replay.device!r} and device {str(device)!r}, two GPUs: the replay lives on the learner's, or in main memory. Leave replay.device out, or say cpu."
        )
    if config.runtime.schedule == "streams" and device != replay_device:
        raise ConfigError(
            f"runtime.schedule is 'streams', which keeps replay and learner on one device, but replay.device is {config.replay.device!r} and device {str(device)!r}. Leave the schedule or replay.device out."
        )
    choices: dict[str, Any] = {
        "device": device.type if config.learners > 1 and config.device in ("auto", "cuda") else str(device),
        "learner.compile": compile_choice(config),
        "env.vectorize": made.kind,
    }
    if config.learner.precision == "auto":
        # The values of a user's own network would be bf16, too; those of ours are not.
        low = device.type == "cuda" and ":" not in config.network.kind
        choices["learner.precision"] = "bf16" if low and has_bf16() else "fp32"
    if config.runtime.schedule == "auto":
        streams = config.runtime.lag == 1 and device == replay_device and device.type == "cuda"
        choices["runtime.schedule"] = "streams" if streams else "pipelined" if pipelined else "serial"
    return override(config, choices)


def compile_choice(config: Config) -> str:
    """On the CPU compiling does not pay: plain MLPs have a hand-written gradient that is faster, and the others gain less
    in a run than the half minute it takes (docs/design.md has the figures). So `auto` is off; without a compiler, so is `on`.
    """
    wanted = config.learner.compile == "on"
    return "on" if wanted and compiler() is not None else "off"


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on the CPU."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def summary(config: Config, made: envs.Envs, replay_device: str, threads: int = 0) -> list[str]:
    """What is about to run, in a few lines: the choices that matter and what the replay will take."""
    c, n = config.learner, config.network
    parts = [
        name
        for name, on in (
            ("double", c.double),
            ("dueling", n.dueling),
            ("noisy", n.noisy),
            ("munchausen", c.munchausen),
            ("prioritised", config.replay.prioritized),
        )
        if on
    ]
    dist = f"c51 for returns from {n.v_min:g} to {n.v_max:g}" if n.dist == "c51" else n.dist
    algorithm = ", ".join([dist, *parts, f"n-step {c.n_step}", f"γ {c.gamma:g}"])
    size = Replay.memory(config, made.spec)
    auto = config.runtime.schedule == "auto"  # of learners on other machines
    schedule = "schedule by machine" if auto else config.runtime.schedule
    groups = f", {config.runtime.groups} groups" if config.runtime.groups > 1 else ""
    stepped = f"{made.kind}{groups}{f', {threads} threads' if threads > 1 else ''}"
    network = n.kind if ":" in n.kind else f"{n.kind} {'×'.join(map(str, n.hidden))}"
    where = f"learner on {config.device} with {c.threads} thread{'s' if c.threads > 1 else ''}"
    if config.device != "cpu":
        where = f"learner on {config.device} in {c.precision}, actions on {config.acting.device}"
    lines = [
        f"  environments  {config.env.num_envs} × {config.env.id} ({stepped}); observations {made.spec.input_shape} {made.spec.obs_dtype}, {made.spec.num_actions} actions",
        f"  algorithm     {algorithm}; network {network}",
        f"  learning      batch {c.batch_size}{' of each learner' if config.learners > 1 else ''}, lr {c.lr:g} {c.lr_schedule}, {config.replay.samples_per_step:g} samples per step, target every {c.target_interval} updates",
        f"  replay        {config.replay.capacity:,} rows, {size / 1e6:,.1f} MB on {replay_device}",
        f"  runtime       {schedule}, lag {config.runtime.lag}, {where}",
    ]
    if made.frame_skip > 1:
        lines.append(
            f"  atari         sticky actions {config.env.sticky_actions:g}, a lost life {'stops the bootstrap' if config.env.life_loss else 'is ignored'}, rewards clipped to ±{config.env.reward_clip:g} for learning"
        )
    return lines + [f"  note          {note}" for note in made.notes]


def team_line(config: Config, how: str) -> str:
    """About several learners; `how` they are connected."""
    shares = f", batches by {config.sync.weights}" if config.sync.weights else ", batches by speed" if config.sync.balance else ""  # fmt: skip
    return f"  learners      {config.learners} {how}, mode {config.sync.mode}, codec {config.sync.codec}{shares}"


def lock(run_dir: Path) -> BinaryIO:
    """One process a run: held until the file is closed, by whatever ends the process."""
    file = open(run_dir / ".lock", "wb")  # noqa: SIM115 - held open by the caller
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        file.close()
        if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return open(os.devnull, "wb")  # a file system without locks
        raise ConfigError(
            f"another process is training in {str(run_dir)!r}. Wait for it, stop it, or name another --run-dir."
        ) from None
    return file


def prepare(run_dir: Path) -> None:
    """Make the run's folder and prove it writable, before anything is computed."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as e:
        raise ConfigError(
            f"cannot write to the run directory {str(run_dir)!r}: {e.strerror}. Name another with --run-dir."
        ) from None


def versions(config: Config) -> dict[str, Any]:
    """Recorded in config.yaml for whoever reads the run later."""
    import gymnasium

    return {
        "qfleet": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "gymnasium": gymnasium.__version__,
        "torch_threads": config.learner.threads,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cores": machine.cores(),
    }
