"""The whole config tree: frozen keyword-only dataclasses, YAML in and out, checks with messages for people.

Nothing here imports torch, so `qfleet --help` stays fast. A recipe (recipes.py) makes a complete `Config`; YAML files
and flags override single fields of it through `override`, which refuses unknown names and suggests the right one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml


class ConfigError(ValueError):
    """A setting that cannot work. The message says what was given, what is allowed and what to do."""


def opt(default: Any, help: str) -> Any:
    """A field with a default and the line `--help` shows for it."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


# What other libraries call our settings.
ELSEWHERE = {
    "learning_rate": "learner.lr",
    "buffer_size": "replay.capacity",
    "memory_size": "replay.capacity",
    "learning_starts": "replay.min_steps",
    "train_freq": "replay.samples_per_step",
    "gradient_steps": "replay.samples_per_step",
    "target_update_interval": "learner.target_interval",
    "target_network_frequency": "learner.target_interval",
    "max_grad_norm": "learner.grad_clip",
    "net_arch": "network.hidden",
    "n_envs": "env.num_envs",
    "total_timesteps": "total_steps",
    "n_timesteps": "total_steps",
    "timesteps": "total_steps",
    "exploration_fraction": "acting.epsilon_steps",
    "exploration_final_eps": "acting.epsilon_end",
    "exploration_initial_eps": "acting.epsilon_start",
    "epsilon": "acting.epsilon_end",
}


def setting(name: str, known: typing.Iterable[str]) -> str:
    """The full name of a setting that was given by its last part (lr) or by what others call it (learning_rate)."""
    leaf = name.rpartition(".")[2]
    return ELSEWHERE.get(leaf) or next((k for k in known if k.rpartition(".")[2] == leaf), name)


def resembling(name: str, allowed: typing.Iterable[str], count: int = 3) -> str:
    """' Did you mean ...?' for a mistyped name."""
    close = difflib.get_close_matches(name, sorted(allowed), n=count, cutoff=0.55)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def suggest(name: str, allowed: typing.Iterable[str], count: int = 3) -> str:
    """The same, or a list of what there is."""
    options = sorted(allowed)
    listed = f" Allowed: {', '.join(options)}." if len(options) <= 40 else ""
    return resembling(name, options, count) or listed


