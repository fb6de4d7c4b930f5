"""What a run says about itself: `metrics.jsonl` (the record) and TensorBoard events (a view of the same numbers).

One JSON object a line, always with `step` and `time` (seconds of training, resumes included). A checkpoint saves
`position()`; a resume cuts the file back to it, so an interrupted run leaves the same lines as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from qfleet.runtime.tensorboard import EventFile, write_all
from qfleet.sync.traffic import rates

if TYPE_CHECKING:  # it imports torch, which those who only read metrics do without
    from qfleet.learner import Learned

FILE_NAME = "metrics.jsonl"
EVENTS = f"events.out.tfevents.{'[0-9]' * 10}.{'[0-9]' * 4}.*.*"  # as EventFile names them; other programs leave out our number
SHARES = ("env", "act", "learn", "transfer", "wait", "wait_actions")  # of the time, in seconds on the clock
Row = dict[str, float]


class Window:
    """What happened since the last line: losses, and how far the counts and seconds of `clock` went."""

    def __init__(self, clock: Callable[[], dict[str, float]]) -> None:
        self._clock = clock
        self._loss_sum, self._q_mean, self._updates = 0.0, 0.0, 0
        self.begin()

    def add(self, learned: Learned) -> None:
        self._loss_sum += learned.loss_sum
        self._updates += learned.updates
        self._q_mean = learned.q_mean

    def leave_out(self, seconds: float) -> None:
        self._then["wall"] += seconds

    def begin(self) -> None:
        """The time counts from now on."""
        self._then = self._clock()

    def close(self, batch_size: int) -> Row:
        """The values of the window; the next one begins."""
        now = self._clock()
        passed = {name: now[name] - then for name, then in self._then.items()}
        wall = max(passed["wall"], 1e-9)
        values: Row = {}
        if self._updates:
            values["train/loss"] = self._loss_sum / self._updates
            values["train/q_mean"] = self._q_mean
        values["time/steps_per_second"] = passed["steps"] / wall
        values["time/updates_per_second"] = passed["updates"] / wall
        values |= {f"pipeline/{name}": passed[name] / wall for name in SHARES}
        values["pipeline/transfer_mb_per_second"] = passed["bytes"] / 1e6 / wall
        values |= rates(passed, wall)
        if "sync/samples_per_second" in values:
            values["sync/sent_mb"] = now["sync/bytes"] / 1e6
            values["sync/pushes"] = now["sync/pushes"]
        if passed["steps"]:
            values["pipeline/samples_per_step"] = passed["updates"] * batch_size / passed["steps"]
        self._loss_sum, self._updates, self._then = 0.0, 0, now
        return values

    def state(self) -> list[float]:
        return [self._loss_sum, self._q_mean, self._updates]

    def load_state(self, state: list[float]) -> None:
        self._loss_sum, self._q_mean, self._updates = state[0], state[1], int(state[2])


class Metrics:
    """Writes every line at once, unbuffered: what was logged survives a kill, and a full disk raises OSError here."""

    def __init__(self, run_dir: Path, resume_bytes: int | None = None) -> None:
        """A new log, or with `resume_bytes` the existing one cut back to that position.

        A log that the user deleted starts anew; one that is shorter than the checkpoint says is refused.
        """
        path = run_dir / FILE_NAME
        last: Row = {}
        self._position = 0
        if resume_bytes is not None and path.exists():
            if (size := path.stat().st_size) < resume_bytes:
                raise ValueError(
                    f"{path} holds {size} bytes, but {resume_bytes} when the checkpoint was made: it was cut or replaced. "
                    f"Put the original back, or delete it to resume with a new log."
                )
            self._file: BinaryIO = open(path, "r+b", buffering=0)  # noqa: SIM115 - closed by close()
            self._file.truncate(resume_bytes)
            self._position = self._file.seek(resume_bytes)
            last = (read(run_dir) or [last])[-1]
        else:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
            if resume_bytes is None:  # of a run that ended before its first checkpoint
                for events in run_dir.glob(EVENTS):
                    events.unlink()
        self._start = time.monotonic() - last.get("time", 0.0)
        purge_step = None if resume_bytes is None else int(last.get("step", -1)) + 1
        self._events = EventFile(run_dir, purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line. JSON has no NaN or infinity: they become null (TensorBoard shows them as they are)."""
        assert "step" not in values and "time" not in values, "step and time are written by Metrics"
        numbers = {name: float(value) for name, value in values.items()}
        row: dict[str, float | None] = {"step": step, "time": round(time.monotonic() - self._start, 3)}
        row.update((name, value if math.isfinite(value) else None) for name, value in numbers.items())
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        write_all(self._file, line)
        self._position += len(line)
        self._events.write(step, numbers)

    def position(self) -> int:
        """Bytes written so far; a checkpoint saves it for `resume_bytes`."""
        return self._position

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read(run_dir: Path) -> list[Row]:
    """Every line as a dict, null as NaN. A last line that is still being written is left out."""
    path = run_dir / FILE_NAME
    *lines, _unfinished = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append({name: math.nan if value is None else value for name, value in json.loads(line).items()})
        except (ValueError, AttributeError):
            raise ValueError(f"{path}, line {number} is no JSON object: {line[:60]!r}. Delete the line.") from None
    return rows
