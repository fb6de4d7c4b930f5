"""Recipes: an algorithm of the DQN family with hyperparameters that suit the task.

`make("rainbow", "LunarLander-v3")` = the settings of the task's family, then those of the recipe, then those the recipe
needs in that family. Everything can be overridden by a YAML file or a flag. Torch-free, so that `--help` stays fast.
"""

from __future__ import annotations

import re
from typing import Any

from qfleet.config import Config, ConfigError, override, suggest

Settings = dict[str, Any]

# --- what suits a family of tasks, whatever the recipe ---------------------------------------------------------------

FAMILIES: dict[str, Settings] = {
    "general": {},
    # Steps are nearly free here and updates are not: few updates, large batches, a high learning rate.
    "cartpole": {
        "total_steps": 30_000,
        "env.num_envs": 16,
        "network.hidden": (128, 128),
        "network.v_min": 0.0,
        "network.v_max": 100.0,
        "replay.capacity": 50_000,
        "replay.min_steps": 500,
        "replay.samples_per_step": 64.0,
        "learner.batch_size": 256,
        "learner.lr": 3e-3,
        "learner.adam_eps": 1e-4,
        "learner.lr_schedule": "linear",
        "learner.n_step": 3,
        "learner.tau": 0.2,
        "learner.target_interval": 8,
        "acting.epsilon_steps": 5_000,
        "acting.epsilon_end": 0.1,
        "runtime.steps_per_round": 64,
        "runtime.eval_every": 2_500,
    },
    "acrobot": {
        "total_steps": 100_000,
        "network.v_min": -100.0,
        "network.v_max": 0.0,
        "replay.capacity": 50_000,
        "replay.samples_per_step": 32.0,
        "learner.batch_size": 128,
        "learner.lr": 1e-3,
        "learner.n_step": 3,
        "learner.target_interval": 250,
        "acting.epsilon_steps": 12_000,
        "acting.epsilon_end": 0.1,
        "runtime.steps_per_round": 64,
    },
    # Single random actions never reach the goal: hold them, and act greedily early (what was tried looks worse than what
    # was not).
    "mountaincar": {
        "total_steps": 120_000,
        "env.num_envs": 16,
        "network.v_min": -100.0,
        "network.v_max": 0.0,
        "replay.capacity": 30_000,
        "replay.samples_per_step": 32.0,
        "learner.batch_size": 128,
        "learner.lr": 2e-3,
        "learner.n_step": 5,
        "learner.target_interval": 300,
        "acting.epsilon_steps": 8_000,
        "acting.epsilon_end": 0.05,
        "acting.hold": 50,
        "runtime.steps_per_round": 64,
    },
    "lunarlander": {
        "total_steps": 300_000,
        "env.num_envs": 16,
        "network.v_min": -100.0,
        "network.v_max": 100.0,
        "learner.lr": 5e-4,
        "learner.batch_size": 128,
        "learner.n_step": 2,
        "learner.target_interval": 250,
        "learner.lr_schedule": "linear",
        "replay.capacity": 200_000,
        "replay.samples_per_step": 64.0,
        "replay.min_steps": 5_000,
        "acting.epsilon_steps": 50_000,
        "acting.epsilon_end": 0.02,
        "runtime.steps_per_round": 64,
        "runtime.lag": 1,
        "runtime.eval_every": 25_000,
        "runtime.checkpoint_every": 50_000,
    },
    "minatar": {
        "total_steps": 1_000_000,
        "env.num_envs": 8,
        "network.hidden": (128,),
        "network.v_min": 0.0,
        "network.v_max": 50.0,
        "learner.lr": 5e-4,
        "learner.batch_size": 64,
        "learner.target_interval": 500,
        "learner.n_step": 3,
        "replay.capacity": 100_000,
        "replay.samples_per_step": 8.0,
        "replay.min_steps": 5_000,
        "acting.epsilon_steps": 100_000,
        "acting.epsilon_end": 0.02,
        "runtime.steps_per_round": 64,
        "runtime.lag": 1,
        "runtime.eval_every": 100_000,
        "runtime.checkpoint_every": 200_000,
    },
    "atari": {
        "total_steps": 10_000_000,
        "env.num_envs": 8,
        "env.frame_stack": 4,
        "env.reward_clip": 1.0,
        "env.sticky_actions": 0.25,
        "env.life_loss": True,
        "network.kind": "nature",
        "network.hidden": (512,),
        "learner.lr": 1e-4,
        "learner.batch_size": 32,
        "learner.adam_eps": 1.5e-4,
        "learner.target_interval": 2_000,
        "learner.threads": 2,
        "replay.capacity": 1_000_000,
        "replay.samples_per_step": 8.0,
        "replay.min_steps": 20_000,
        "acting.epsilon_steps": 250_000,
        "acting.epsilon_end": 0.01,
        "runtime.steps_per_round": 32,
        "runtime.lag": 1,
        "runtime.eval_every": 250_000,
        "runtime.eval_episodes": 10,
        "runtime.eval_epsilon": 0.01,
        "runtime.checkpoint_every": 50_000,
        "runtime.log_every": 5_000,
    },
}

