"""The progress of a run: a live table on a terminal, one plain line per update elsewhere.

Nobody watching must never stop a run: when the terminal or the pipe goes away, the display falls silent.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from qfleet.sync.traffic import BUCKETS, STALE

if TYPE_CHECKING:  # rich is imported only for a terminal: it costs 50 ms that a script need not pay
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

REFRESH_SECONDS = 0.25
LEARNERS = 16  # that have a row
EACH = (  # of these, what is known of it; as wide as 80 columns allow
    ("samples/s", "samples_per_second", "<7,.0f"),
    ("MB/s", "mb_per_second", "<6,.1f"),
    ("waiting", "wait", "<5.0%"),
    ("stale", "staleness", "<5.2g"),
    ("rejected", "rejected", ".0%"),
)
SHARES = (
    ("pipeline/env", "envs", "green"),
    ("pipeline/act", "acting", "cyan"),
    ("pipeline/learn", "learner", "magenta"),
    ("pipeline/transfer", "copies", "yellow"),
    ("pipeline/wait", "waiting", "bright_black"),
)


class Progress:
    """Shows the newest value of everything it was told. `update` is cheap: the table is drawn four times a second at most.

    It draws in the caller's thread, because a drawing thread would be alive when environment processes are forked. Nothing
    is shown before the first `message` or `update`: a run that cannot start has only its error to say.
    """

    def __init__(self, total_steps: int, title: str, interactive: bool | None = None, silent: bool = False) -> None:
        self._total = total_steps
        self._title = title
        self._step = 0
        self._values: dict[str, float] = {}
        self._best = -math.inf
        self._drawn = -math.inf
        self._silent = silent
        self._started = False
        self._live: Live | None = None
        if not silent and (is_terminal() if interactive is None else interactive):
            from rich.live import Live

            self._live = Live(get_renderable=self.table, auto_refresh=False)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """The run is at `step`. `values` may hold any part of the metrics; the others keep their last value."""
        self._step = step
        self._values.update(values)
        # A resumed run knows a best evaluation that this display never saw. NaN is never best.
        for name in ("eval/mean_reward", "eval/best_mean_reward"):
            if values.get(name, -math.inf) > self._best:
                self._best = values[name]
        self._start()
        if self._live is None:
            self.message(line(step, self._total, self._values))
        elif (now := time.monotonic()) - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            self._guard(self._live.refresh)

    def message(self, text: str) -> None:
        """A line that stays: above the table on a terminal."""
        self._start()
        if self._live is None:
            self._guard(lambda: print(text, flush=True))
        else:
            console = self._live.console
            self._guard(lambda: console.print(text, markup=False, highlight=False))

    def _start(self) -> None:
        if not self._started:
            self._started = True
            if self._live is None:
                self.message(self._title)
            else:
                self._guard(self._live.start)

    def close(self) -> None:
        """Draw the last state and give the terminal back. Safe to call twice."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _guard(self, draw: Callable[[], object]) -> None:
        if not self._silent:
            try:
                draw()
            except OSError:  # a closed pipe or terminal
                self._silent = True

    def table(self) -> RenderableType:
        """The live view, as drawn for the newest values."""
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        value = self._values.get
        steps = Table.grid(padding=(0, 2))
        steps.add_row(
            ProgressBar(
                total=self._total, completed=self._step, width=32, complete_style="green", finished_style="green"
            ),
            Text(f"{self._step:,} / {self._total:,}"),
            Text(f"{percent(self._step, self._total)}%", style="bold"),
            Text(f"ETA {duration(eta(self._step, self._total, self._values))}"),
        )
        best = self._best if self._best > -math.inf else None
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", min_width=8)
        grid.add_column(no_wrap=True)
        grid.add_row("steps", steps)
        grid.add_row(
            "speed",
            _cells(
                ("steps/s", value("time/steps_per_second"), ",.0f"),
                ("updates/s", value("time/updates_per_second"), ",.0f"),
            ),
        )
        grid.add_row(
            "return",
            _cells(
                ("training", value("rollout/ep_rew_mean"), ",.1f"),
                ("evaluation", value("eval/mean_reward"), ",.1f"),
                ("best", best, ",.1f"),
            ),
        )
        grid.add_row(
            "learning",
            _cells(
                ("loss", value("train/loss"), ".4g"),
                ("mean Q", value("train/q_mean"), ",.2f"),
                ("epsilon", value("rollout/exploration_rate"), ".3f"),
            ),
        )
        grid.add_row(
            "pipeline",
            _cells(
                ("samples/step", value("pipeline/samples_per_step"), ".3g"),
                ("lag", value("pipeline/lag"), ".0f"),
                ("MB/s copied", value("pipeline/transfer_mb_per_second"), ",.0f"),
            ),
        )
        shares = [(label, value(name, 0.0), style) for name, label, style in SHARES]
        other = 1.0 - sum(share for _, share, _ in shares)
        if "pipeline/env" in self._values and other > 0.005:
            shares.append(("other", other, "grey30"))
        bar, legend = _stacked(shares)
        grid.add_row("time", bar)
        grid.add_row("", legend)
        for label, row in _team(self._values):
            grid.add_row(label, row)
        if limit := bottleneck(self._values):
            grid.add_row("limit", Text(limit))
        return Panel(grid, title=Text(self._title), title_align="left", expand=False, padding=(0, 1))


