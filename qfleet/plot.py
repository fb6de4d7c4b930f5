"""Learning curves of runs: one line a run, or one band when a recipe was run with several seeds.

A band is the interquartile mean over seeds with a 95% bootstrap interval (Agarwal et al., 2021, "Deep RL at the
Edge of the Statistical Precipice"), both at each point of a common grid of steps.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import yaml

from qfleet.config import RESOLVED, flatten, suggest
from qfleet.runtime import metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array: TypeAlias = np.ndarray[Any, Any]  # as in types.py, which would import torch

TRAINING_RETURN = "rollout/ep_rew_mean"
LABELS = {
    "eval/mean_reward": "evaluation return",
    TRAINING_RETURN: "training return",
    "rollout/ep_len_mean": "episode length",
    "rollout/exploration_rate": "epsilon",
    "train/loss": "loss",
    "train/q_mean": "mean Q",
    "time/steps_per_second": "steps per second",
    "time/updates_per_second": "updates per second",
}
# Okabe and Ito's palette without its yellow: told apart on white paper, and by people who see fewer colours.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":")  # when the colours begin anew
LEGEND = 6  # lines that find room among the curves
INSIDE, BESIDE = 48, 26  # letters in a line of the legend: among the curves, beside them
# Settings in which runs may differ and still be seeds of one band.
NOT_A_DIFFERENCE = (
    "seed",
    "run_dir",
    "device",
    "env.vectorize",
    "runtime.schedule",
    "runtime.checkpoint_every",
    "runtime.eval_every",
    "runtime.eval_episodes",
    "runtime.eval_epsilon",
    "runtime.log_every",
    "runtime.keep",
    "runtime.stop_at",
    "runtime.patience",
    "runtime.emulator_threads",
    "learner.threads",
    "learner.compile",
)
GRID_POINTS = 500  # at most; below, every logged step is a point and seeds logged at the same steps stay as they are


def iqm(x: Array) -> Array:
    """Interquartile mean along axis 0: the mean without the lowest and the highest floor(n / 4) values."""
    cut = len(x) // 4
    return np.asarray(np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0))


def bootstrap(x: Array, statistic: Callable[[Array], Array], reps: int = 2000, seed: int = 0) -> tuple[Array, Array]:
    """95% percentile interval of `statistic` (along axis 0) over seeds: x [seeds, ...] -> (low, high), each [...].

    Whole rows are drawn with replacement, so the points of one seed stay together. One stratum: the caller's group.
    """
    index = np.random.default_rng(seed).integers(len(x), size=(len(x), reps))
    low, high = np.percentile(statistic(x[index]), (2.5, 97.5), axis=0)  # x[index] is [seeds, reps, ...]
    return low, high


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one run, and the training return to draw faintly behind it."""

    env: str
    recipe: str
    seed: int
    settings: dict[str, object]  # the whole config, dotted names
    steps: Array  # [N] increasing
    values: Array  # [N] finite
    background: tuple[Array, Array]  # steps and values of the training return; may be empty


def load(run: Path, metric: str) -> Curve:
    """Read a run directory (or a checkpoint in it); ValueError says what is missing."""
    folder = run.parent.parent if run.parent.name == "checkpoints" else run
    if not (folder / metrics.FILE_NAME).is_file() or not (folder / "config.yaml").is_file():
        raise ValueError(f"{run} is no run directory: it holds no config.yaml and {metrics.FILE_NAME}.")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    rows = metrics.read(folder)
    steps, values = _column(rows, metric)
    if not len(steps):
        present = sorted({name for row in rows for name in row} - {"step", "time"})
        listed = suggest(metric, present).replace("Allowed:", "It has:") if present else " Nothing was logged yet."
        raise ValueError(f"{folder} has no values of {metric!r}.{listed}")
    return Curve(
        env=config["env"]["id"],
        recipe=config["recipe"],
        seed=config["seed"],
        settings=flatten(config),
        steps=steps,
        values=values,
        background=_column(rows, TRAINING_RETURN),
    )


