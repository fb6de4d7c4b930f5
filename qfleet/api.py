"""The Python API: `train`, `evaluate`, `load`. The command line is a thin layer over the same functions."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qfleet import config as configs
from qfleet import networks, recipes
from qfleet.acting import placement
from qfleet.acting.policy import Policy, Recorded
from qfleet.config import Config, ConfigError, SyncConfig
from qfleet.envs import Envs, ids
from qfleet.runtime import checkpoint, evaluation, metrics, team
from qfleet.runtime.evaluation import Evaluation
from qfleet.runtime.follower import Follower
from qfleet.runtime.progress import Progress
from qfleet.runtime.setup import pick_device
from qfleet.runtime.team import Team
from qfleet.runtime.train import Crew, Trainer
from qfleet.runtime.watchdog import watched
from qfleet.runtime.worker import Worker
from qfleet.types import Spec

# Settled on the machine a run was made on: not taken over when its config.yaml serves as --config.
MACHINE = ("run_dir", "device", "address", "env.vectorize", "runtime.schedule", "learner.precision", "acting.device")
# What --resume may change: nothing that alters the numbers of the run.
RESUMABLE = (
    "total_steps",
    "device",
    "address",
    "runtime.eval_every",
    "runtime.eval_episodes",
    "runtime.eval_epsilon",
    "runtime.checkpoint_every",
    "runtime.keep",
    "runtime.stop_at",
    "runtime.patience",
    "runtime.watchdog",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished (or interrupted) run. `policy` holds the weights of the best evaluation."""

    dir: Path
    config: Config
    policy: Policy
    evaluation: Evaluation | None  # of `policy`, on fresh episodes; None when a signal stopped the run
    stop_reason: str  # total_steps, stop_at, patience or signal
    signal: int | None  # the signal that stopped it, if one did
    seconds: float  # wall time of training
    rank: int = 0  # of the learner that says so; the first one evaluates

    @property
    def interrupted(self) -> bool:
        return self.signal is not None

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl."""
        return metrics.read(self.dir)

    @property
    def last_evaluation(self) -> tuple[int, float] | None:
        """(step, mean return) of the last evaluation during training."""
        rows = [(int(r["step"]), r["eval/mean_reward"]) for r in self.metrics if "eval/mean_reward" in r]
        return rows[-1] if rows else None

    def evaluate(self, episodes: int = 20, seed: int | None = None, epsilon: float | None = None) -> Evaluation:
        return evaluate(self.dir, episodes, seed, epsilon)


def train(
    env: str | None = None,
    *,
    recipe: str | None = None,
    config: str | Path | Config | None = None,
    resume: str | Path | None = None,
    seed: int | None = None,
    total_steps: int | None = None,
    run_dir: str | Path | None = None,
    device: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Run:
    """Train an agent and return the run.

    The config is made of, in this order: the recipe for the environment, the YAML file (or `Config`) given as `config`, the
    named arguments, and `overrides` (dotted names, as in {"learner.lr": 1e-4}).

    With `resume`, an earlier run goes on exactly where its last checkpoint stopped; only settings that do not change its
    numbers may be given beside it.
    """
    named = {
        "seed": seed,
        "total_steps": total_steps,
        "run_dir": None if run_dir is None else str(run_dir),
        "device": device,
    }
    given = {k: v for k, v in named.items() if v is not None} | dict(overrides or {})
    place = given.get("run_dir")
    if team.attempt() and resume is None and place and (Path(place) / "config.yaml").is_file():
        env = recipe = config = None  # the launcher gave the same command again: its run goes on
        resume, given = place, {}
    if resume is not None:
        if env is not None or recipe is not None or config is not None:
            raise ConfigError("--resume takes the environment, recipe and config from the run itself: leave them out.")
        folder, settings = Path(resume), resumed_config(Path(resume), given)
        started = bool(checkpoint.steps(folder / "checkpoints"))
    else:
        settings = compose(env, recipe, config, given)
        folder = new_run_dir(settings)
        settings = replace(settings, run_dir=str(folder))
        started = False
    with team.joined(settings) as mine:
        if started:
            _same_launcher(folder, settings, mine.size)
            started = all_have_begun(folder, mine)
        settings = replace(settings, learners=max(settings.learners, mine.size))
        if not started:
            settings.check_batch(settings.learners)
        return _train(settings, Path(mine.first(str(folder))), mine, started, resume is not None, progress)


def _same_launcher(folder: Path, config: Config, ranks: int) -> None:
    """Learners on Ray and those of a launcher leave different checkpoints."""
    learners = config.learners
    if learners == 1:
        return
    if config.sync.transport == "server" or (folder / "learners" / "0").exists():
        if ranks > 1:
            raise ConfigError(f"the learners of {str(folder)!r} were on Ray: go on with `qfleet train --resume`, without a launcher.")  # fmt: skip
    elif ranks == 1:
        raise ConfigError(
            f"the {learners} learners of {str(folder)!r} were started by torchrun, mpirun or Spark: go on likewise, as in `torchrun --nproc-per-node {learners} -m qfleet train --resume {folder}`."
        )


def all_have_begun(folder: Path, mine: Team) -> bool:
    """Has every learner of a launcher a checkpoint? Killed while they saved the first one, some may have none: then there is none of all."""
    part = (folder / "learners" / str(mine.rank) if mine.rank else folder) / "checkpoints"
    empty, lost, saved = 0, 1, 2
    least = mine.least(saved if checkpoint.steps(part) else empty if part.exists() else lost)
    if least == lost:
        raise checkpoint.CheckpointError(
            f"not every learner has its part of the checkpoint: {str(folder / 'learners')!r} must hold that of all but the first one, on a file system that all share. Put it back; or delete {str(folder / 'checkpoints')!r} to begin anew with --resume."
        )
    return least == saved


def _crew(config: Config, mine: Team, say: Callable[[str], None]) -> Crew:
    """This process's learner, or those of a cluster."""
    if config.learners > mine.size:
        from qfleet.runtime.cluster import Fleet

        return Fleet(config, say)
    return Worker(config, mine)