def bottleneck(values: Mapping[str, float]) -> str:
    """What takes most of the time: making that faster makes the run faster."""
    if "pipeline/env" not in values:
        return ""
    names = ("env", "act", "learn", "transfer", "wait", "wait_actions")
    env, act, learn, transfer, wait, for_actions = (values.get(f"pipeline/{name}", 0.0) for name in names)
    agreeing = values.get("sync/wait", 0.0)
    acting, for_learner = act + for_actions, wait - for_actions - agreeing
    if agreeing > max(env, acting, learn):
        return "agreeing: larger batches, or a mode that meets less often, would help"
    in_turn = env + acting + learn < 1.05  # shares of the time; otherwise learning goes on beside the others
    learning = learn > max(env, acting) if in_turn else learn > 0.9 or for_learner > 0.1
    if transfer > (learn if learning else acting) / 2 and (learning or env < acting):
        return "copies: smaller observations (or env.frame_stack, which sends each frame once), or the replay on the GPU, would help"
    if learning:
        return "learning: fewer samples per step or a faster device would help"
    if env >= acting:
        return "environments: more cores or faster environments would help"
    return "acting: more environments per group would help"


def is_terminal() -> bool:
    """Under mpirun nobody can tell: it gives every process a terminal, and sends what is written there anywhere."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "OMPI_COMM_WORLD_RANK" not in os.environ


def line(step: int, total: int, values: Mapping[str, float]) -> str:
    """One plain line; what is not known yet is left out."""
    parts = [f"step {step:,}/{total:,}", f"{percent(step, total)}%"]
    for name, text in (
        ("time/steps_per_second", "{:,.0f} steps/s"),
        ("time/updates_per_second", "{:,.0f} upd/s"),
        ("rollout/ep_rew_mean", "return {:,.1f}"),
        ("eval/mean_reward", "eval {:,.1f}"),
        ("train/loss", "loss {:.4g}"),
        ("rollout/exploration_rate", "eps {:.3g}"),
        ("sync/wait", "waiting {:.0%}"),
        ("sync/staleness", "stale {:.2g}"),
    ):
        if name in values:
            parts.append(text.format(values[name]))
            if name == "eval/mean_reward" and values.get("eval/step", step) != step:  # of an earlier one
                parts[-1] += f" (at {values['eval/step']:,.0f})"
    if limit := bottleneck(values):
        parts.append(f"limit {limit.partition(':')[0]}")
    if (seconds := eta(step, total, values)) is not None:
        parts.append(f"ETA {duration(seconds)}")
    return "  ".join(parts)


def percent(step: int, total: int) -> int:
    """Rounded down, so that 100% means done."""
    return min(100, 100 * step // total)


def eta(step: int, total: int, values: Mapping[str, float]) -> float | None:
    """Seconds left at the present speed. The mean speed would mislead: the first steps train nothing and fly."""
    speed = values.get("time/steps_per_second", 0.0)
    return max(0, total - step) / speed if speed > 0 else None


def duration(seconds: float | None) -> str:
    """12s, 3m05s, 2h07m; - when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def widths(shares: list[float], width: int) -> list[int]:
    """Cells of a stacked bar: whole numbers that add up to `width` (largest remainders) in proportion to the shares."""
    total = sum(shares)
    if not total > 0:  # nothing measured yet, or NaN
        return [0] * len(shares)
    exact = [share / total * width for share in shares]
    cells = [int(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: cells[i] - exact[i])
    for i in by_remainder[: width - sum(cells)]:
        cells[i] += 1
    return cells


def _cells(*cells: tuple[str, float | None, str], width: int = 12) -> Text:
    from rich.text import Text

    out = Text()
    for label, value, form in cells:
        out.append(f"{label} ", style="dim")
        out.append(f"{'-' if value is None else format(value, form):<{width}}")
    out.rstrip()
    return out


def _team(values: Mapping[str, float]) -> Iterator[tuple[str, Text]]:
    """Rows about several learners, if there are."""
    value = values.get
    if "sync/pushes_per_second" not in values:
        return
    yield (
        "sync",
        _cells(
            ("MB/s", value("sync/mb_per_second"), ",.2f"),
            ("compressed", value("sync/compression"), ".2f"),
            ("rejected", value("sync/rejected"), ".0%"),
        ),
    )
    if any(value(name, 0.0) > 0.0 for name in STALE[1:]):
        yield "staleness", _histogram([value(name, 0.0) for name in STALE])
    ranks = sorted(int(n[8 : n.index("/")]) for n in values if n.startswith("learner_") and n.endswith("/wait"))
    for rank in ranks[:LEARNERS]:
        found = [(label, value(f"learner_{rank}/{name}"), form) for label, name, form in EACH]
        yield f"learner {rank}", _cells(*(cell for cell in found if cell[1] is not None), width=0)


def _histogram(parts: list[float]) -> Text:
    """How many pushes were how stale: 0: 50%, 1: 48%, 2-3: 2%."""
    from rich.text import Text

    last = [str(high - 1) for high in BUCKETS[1:]]
    names = [str(low) if str(low) == to else f"{low}-{to}" for low, to in zip(BUCKETS, last, strict=False)]
    names.append(f"{BUCKETS[-1]}+")
    return Text(", ".join(f"{n}: {part:.0%}" for n, part in zip(names, parts, strict=True) if part >= 0.005))


def _stacked(shares: list[tuple[str, float, str]], width: int = 60) -> tuple[Text, Text]:
    """A bar of coloured cells and, below it, what the colours mean."""
    from rich.text import Text

    bar, legend = Text(), Text()
    for (label, share, style), cells in zip(shares, widths([share for _, share, _ in shares], width), strict=True):
        bar.append("█" * cells, style=style)
        if share >= 0.005:
            legend.append("■ ", style=style)
            legend.append(f"{label} {share:.0%} ")
    return bar, legend