# --- what a family needs on a GPU: more environments at once, and larger batches ----------------------------------------

GPU: dict[str, Settings] = {
    "atari": {
        "env.num_envs": 128,
        "runtime.groups": 2,
        "runtime.steps_per_round": 512,
        "learner.batch_size": 256,
        "learner.lr": 2.5e-4,
        "learner.target_interval": 1_000,
        "replay.min_steps": 20_000,
        "runtime.eval_every": 500_000,
        "runtime.eval_episodes": 20,
        "runtime.checkpoint_every": 2_000_000,
        "runtime.log_every": 50_000,
    },
}

# --- what makes a recipe ---------------------------------------------------------------------------------------------

_PRIORITIZED: Settings = {"replay.prioritized": True, "replay.alpha": 0.5, "replay.beta": 0.4}

RECIPES: dict[str, tuple[str, Settings]] = {
    "dqn": ("the classic: the baseline to compare with, and the fastest per update", {}),
    "double": ("double DQN: less over-estimation; a safe improvement almost everywhere", {"learner.double": True}),
    "dueling": (
        "double DQN with value and advantage streams: many actions that matter little",
        {"learner.double": True, "network.dueling": True},
    ),
    "per": ("double DQN with prioritised replay: rare, important rewards", {"learner.double": True, **_PRIORITIZED}),
    "c51": (
        "distribution of returns over 51 fixed atoms: strong on Atari; needs v_min and v_max",
        {"network.dist": "c51", "learner.adam_eps": 1.5e-4},
    ),
    "qr": (
        "distribution of returns by quantiles: like c51 without having to know the range of returns",
        {"network.dist": "qr", "network.atoms": 50},
    ),
    "iqn": (
        "distribution of returns by sampled quantiles: the most precise, the most expensive",
        {"network.dist": "iqn", "network.atoms": 32},
    ),
    "munchausen": (
        "soft targets with a log-policy bonus: stable, strong, little extra cost; the default",
        {"learner.munchausen": True},
    ),
    "rainbow": (
        "double, dueling, prioritised, n-step, C51 and noisy nets together: fewest steps to a good policy",
        {
            "learner.double": True,
            "learner.n_step": 3,
            "learner.adam_eps": 1.5e-4,
            "network.dueling": True,
            "network.dist": "c51",
            "network.noisy": True,
            "acting.epsilon_start": 0.0,
            "acting.epsilon_end": 0.0,
            **_PRIORITIZED,
        },
    ),
}

NAMES: tuple[str, ...] = tuple(RECIPES)
DEFAULT = "munchausen"  # costs little more than dqn and tolerates a higher learning rate (docs/recipes.md)

# --- what a recipe needs in a family ---------------------------------------------------------------------------------

_FAST_TARGET: Settings = {"learner.tau": 0.05, "learner.target_interval": 1, "learner.adam_eps": 1e-8}