def _check(ok: bool, flag: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{flag} is {value!r}, but it must be {allowed}.")


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    id: str = opt("CartPole-v1", "gymnasium id, module:Id, or a short Atari name such as pong")
    num_envs: int = opt(8, "environments stepped at once")
    kwargs: dict[str, Any] = opt({}, "keyword arguments for the environment, k=v")
    vectorize: Literal["auto", "native", "inprocess", "subprocess"] = opt(
        "auto", "how environments are stepped together; auto measures"
    )
    sticky_actions: float = opt(
        0.0, "Atari: probability that the emulator repeats the last action (Machado et al. use 0.25)"
    )
    frame_stack: int = opt(1, "newest observations stacked into one network input")
    life_loss: bool = opt(False, "Atari: a lost life stops the bootstrap (it never resets the game)")
    reward_clip: float = opt(
        0.0, "clip rewards to [-x, x] for learning; 0 = off. Returns are always reported unclipped"
    )

    def __post_init__(self) -> None:
        _check(bool(self.id), "env.id", self.id, "a gymnasium id")
        _check(self.num_envs >= 1, "env.num_envs", self.num_envs, "at least 1")
        _check(0 <= self.sticky_actions < 1, "env.sticky_actions", self.sticky_actions, "a probability below 1")
        _check(self.frame_stack >= 1, "env.frame_stack", self.frame_stack, "at least 1")
        _check(self.reward_clip >= 0, "env.reward_clip", self.reward_clip, "0 (off) or positive")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    kind: str = opt("auto", "auto, mlp, nature, impala, grid, or module:Class for your own nn.Module")
    hidden: tuple[int, ...] = opt((256, 256), "widths of the fully connected layers")
    dueling: bool = opt(False, "separate value and advantage streams")
    noisy: bool = opt(
        False, "noisy linear layers, which explore by themselves (rainbow on Atari games also sets epsilon to 0)"
    )
    dist: Literal["scalar", "c51", "qr", "iqn"] = opt(
        "scalar", "what is predicted per action: a mean, or a distribution of returns"
    )
    atoms: int = opt(51, "atoms (c51) or quantiles (qr; iqn: samples per update)")
    v_min: float = opt(-10.0, "c51: lowest return the atoms cover")
    v_max: float = opt(10.0, "c51: highest return the atoms cover")

    def __post_init__(self) -> None:
        kinds = ("auto", "mlp", "nature", "impala", "grid")
        if self.kind not in kinds and not all(self.kind.partition(":")):
            raise ConfigError(
                f"network.kind is {self.kind!r}; allowed are {', '.join(kinds)} or module:Class.{resembling(self.kind, kinds)}"
            )
        _check(all(h >= 1 for h in self.hidden), "network.hidden", self.hidden, "positive widths, as in 256,256")
        _check(self.atoms >= 2 or self.dist == "scalar", "network.atoms", self.atoms, "at least 2")
        _check(self.v_max > self.v_min, "network.v_max", self.v_max, f"above network.v_min ({self.v_min})")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    capacity: int = opt(100_000, "rows of experience kept, over all environments")
    prioritized: bool = opt(False, "sample in proportion to the last TD error")
    alpha: float = opt(0.5, "prioritised: exponent on the priority; 0 = uniform")
    beta: float = opt(0.4, "prioritised: importance-weight exponent at the start")
    beta_steps: int = opt(0, "prioritised: steps until beta reaches 1; 0 = total_steps")
    samples_per_step: float = opt(
        8.0, "replay samples drawn per environment step; updates = steps * this / (batch_size * learners)"
    )
    min_steps: int = opt(1000, "steps collected before the first update")
    device: str = opt("auto", "where the replay lives: auto, cpu or cuda")

    def __post_init__(self) -> None:
        _check(self.capacity >= 1, "replay.capacity", self.capacity, "at least 1")
        _check(self.samples_per_step > 0, "replay.samples_per_step", self.samples_per_step, "positive")
        _check(0 <= self.alpha <= 1, "replay.alpha", self.alpha, "between 0 and 1")
        _check(0 <= self.beta <= 1, "replay.beta", self.beta, "between 0 and 1")
        _check(self.beta_steps >= 0, "replay.beta_steps", self.beta_steps, "0 or positive")
        _check(self.min_steps >= 0, "replay.min_steps", self.min_steps, "0 or positive")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    batch_size: int = opt(64, "samples per update, of each learner")
    lr: float = opt(1e-3, "learning rate")
    lr_schedule: Literal["constant", "linear", "cosine", "plateau"] = opt(
        "constant", "linear and cosine fall to 0 at total_steps; plateau halves when the evaluation stalls"
    )
    optimizer: Literal["adam", "rmsprop", "sgd"] = opt("adam", "optimiser")
    momentum: float = opt(0.0, "momentum of sgd")
    adam_eps: float = opt(1e-8, "Adam's and RMSprop's epsilon")
    loss: Literal["huber", "mse"] = opt("huber", "loss on the TD error (scalar networks)")
    gamma: float = opt(0.99, "discount")
    n_step: int = opt(1, "steps of reward before the bootstrap")
    double: bool = opt(False, "double DQN: the online network selects, the target network evaluates")
    munchausen: bool = opt(False, "Munchausen: soft targets with a scaled log-policy bonus")
    munchausen_alpha: float = opt(0.9, "Munchausen: weight of the log-policy bonus")
    munchausen_tau: float = opt(0.03, "Munchausen: temperature of the soft policy")
    grad_clip: float = opt(10.0, "clip the global gradient norm; 0 = off")
    target_interval: int = opt(250, "updates between copies into the target network")
    tau: float = opt(1.0, "Polyak averaging into the target network; 1 = plain copy")
    weight_decay: float = opt(0.0, "decoupled weight decay")
    precision: Literal["auto", "fp32", "bf16"] = opt(
        "auto",
        "of forward and backward; auto = bf16 on a GPU that has it (not for your own network), fp32 elsewhere. Parameters are always fp32",
    )
    compile: Literal["auto", "on", "off"] = opt(
        "auto", "torch.compile for the update; auto = off (on the CPU it was measured not to pay)"
    )
    threads: int = opt(1, "CPU threads of the learner")

    def __post_init__(self) -> None:
        _check(self.batch_size >= 1, "learner.batch_size", self.batch_size, "at least 1")
        _check(self.lr > 0, "learner.lr", self.lr, "positive")
        _check(0 <= self.gamma <= 1, "learner.gamma", self.gamma, "between 0 and 1")
        _check(self.n_step >= 1, "learner.n_step", self.n_step, "at least 1")
        _check(self.grad_clip >= 0, "learner.grad_clip", self.grad_clip, "0 (off) or positive")
        _check(self.target_interval >= 1, "learner.target_interval", self.target_interval, "at least 1")
        _check(0 < self.tau <= 1, "learner.tau", self.tau, "above 0 and at most 1")
        _check(self.weight_decay >= 0, "learner.weight_decay", self.weight_decay, "0 or positive")
        _check(self.adam_eps > 0, "learner.adam_eps", self.adam_eps, "positive")
        _check(self.munchausen_tau > 0, "learner.munchausen_tau", self.munchausen_tau, "positive")
        _check(self.threads >= 1, "learner.threads", self.threads, "at least 1")
        _check(0 <= self.momentum < 1, "learner.momentum", self.momentum, "0 or more and below 1")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(
                f"learner.momentum is for --learner.optimizer sgd; {self.optimizer} has its own. Leave one of them out."
            )
        if self.munchausen and self.double:
            raise ConfigError(
                "learner.munchausen and learner.double exclude each other: Munchausen's soft target has no argmax to decouple. Set one to false."
            )


@dataclass(frozen=True, kw_only=True)
class ActingConfig:
    device: str = opt("auto", "where actions are computed: auto, cpu or cuda")
    epsilon_start: float = opt(1.0, "epsilon of the first step")
    epsilon_end: float = opt(0.05, "epsilon after epsilon_steps")
    epsilon_steps: int = opt(10_000, "steps over which epsilon falls linearly")
    ladder: float = opt(
        0.0,
        "per-environment epsilon: environment i of N uses epsilon ** (1 + ladder * i / (N - 1)); 0 = all alike, Ape-X uses 7",
    )
    hold: int = opt(
        1,
        "most steps an exploring action is held: k steps with probability 1 / (k (k + 1)), so that exploration gets far; 1 = plain epsilon-greedy",
    )

    def __post_init__(self) -> None:
        _check(0 <= self.epsilon_start <= 1, "acting.epsilon_start", self.epsilon_start, "between 0 and 1")
        _check(0 <= self.epsilon_end <= 1, "acting.epsilon_end", self.epsilon_end, "between 0 and 1")
        _check(self.epsilon_steps >= 0, "acting.epsilon_steps", self.epsilon_steps, "0 or positive")
        _check(self.ladder >= 0, "acting.ladder", self.ladder, "0 (off) or positive")
        _check(self.hold >= 1, "acting.hold", self.hold, "at least 1")


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    schedule: Literal["auto", "serial", "pipelined", "streams"] = opt(
        "auto",
        "serial: collect, then update; pipelined: both at once, on a thread; streams: both at once, with replay and learner on a GPU (both need lag 1)",
    )
    lag: int = opt(0, "rounds between collecting a row and the first update that may use it (0 or 1)")
    groups: int = opt(
        1,
        "groups of environments; with several, some step while actions are computed for another (Atari on a GPU: 2, of 512 and more games 4)",
    )
    steps_per_round: int = opt(8, "steps collected between two joins of acting and learning")
    checkpoint_every: int = opt(10_000, "steps between checkpoints; 0 = only at the end and on a signal")
    eval_every: int = opt(10_000, "steps between evaluations; 0 = only at the end")
    eval_episodes: int = opt(20, "episodes per evaluation")
    eval_epsilon: float = opt(
        0.0,
        "part of random actions in evaluations; 0 = greedy. Without any, Breakout waits for ever to be served (Atari: 0.01)",
    )
    keep: int = opt(2, "checkpoints kept besides the best")
    stop_at: float | None = opt(None, "stop once an evaluation reaches this mean return")
    patience: int = opt(0, "stop after this many evaluations without a new best; 0 = never")
    log_every: int = opt(1000, "steps between lines of metrics")
    emulator_threads: int = opt(
        0, "threads or processes that step environments; 0 = one per core, or half as many for each of several groups"
    )
    watchdog: float = opt(
        300.0,
        "seconds after which environments that do not answer end the run, with a checkpoint (on Ray: their learner is replaced, without one); 0 = never",
    )

    def __post_init__(self) -> None:
        _check(self.lag in (0, 1), "runtime.lag", self.lag, "0 or 1")
        _check(self.groups >= 1, "runtime.groups", self.groups, "at least 1")
        _check(self.steps_per_round >= 1, "runtime.steps_per_round", self.steps_per_round, "at least 1")
        _check(self.eval_episodes >= 1, "runtime.eval_episodes", self.eval_episodes, "at least 1")
        _check(0 <= self.eval_epsilon <= 1, "runtime.eval_epsilon", self.eval_epsilon, "between 0 and 1")
        _check(self.keep >= 1, "runtime.keep", self.keep, "at least 1")
        _check(self.log_every >= 1, "runtime.log_every", self.log_every, "at least 1")
        for name in ("checkpoint_every", "eval_every", "patience", "emulator_threads", "watchdog"):
            _check(getattr(self, name) >= 0, f"runtime.{name}", getattr(self, name), "0 or positive")
        if self.schedule in ("pipelined", "streams") and self.lag == 0:
            raise ConfigError(
                f"runtime.schedule is {self.schedule!r} with runtime.lag 0, but acting and learning at once means a lag of 1: add --runtime.lag 1."
            )


GRADIENT_MODES = (
    "sync",
    "async",
    "window",
    "ssp",
)  # learners push gradients; in the others they train alone for a while
BARRIER_MODES = ("sync", "localsgd", "diloco", "admm")  # they go through their rounds together
LOCAL_MODES = ("localsgd", "diloco", "easgd", "admm")

# Settings that have an effect only where another one has one of these values.
ONLY_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    "staleness": ("mode", ("async", "ssp")),
    "damping": ("mode", ("async", "ssp")),
    "window": ("mode", ("window",)),
    "window_ms": ("mode", ("window",)),
    "local_steps": ("mode", LOCAL_MODES),
    "outer_lr": ("mode", ("diloco",)),
    "outer_momentum": ("mode", ("diloco",)),
    "elasticity": ("mode", ("easgd",)),
    "rho": ("mode", ("admm",)),
    "rho_adapt": ("mode", ("admm",)),
    "topk": ("codec", ("topk",)),
    "rank": ("codec", ("powersgd",)),
    "servers": ("transport", ("server", "auto")),
}


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    mode: Literal["sync", "async", "window", "ssp", "localsgd", "diloco", "easgd", "admm"] = opt(
        "sync", "how several learners agree, see docs/sync.md"
    )
    transport: Literal["auto", "allreduce", "server"] = opt(
        "auto", "auto = server on Ray, all-reduce under torchrun, mpirun and Spark"
    )
    codec: Literal["fp32", "bf16", "int8", "topk", "powersgd"] = opt("fp32", "how what is pushed is compressed")
    servers: int = opt(1, "server: parts into which the parameters are cut")
    staleness: int | None = opt(
        None,
        "ssp: clocks a learner may be ahead of the slowest [16]; async: pushes older than this many versions are rejected [never]",
    )
    damping: Literal["none", "inverse", "sqrt"] = opt(
        "none", "async, ssp: learning rate of a push that is k times as stale as usual: unchanged, / k, / sqrt(k)"
    )
    backup: int = opt(0, "sync, localsgd, diloco on a server: learners that an update does not wait for (a round does)")
    window: int = opt(0, "window: pushes that become one update; 0 = as many as there are learners")
    window_ms: float = opt(0.0, "window: milliseconds after which fewer do; 0 = never")
    local_steps: int = opt(16, "localsgd, diloco, easgd, admm: updates between two exchanges")
    outer_lr: float = opt(0.7, "diloco: learning rate of the outer Nesterov step")
    outer_momentum: float = opt(0.9, "diloco: its momentum")
    elasticity: float = opt(
        0.5, "easgd: part of the difference that learner and centre give way to each other, over all learners"
    )
    rho: float = opt(0.1, "admm: penalty on the distance from the consensus")
    rho_adapt: bool = opt(True, "admm: double or halve it where primal and dual residual differ tenfold")
    topk: float = opt(0.01, "topk: part of the numbers that are sent; the rest is kept for later")
    rank: int = opt(4, "powersgd: rank")
    balance: bool = opt(False, "give faster learners larger batches, slower ones smaller ones: the same sum")
    weights: tuple[float, ...] = opt((), "the same by given weights, one for each learner, instead of measured speeds")
    heartbeat: float = opt(
        10.0,
        "seconds without a sign of life of its process after which a learner or server on Ray is replaced (environments that hang: runtime.watchdog)",
    )

    def __post_init__(self) -> None:
        _check(self.servers >= 1, "sync.servers", self.servers, "at least 1")
        _check(self.staleness is None or self.staleness >= 0, "sync.staleness", self.staleness, "0 or positive")
        for name in ("backup", "window", "window_ms"):
            _check(getattr(self, name) >= 0, f"sync.{name}", getattr(self, name), "0 or positive")
        _check(self.local_steps >= 1, "sync.local_steps", self.local_steps, "at least 1")
        _check(self.outer_lr > 0, "sync.outer_lr", self.outer_lr, "positive")
        _check(0 <= self.outer_momentum < 1, "sync.outer_momentum", self.outer_momentum, "0 or more and below 1")
        _check(0 < self.elasticity <= 1, "sync.elasticity", self.elasticity, "above 0 and at most 1")
        _check(self.rho > 0, "sync.rho", self.rho, "positive")
        _check(0 < self.topk <= 1, "sync.topk", self.topk, "above 0 and at most 1")
        _check(self.rank >= 1, "sync.rank", self.rank, "at least 1")
        _check(self.heartbeat > 0, "sync.heartbeat", self.heartbeat, "positive")
        _check(all(w > 0 for w in self.weights), "sync.weights", self.weights, "positive numbers, one for each learner")
        for f in dataclasses.fields(self):
            given = getattr(self, f.name)
            if f.name not in ONLY_WITH or given == f.default:
                continue
            other, values = ONLY_WITH[f.name]
            if getattr(self, other) not in values:
                raise ConfigError(
                    f"sync.{f.name} is {given!r}, but it has no effect with sync.{other} {getattr(self, other)}: leave it out, or use --sync.{other} {' or '.join(values)}."
                )
        if self.transport == "allreduce" and self.mode in ("async", "window", "ssp"):
            raise ConfigError(
                f"sync.mode {self.mode} needs a server (nobody waits for anybody, so there is nothing to reduce together): use --sync.transport server or auto."
            )
        # admm would diverge: a dual variable is right only for who takes part in the consensus.
        if self.backup and (self.mode not in ("sync", "localsgd", "diloco") or self.transport == "allreduce"):
            raise ConfigError(
                f"sync.backup is {self.backup}, but in {self.mode} by {self.over} nobody can be left behind: leave it out, or use sync, localsgd or diloco on Ray without --sync.transport allreduce."
            )
        if self.codec == "powersgd" and self.over == "server":
            raise ConfigError(
                "sync.codec powersgd compresses whole matrices, which server shards do not have: use --sync.transport allreduce (with a mode that allows it), or another codec."
            )

    @property
    def over(self) -> Literal["allreduce", "server"]:
        """The transport in use."""
        if self.transport != "auto":
            return self.transport
        return "server" if self.mode in ("async", "window", "ssp", "easgd") else "allreduce"

    @property
    def together(self) -> bool:
        """Do all learners go through their rounds together?"""
        return self.mode in BARRIER_MODES or self.over == "allreduce"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run needs. Make one with a recipe: `qfleet.recipes.make("rainbow", "CartPole-v1")`."""

    env: EnvConfig = field(default_factory=EnvConfig)
    recipe: str = opt("custom", "named set of algorithm and hyperparameters, see `qfleet recipes` [munchausen]")
    seed: int = opt(1, "seed of everything random")
    total_steps: int = opt(50_000, "environment steps to train for")
    device: str = opt("auto", "device of the learner: auto, cpu or cuda")
    learners: int = opt(1, "learners that train one network, on Ray (several GPUs, or machines), see docs/sync.md")
    address: str = opt("", "Ray cluster to join (host:port, or auto); empty = a local one starts by itself")
    run_dir: str = opt("", "where the run is written; empty = runs/<env>/<recipe>-s<seed>-<time>")
    network: NetworkConfig = field(default_factory=NetworkConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    acting: ActingConfig = field(default_factory=ActingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)

    def __post_init__(self) -> None:
        _check(self.total_steps >= 1, "total_steps", self.total_steps, "at least 1")
        _check(self.learners >= 1, "learners", self.learners, "at least 1")
        _check(self.seed >= 0, "seed", self.seed, "0 or positive")
        if self.learner.munchausen and self.network.dist == "c51":
            raise ConfigError(
                "learner.munchausen works with network.dist scalar, qr or iqn, not c51 (its fixed support cannot be shifted by the bonus)."
            )
        if self.env.num_envs % self.runtime.groups:
            raise ConfigError(
                f"env.num_envs {self.env.num_envs} cannot be divided into runtime.groups {self.runtime.groups} equal groups: change one of them."
            )
        rows = self.replay.capacity // self.env.num_envs
        need = self.learner.n_step + self.env.frame_stack + self.rows_per_round + 1
        if rows < need:
            raise ConfigError(
                f"replay.capacity {self.replay.capacity} gives each of {self.env.num_envs} environments {rows} rows, but a round, an n-step "
                f"window and a frame stack need {need}: raise it to at least {need * self.env.num_envs}, or lower env.num_envs."
            )
        self.check_updates(self.learners)

    def check_updates(self, learners: int) -> None:
        """Is anything learned? (A launcher may have started more learners than the config says.)"""
        first = self.first_update + math.ceil(self.learner.batch_size * learners / self.replay.samples_per_step)
        if first > self.total_steps:
            times = " * learners" if learners > 1 else ""
            raise ConfigError(
                f"the first update comes after {first:,} steps ({self.first_update:,} before learning starts, then batch_size{times} / samples_per_step), but total_steps is {self.total_steps:,}: no update would ever be made. "
                f"Raise --total-steps, or lower --replay.min-steps or --learner.batch-size."
            )
        samples = (self.total_steps - self.first_update) * Fraction(
            str(self.replay.samples_per_step)
        )  # as in the limiter
        updates = samples // (self.learner.batch_size * learners)
        if learners > 1 and self.sync.mode in LOCAL_MODES and updates < self.sync.local_steps:
            raise ConfigError(
                f"{self.total_steps:,} steps are {updates:,} updates of each learner, but in {self.sync.mode} they meet every {self.sync.local_steps} (sync.local_steps): what is saved would never be trained. "
                f"Raise --total-steps, or lower --sync.local-steps or --learner.batch-size."
            )

    def check_batch(self, learners: int) -> None:
        """A run whose batches are larger than its replay is a mistake."""
        if self.learner.batch_size * learners > self.replay.capacity:
            among = f" of each of {learners} learners" if learners > 1 else ""
            raise ConfigError(
                f"learner.batch_size {self.learner.batch_size:,}{among} is more than replay.capacity has rows ({self.replay.capacity:,}): lower --learner.batch-size, or raise --replay.capacity."
            )

    @property
    def first_update(self) -> int:
        """Steps before the first update: min_steps, and at least one complete window in every environment."""
        return max(self.replay.min_steps, (self.learner.n_step + 1) * self.env.num_envs)

    @property
    def rows_per_round(self) -> int:
        """Vector steps in one round."""
        return -(-self.runtime.steps_per_round // self.env.num_envs)


# --- reading, overriding, writing -------------------------------------------------------------------------------


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dict (tuples become lists), as written to YAML."""
    out = dataclasses.asdict(config)
    return {k: _plain(v) for k, v in out.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


RESOLVED = "resolved."  # what dump_yaml adds about the machine


def from_dict(values: Mapping[str, Any]) -> Config:
    """The config that `to_dict` or `dump_yaml` wrote (nested or dotted)."""
    return override(Config(), {k: v for k, v in flatten(values).items() if not k.startswith(RESOLVED)})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'learner': {'lr': 1}} -> {'learner.lr': 1}. `env.kwargs` stays a dict."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path != "env.kwargs":
            out.update(flatten(value, path + "."))
        else:
            out[path] = value
    return out