def _column(rows: Sequence[metrics.Row], name: str) -> tuple[Array, Array]:
    pairs = [(row["step"], row[name]) for row in rows if np.isfinite(row.get(name, np.nan))]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def band(curves: Sequence[Curve]) -> tuple[Array, Array, Array, Array]:
    """(steps, middle, low, high) over the seeds, on the steps that all of them cover: nothing is extrapolated."""
    start, end = max(c.steps[0] for c in curves), min(c.steps[-1] for c in curves)
    if end < start:
        raise ValueError(
            f"the {len(curves)} runs of {curves[0].recipe} on {curves[0].env} have no steps in common; plot them one by one."
        )
    grid = np.unique(np.concatenate([c.steps for c in curves]))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > GRID_POINTS:
        grid = np.linspace(start, end, GRID_POINTS)
    values = np.stack([np.interp(grid, c.steps, c.values) for c in curves])  # [seeds, points]
    return grid, iqm(values), *bootstrap(values, iqm)


def labels(curves: Sequence[Curve]) -> list[str]:
    """Recipe of every curve, with the settings in which runs of that recipe and environment differ (but for the seed)."""
    out = []
    for curve in curves:
        same = [c.settings for c in curves if (c.env, c.recipe) == (curve.env, curve.recipe)]
        names = {name for s in same for name in s if not name.startswith((RESOLVED, *NOT_A_DIFFERENCE))}
        # What was left to the machine may be what another run names.
        differ = sorted(n for n in names if len({repr(s.get(n)) for s in same} - {repr("auto")}) > 1)
        shown = ", ".join(f"{n.rpartition('.')[2]} {_short(curve.settings.get(n))}" for n in differ)
        out.append(f"{curve.recipe}, {shown}" if shown else curve.recipe)
    return out


def _short(value: object) -> str:
    if isinstance(value, list):
        return "×".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def plot(runs: Sequence[Path], out: Path, metric: str = "eval/mean_reward") -> list[str]:
    """Draw the runs into `out` (png, svg or pdf): a panel per environment, a colour per recipe and settings.

    -> what was left out: of several folders, those that are no runs or have no such values yet, a line each.
    """
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"cannot draw {out.name!r}: the name must end in .png, .svg or .pdf.")
    curves, left_out = [], []
    for run in runs:
        try:
            curves.append(load(Path(run), metric))
        except ValueError as e:
            if len(runs) == 1:
                raise
            left_out.append(e)
    if not curves:
        raise left_out[0]
    # Figure without pyplot: no global state, no window system (it draws with Agg), and half the import time.
    from matplotlib.figure import Figure

    envs = list(dict.fromkeys(c.env for c in curves))
    label = labels(curves)
    kinds = list(dict.fromkeys(label))
    figure = Figure(figsize=(9 if len(envs) == 1 else 6.5 * len(envs), 5), layout="constrained")
    for axes, env in zip(figure.subplots(1, len(envs), squeeze=False)[0], envs, strict=True):
        for index, kind in enumerate(kinds):
            group = [c for c, named in zip(curves, label, strict=True) if c.env == env and named == kind]
            if group:
                again, color = divmod(index, len(COLORS))
                _draw(axes, group, kind, COLORS[color], LINES[again % len(LINES)], metric)
        _dress(axes, env, LABELS.get(metric, metric))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=200)
    return [f"left out: {e}" for e in left_out]


def _draw(axes: Axes, group: Sequence[Curve], kind: str, color: str, line: str, metric: str) -> None:
    curve = group[0]
    if len(group) > 1:
        steps, values, low, high = band(group)
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        label = f"{kind} (IQM of {len(group)} runs, 95% interval)"
    else:
        steps, values, label = curve.steps, curve.values, f"{kind} (seed {curve.seed})"
    marker = "o" if len(steps) <= 30 else ""
    axes.plot(steps, values, color=color, linestyle=line, linewidth=2.2, marker=marker, markersize=4.5, label=label)
    if len(group) == 1 and metric == "eval/mean_reward":
        axes.plot(*curve.background, color=color, linewidth=1, alpha=0.35, zorder=1, label="training")


def _dress(axes: Axes, env: str, label: str) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_title(env, fontsize=15, loc="left", fontweight="bold")
    axes.set_xlabel("environment steps", fontsize=13)
    axes.set_ylabel(label, fontsize=13)
    axes.tick_params(labelsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    low, high = axes.get_ylim()
    if max(abs(low), abs(high)) >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, texts = axes.get_legend_handles_labels()
    many = sum(len(_wrapped(text, INSIDE)) for text in texts) > LEGEND
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if many else {}
    lines = ["\n".join(_wrapped(text, BESIDE if many else INSIDE)) for text in texts]
    axes.legend(handles, lines, fontsize=10 if many else 12, frameon=True, framealpha=0.9, edgecolor="none", **beside)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False)