TUNED: dict[tuple[str, str], Settings] = {
    ("dqn", "cartpole"): {"learner.lr": 2e-3},
    ("double", "cartpole"): {"learner.lr": 2e-3},
    ("per", "cartpole"): {"replay.beta": 1.0},
    ("c51", "cartpole"): {"learner.lr": 2e-3, "learner.tau": 1.0, "learner.target_interval": 30},
    ("qr", "cartpole"): {"learner.lr": 2e-3, "learner.n_step": 1, "network.atoms": 16, **_FAST_TARGET},
    ("iqn", "cartpole"): {
        "learner.lr": 2e-3,
        "learner.n_step": 1,
        "learner.batch_size": 128,
        "replay.samples_per_step": 32.0,
        "network.atoms": 8,
        **_FAST_TARGET,
    },
    ("munchausen", "cartpole"): {
        "learner.lr": 4e-3,
        "learner.adam_eps": 3e-4,
        "learner.batch_size": 128,
        "replay.samples_per_step": 32.0,
    },
    # Noise alone leaves some seeds stuck, and so does a shorter return (benchmarks/results/tuning.jsonl).
    ("rainbow", "cartpole"): {
        "learner.lr": 4e-3,
        "learner.n_step": 10,
        "learner.batch_size": 128,
        "learner.tau": 1.0,
        "learner.target_interval": 30,
        "replay.samples_per_step": 32.0,
        "replay.beta": 1.0,
        "acting.epsilon_start": 1.0,
        "acting.epsilon_end": 0.1,
    },
}

# On a GPU, for a family, then for a game. Pong's took it to 18 within 54 to 180 s; with them Breakout stayed at 20 to 40, with the family's it
# had 117 after 10M steps, and BeamRider 8,620 after 7.5M (benchmarks/results/gpu.md).
GPU_TUNED: dict[tuple[str, str], Settings] = {
    ("double", "atari"): {
        "env.num_envs": 256,
        "runtime.steps_per_round": 1024,
        "learner.batch_size": 128,
        "learner.lr": 1e-4,
        "learner.lr_schedule": "linear",
        "learner.adam_eps": 1e-6,
        "learner.target_interval": 2_000,
        "replay.samples_per_step": 32.0,
    },
    ("double", "pong"): {
        "total_steps": 3_000_000,
        "env.num_envs": 128,
        "runtime.steps_per_round": 512,
        "learner.lr": 4e-4,
        "learner.adam_eps": 1.5e-4,
        "learner.n_step": 3,
        "acting.epsilon_steps": 80_000,
        "runtime.eval_every": 250_000,
    },
}


def family(env_id: str) -> str:
    """The family of tasks an environment belongs to, from its name."""
    name = env_id.rpartition(":")[2]
    for prefix, found in (
        ("CartPole", "cartpole"),
        ("Acrobot", "acrobot"),
        ("MountainCar-", "mountaincar"),
        ("LunarLander", "lunarlander"),
        ("MinAtar/", "minatar"),
    ):
        if name.startswith(prefix):
            return found
    short = re.fullmatch(r"[a-z0-9_]+", env_id)
    return "atari" if short or name.startswith("ALE/") or "NoFrameskip" in name else "general"


def game(env_id: str) -> str:
    """The short name of an Atari game: pong for PongNoFrameskip-v4."""
    name = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", re.split("[:/]", env_id)[-1])
    return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()


def make(recipe: str, env_id: str, of: str | None = None, gpu: bool = False) -> Config:
    """The complete config of a recipe for an environment (of a family, where its name does not tell)."""
    if recipe not in RECIPES:
        raise ConfigError(f"there is no recipe {recipe!r}.{suggest(recipe, NAMES)} `qfleet recipes` lists them.")
    of = of or family(env_id)
    settings = {**FAMILIES[of], **(GPU.get(of, {}) if gpu else {}), **RECIPES[recipe][1], **TUNED.get((recipe, of), {})}
    if gpu:
        settings |= GPU_TUNED.get((recipe, of), {}) | GPU_TUNED.get((recipe, game(env_id)), {})
    return override(Config(), {"env.id": env_id, "recipe": recipe, **settings})


def groups(config: Config, num_envs: int) -> int:
    """Into how many a recipe's environments are divided if there are `num_envs` of them."""
    own = config.runtime.groups
    wanted = [4, own] if own > 1 and num_envs >= 512 else [own]  # measured: 512 games are 10 % faster in 4 than in 2
    return next((n for n in wanted if num_envs % n == 0), 1)


def describe() -> list[tuple[str, str]]:
    """(name, what it is good for) of every recipe."""
    return [(name, text) for name, (text, _) in RECIPES.items()]