def _train(settings: Config, folder: Path, mine: Team, started: bool, resuming: bool, progress: bool) -> Run:
    """One learner's part in it."""
    if mine.rank:
        follower = Follower(replace(settings, run_dir=str(folder)), folder, mine, resume=started)
        began = time.perf_counter()
        follower.run()
        policy, _ = load_policy(folder, str(follower.worker.device))
        return Run(
            dir=folder, config=follower.config, policy=policy, evaluation=None, stop_reason="", signal=None,
            seconds=time.perf_counter() - began, rank=mine.rank,
        )  # fmt: skip
    title = f"{settings.env.id} · {settings.recipe} · seed {settings.seed} · {folder}"
    with Progress(settings.total_steps, title, silent=not progress) as shown:
        if settings.learners == 1 and settings.sync != SyncConfig():
            shown.message(
                "  note          sync settings have no effect on one learner: add --learners N, or start several with torchrun"
            )
        trainer = Trainer(settings, folder, shown, started, lambda config: _crew(config, mine, shown.message))
        if trainer.worker.over:
            shown.message(
                f"this run is complete: it has made {trainer.worker.steps:,} steps, and total_steps is {settings.total_steps:,}. Give more --total-steps to go on"
            )
        trainer.run()
    device = str(trainer.worker.device)
    policy, _ = load_policy(folder, device)
    try:
        result = None if trainer.signal is not None else evaluate(folder, settings.runtime.eval_episodes, device=device)
    except KeyboardInterrupt as e:
        e.add_note(f"The training was complete: `qfleet eval {folder}` evaluates it.")
        raise
    return Run(
        dir=folder,
        config=trainer.config,
        policy=policy,
        evaluation=result,
        stop_reason=trainer.stop_reason,
        signal=trainer.signal,
        seconds=trainer.seconds,
    )


def evaluate(
    run: str | Path,
    episodes: int = 20,
    seed: int | None = None,
    epsilon: float | None = None,
    device: str = "auto",
) -> Evaluation:
    """Episodes with the best weights of a run (or with those of the checkpoint named): greedy, but for as many random actions
    as the run's own evaluations had, or `epsilon`. On a GPU (`device`: auto or cuda) where that answers sooner than the CPU."""
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}, but it must be at least 1.")
    if epsilon is not None and not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon is {epsilon}, but it must be between 0 and 1.")
    policy, step = load_policy(run, device)
    chosen = policy.config.seed + 1_000_003 if seed is None else seed  # not the episodes the best was chosen on
    threads = torch.get_num_threads()
    torch.set_num_threads(policy.config.learner.threads)  # as in training: with more, small batches only wait
    runtime, made = policy.config.runtime, list[Envs]()

    def kill() -> None:
        for envs in made:
            envs.kill()

    try:
        with (
            watched("the evaluation's environments", runtime.watchdog, kill) as move,
            evaluation.make_envs(policy.config.env, episodes, chosen, threads=runtime.emulator_threads) as envs,
        ):
            made.append(envs)
            player = _player(policy, envs.num_envs)
            result = evaluation.play(player, envs, episodes, chosen, step, move, epsilon)
    finally:
        torch.set_num_threads(threads)
    assert result is not None
    return result


def _player(policy: Policy, batch: int) -> Policy | Recorded:
    """The policy where it answers sooner."""
    if placement.choose(policy.config, policy.spec, batch, policy.device) == "cpu":
        return Policy(policy.net.cpu(), policy.config, policy.spec)
    return Recorded(policy, batch)