def paths(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every settable path with its field and its type: ('learner.lr', Field, float)."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            yield from paths(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f, hints[f.name]


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """A new config with dotted paths replaced. Strings are converted to the field's type."""
    known = {path: hint for path, _, hint in paths()}
    sections: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name = path.replace("-", "_")
        if name not in known and any(k.startswith(name + ".") for k in known):
            raise ConfigError(
                f"{name!r} is a section, not a setting: give one of its fields, such as {next(k for k in known if k.startswith(name + '.'))}."
            )
        if name not in known:
            raise ConfigError(f"unknown setting {path!r}.{suggest(setting(name, known), known)}")
        section, _, leaf = name.rpartition(".")
        sections.setdefault(section, {})[leaf] = convert(name, value, known[name])
    changed = {s: dataclasses.replace(getattr(config, s), **v) for s, v in sections.items() if s}
    return dataclasses.replace(config, **sections.get("", {}), **changed)


_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def convert(path: str, value: Any, hint: Any) -> Any:
    """value as the type of the field at path, or a ConfigError that says what is allowed."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    try:
        if origin is Literal:
            text = "on" if value is True else "off" if value is False else value  # YAML reads on/off as booleans
            if text not in args:
                raise ConfigError(
                    f"{path} is {value!r}; allowed: {', '.join(map(str, args))}.{resembling(str(value), args) if isinstance(value, str) else ''}"
                )
            return text
        if origin in (types.UnionType, typing.Union):
            if value is None or value in ("none", "None", ""):
                return None
            return convert(path, value, next(a for a in args if a is not type(None)))
        if origin is tuple:
            items = value.strip("[]()").replace(",", " ").split() if isinstance(value, str) else value
            return tuple(convert(path, i, args[0]) for i in ([items] if isinstance(items, int) else items))
        if origin is dict:
            return dict(value)
        if hint is bool:
            return value if isinstance(value, bool) else _WORDS[str(value).lower()]
        if hint is int:
            if isinstance(value, bool):
                raise ValueError
            try:
                return int(value) if isinstance(value, (int, str)) else int(str(value))
            except ValueError:  # 1e6, 50_000.0
                if not float(value).is_integer():  # inf is not
                    raise
                return int(float(value))
        if hint is float:
            if isinstance(value, bool) or not math.isfinite(float(value)):
                raise ValueError
            return float(value)
        return str(value)
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError):
        wanted: dict[Any, str] = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            tuple[int, ...]: "whole numbers, as in 256,256",
            tuple[float, ...]: "numbers, as in 3,1",
        }
        raise ConfigError(f"{path} is {value!r}, but it must be {wanted.get(hint, 'key=value pairs')}.") from None


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Dotted overrides from a YAML file."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"cannot read the config file {str(path)!r}: {e.strerror}.") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{path} is not valid YAML: {e}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold settings such as 'learner: {{lr: 0.001}}', not a {type(values).__name__}.")
    return flatten(values)


def dump_yaml(config: Config, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write the config; `extra` (versions, threads) goes under the key `resolved`, which reading skips."""
    values = to_dict(config) | ({"resolved": dict(extra)} if extra else {})
    temporary = Path(path).with_suffix(".tmp")
    with open(temporary, "w") as f:
        yaml.safe_dump(values, f, sort_keys=False, width=120)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)  # whole or not at all


def rewrite_yaml(config: Config, path: str | Path) -> None:
    """Put it in the place of the one that is there; what `dump_yaml` was given beside that stays."""
    dump_yaml(config, path, yaml.safe_load(Path(path).read_text()).get(RESOLVED.rstrip(".")))