def load(run: str | Path, device: str = "auto") -> Policy:
    """The trained policy of a run directory (its best evaluation) or of a checkpoint in it. `device`: auto, cpu or cuda."""
    return load_policy(run, device)[0]


def load_policy(run: str | Path, device: str = "auto") -> tuple[Policy, int]:
    """-> (policy, the step its weights were saved at)."""
    place = pick_device(device)
    folder, chosen = checkpoint.locate(run)
    config = read_config(folder)
    state, _ = checkpoint.read(chosen)
    spec = Spec(**{**state["spec"], "obs_shape": tuple(state["spec"]["obs_shape"])})
    net = networks.build(config, spec)
    net.load_state_dict({k: torch.from_numpy(v) for k, v in state["learner"]["model"].items()})
    return Policy(net.to(place).eval(), config, spec, place), int(state["step"])


# --- configs -----------------------------------------------------------------------------------------------------------


def compose(
    env: str | None, recipe: str | None, config: str | Path | Config | None, given: Mapping[str, Any]
) -> Config:
    """Recipe, then file, then arguments."""
    if isinstance(config, Config):
        if recipe is not None:
            raise ConfigError(
                "give a recipe or a complete Config, not both: recipes.make(name, env) makes a Config from a recipe."
            )
        return configs.override(config, {**given, **({"env.id": env} if env else {})})
    file = configs.load_yaml(config) if config is not None else {}
    if any(k.startswith(configs.RESOLVED) for k in file):  # the config of a run: leave out what belongs to its machine
        file = {k: v for k, v in file.items() if k not in MACHINE and not k.startswith(configs.RESOLVED)}
    if recipe is not None and file.get("recipe", recipe) != recipe:
        raise ConfigError(
            f"--recipe is {recipe!r}, but the config file is of recipe {file['recipe']!r}, and its settings would win. Leave one out."
        )
    env_id = env or file.get("env.id")
    if not env_id:
        raise ConfigError(
            "no environment given. Name one, as in `qfleet train CartPole-v1`, or set env.id in the config file."
        )
    of = recipes.family(str(env_id))
    if of in ("atari", "general"):  # not told by the name alone, as in Pong-v4; an unknown environment fails here
        of = "general" if ids.atari_game(ids.find(str(env_id))) is None else "atari"
    device = str(given.get("device") or file.get("device") or "auto")
    cluster = given.get("address") or file.get("address") or os.environ.get("RAY_ADDRESS")
    elsewhere = device == "cuda" and cluster  # has one, perhaps; this machine needs none
    gpu = bool(elsewhere) or pick_device(device) != "cpu"
    base = recipes.make(str(recipe or file.get("recipe") or recipes.DEFAULT), str(env_id), of, gpu)
    settings = {**file, **given, "env.id": env_id, "recipe": base.recipe}
    wanted = str(settings.get("env.num_envs", ""))
    if wanted.isdigit() and "runtime.groups" not in settings:
        settings["runtime.groups"] = recipes.groups(base, int(wanted))
    return configs.override(base, settings)


def resumed_config(folder: Path, given: Mapping[str, Any]) -> Config:
    """The config a run was started with, plus the few changes a resume may make."""
    config = read_config(folder)
    refused = sorted(k for k in given if k.replace("-", "_") not in RESUMABLE)
    if refused:
        raise ConfigError(
            f"--resume cannot change {', '.join(refused)}: the run would no longer be the same. It accepts {', '.join(RESUMABLE)}."
        )
    if given:
        if "device" in given:
            # What was settled for the other one. (Precision stays: it is part of the numbers.)
            given = {**given, "acting.device": "auto", "runtime.schedule": "auto"}
        config = configs.override(config, given)
    return config


def read_config(folder: Path) -> Config:
    checkpoint.check_run(folder)
    path = folder / "config.yaml"
    values = configs.load_yaml(path)
    if "env.id" not in values:
        raise ConfigError(f"{path} is damaged: it names no environment. Restore it, or start a new run.")
    return configs.from_dict(values)


def new_run_dir(config: Config) -> Path:
    """Where the run will be written; the folder is made once the environment and the replay are known to work."""
    if config.run_dir:
        folder = Path(config.run_dir)
        if (folder / "checkpoints").exists():
            raise ConfigError(
                f"{config.run_dir!r} already holds a run. Go on with `qfleet train --resume {config.run_dir}`, or name another --run-dir."
            )
    else:
        env = re.sub(r"[^A-Za-z0-9_.-]+", "-", config.env.id)
        stem = Path("runs") / env / f"{config.recipe}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = stem
        number = 1
        while folder.exists():
            number += 1
            folder = stem.with_name(f"{stem.name}-{number}")
    return folder
