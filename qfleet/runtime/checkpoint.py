"""Checkpoints: weights in safetensors, arrays and JSON beside them, one manifest with checksums, written last. No pickle.

    checkpoints/
      step_000012000/   model.safetensors  state.safetensors  state.json  manifest.json
      best_000010000/   model.safetensors  state.json  manifest.json      (weights of the best evaluation)
      replay/           rows_000012000_000.safetensors ...   (rows added since the checkpoint before)
      last, best        links for people

A folder appears under its name only when it is complete: it is written as .tmp, flushed to disk and renamed. Replay rows
never change once written, so a checkpoint adds only the new ones; rows that have left the ring are deleted after the new
manifest is in place. So only the newest checkpoint can be resumed; the older ones keep their weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from qfleet import machine
from qfleet.replay import Replay
from qfleet.types import Array, State

FORMAT = 2  # 1: Nature features channels first, no groups
ARRAY = "__array__"
SEGMENT_BYTES = 64 << 20
WRITERS = 4  # segments that are hashed and written at once, on as many cores


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another format."""


# --- state trees <-> JSON and arrays ---------------------------------------------------------------------------


def split(state: Any, arrays: dict[str, Array], path: str = "") -> Any:
    """A JSON-able copy of the tree; arrays and tensors move into `arrays` and leave {"__array__": path} behind."""
    if isinstance(state, torch.Tensor):
        state = state.detach().cpu().numpy()
    if isinstance(state, np.ndarray):
        arrays[path] = np.asarray(state, order="C")  # ascontiguousarray would give scalars a dimension
        return {ARRAY: path}
    if isinstance(state, Mapping):
        return {k: split(v, arrays, f"{path}/{k}" if path else str(k)) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return [split(v, arrays, f"{path}/{i}") for i, v in enumerate(state)]
    return state.item() if isinstance(state, np.generic) else state


def join(tree: Any, arrays: Mapping[str, Array]) -> Any:
    """The inverse of `split`; arrays come back as NumPy arrays."""
    if isinstance(tree, dict):
        if tree.keys() == {ARRAY}:
            return arrays[tree[ARRAY]]
        return {k: join(v, arrays) for k, v in tree.items()}
    return [join(v, arrays) for v in tree] if isinstance(tree, list) else tree


# --- files -------------------------------------------------------------------------------------------------------


def _write(path: Path, data: bytes) -> dict[str, Any]:
    """Write and flush to disk -> the file's entry in the manifest."""
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _write_rows(path: Path, rows: dict[str, torch.Tensor], upto: list[int]) -> dict[str, Any]:
    """-> the segment's entry in the manifest."""
    return {"file": path.name, **_write(path, _arrays(rows)), "upto": upto}


def _read(path: Path, entry: Mapping[str, Any], checkpoint: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise CheckpointError(
            f"checkpoint {checkpoint} is damaged: {path.name} cannot be read ({e.strerror})."
        ) from None
    if len(data) != entry["bytes"]:
        raise CheckpointError(
            f"checkpoint {checkpoint} is damaged: {path.name} has {len(data):,} bytes instead of {entry['bytes']:,}."
        )
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: the checksum of {path.name} does not match.")
    return data


def _sync_dir(path: Path) -> None:
    """Make renames in a folder last; some file systems cannot, and need not be asked twice."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _arrays(tensors: Mapping[str, Any]) -> bytes:
    arrays = {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
    data: bytes = safetensors.numpy.save({k: np.asarray(v, order="C") for k, v in arrays.items()})
    return data


def _link(folder: Path, name: str, target: str) -> None:
    """A convenience: where links cannot be made, there is none."""
    temporary = folder / f".{name}.tmp"
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(folder / name)


def _write_folder(folder: Path, state: State, replay: list[dict[str, Any]]) -> None:
    """One checkpoint folder, atomically. `state` holds the network's weights under learner/model."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        rest = {**state, "learner": {k: v for k, v in state["learner"].items() if k != "model"}}
        arrays: dict[str, Array] = {}
        tree = split(rest, arrays)
        files = {"model.safetensors": _write(temporary / "model.safetensors", _arrays(state["learner"]["model"]))}
        if arrays:
            files["state.safetensors"] = _write(temporary / "state.safetensors", _arrays(arrays))
        files["state.json"] = _write(temporary / "state.json", json.dumps(tree).encode())
        manifest = {"format": FORMAT, "step": state["step"], "files": files, "replay": replay}
        _write(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        _sync_dir(temporary)
        if folder.exists():  # the same step again, in a resumed run: nobody may find it half gone
            folder.rename(folder.with_name(folder.name + ".old.tmp"))
        temporary.rename(folder)
        _sync_dir(folder.parent)
        shutil.rmtree(folder.with_name(folder.name + ".old.tmp"), ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


# --- saving --------------------------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.dir, self.keep = run_dir / "checkpoints", keep
        self._segments: list[dict[str, Any]] = []
        self._saved_rows: torch.Tensor | None = None  # rows per column that are on disk
        self._saved_step = -1
        self._superseded = False  # older ones are still there

    def folder(self, step: int) -> Path:
        return self.dir / f"step_{step:09d}"

    def save(self, step: int, state: State, replay: Replay, all_saved: Callable[[], bool] = lambda: True) -> None:
        """A full checkpoint, from which the run can go on. Saving the same step again does nothing.

        `all_saved`: have the other learners saved this step, too? Only then the one before is given up; if not now, by `prune`.
        """
        if step == self._saved_step:
            return
        rows_dir = self.dir / "replay"
        rows_dir.mkdir(parents=True, exist_ok=True)
        count, oldest = replay.count.cpu(), replay.count.cpu() - replay.rows
        segments = [s for s in self._segments if bool((torch.tensor(s["upto"]) > oldest).any())]
        written: list[Path] = []
        try:
            since = torch.zeros_like(count) if self._saved_rows is None else self._saved_rows
            since = torch.maximum(since, oldest)
            writers = min(WRITERS, machine.cores())
            with ThreadPoolExecutor(writers) as pool:
                writing: list[Future[dict[str, Any]]] = []
                while bool((since < count).any()):  # in parts: as many of them are in memory
                    until = torch.minimum(since + replay.rows_within(SEGMENT_BYTES), count)
                    written.append(rows_dir / f"rows_{step:09d}_{len(written):03d}.safetensors")
                    if len(writing) >= writers:
                        writing[-writers].result()
                    writing.append(pool.submit(_write_rows, written[-1], replay.segment(since, until), until.tolist()))
                    since = until
                segments += [segment.result() for segment in writing]
            _sync_dir(rows_dir)
            _write_folder(self.folder(step), {**state, "step": step, "replay": replay.state()}, segments)
        except OSError:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        self._segments, self._saved_rows, self._saved_step = segments, count.clone(), step
        _link(self.dir, "last", self.folder(step).name)
        self._superseded = True
        if all_saved():
            self.prune()

    def save_state(self, step: int, state: State) -> None:
        """A checkpoint of a process that has no replay. `state` holds the network's weights under learner/model."""
        _write_folder(self.folder(step), {**state, "step": step}, [])
        _link(self.dir, "last", self.folder(step).name)
        self._prune_steps()

    def save_best(self, step: int, spec: State, model: State) -> None:
        """The weights of the best evaluation so far."""
        state = {"learner": {"model": model}, "spec": spec, "step": step}
        _write_folder(self.dir / f"best_{step:09d}", state, [])
        _link(self.dir, "best", f"best_{step:09d}")
        for old in self.dir.glob("best_*"):
            if old.name != f"best_{step:09d}":
                shutil.rmtree(old, ignore_errors=True)

    def _prune_steps(self) -> None:
        for old in sorted(self.dir.glob("step_*"))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def prune(self) -> None:
        """Give up checkpoints that the newest one supersedes."""
        if not self._superseded:
            return
        self._superseded = False
        self._prune_steps()
        used = {s["file"] for s in self._segments}
        for rows in (self.dir / "replay").iterdir():
            if rows.name not in used:
                rows.unlink()

    def load(self, replay: Replay, least: Callable[[int], int] = lambda step: step) -> State:
        """The newest checkpoint's state; the replay is filled from it. Later saves continue its segments.

        `least`: the step of the newest one -> that of the newest one that all learners have.
        """
        folder = newest(self.dir)
        common = self.folder(least(int(folder.name[5:])))
        if common != folder:  # somebody did not get that far
            shutil.rmtree(folder)
            folder = common
        state, manifest = read(folder)
        replay.load_state(state["replay"])
        for segment in manifest["replay"]:
            data = _read(self.dir / "replay" / segment["file"], segment, folder)
            replay.load_segment({k: torch.from_numpy(v) for k, v in safetensors.numpy.load(data).items()})
        self._segments, self._saved_rows, self._saved_step = (
            manifest["replay"],
            replay.count.cpu().clone(),
            state["step"],
        )
        for leftover in self.dir.glob("*.tmp"):  # of a save that was cut short
            shutil.rmtree(leftover, ignore_errors=True)
        return state


def set_aside(run_dir: Path) -> Path | None:
    """Before a run begins anew: what it saved must not be taken for the new one's. -> where its weights are now, if there are any."""
    folder, aside = run_dir / "checkpoints", run_dir / "checkpoints.old"
    shutil.rmtree(run_dir / "learners", ignore_errors=True)
    shutil.rmtree(folder / "replay", ignore_errors=True)
    if not any((saved / "manifest.json").exists() for saved in folder.glob("*_*")):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    return aside


# --- loading -------------------------------------------------------------------------------------------------------


def steps(checkpoints: Path) -> list[Path]:
    """The folders of complete checkpoints, oldest first."""
    return sorted(p for p in checkpoints.glob("step_*") if p.suffix != ".tmp")


def newest(checkpoints: Path) -> Path:
    folders = steps(checkpoints)
    if not folders:
        raise CheckpointError(
            f"{checkpoints.parent} holds no checkpoint: the run ended before its first one, or has not come to it yet. `train --resume {checkpoints.parent}` begins it anew; or name another run directory."
        )
    return folders[-1]


def read(folder: Path) -> tuple[State, dict[str, Any]]:
    """-> (state with learner/model filled, manifest), every file verified."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError):
        others = sorted(str(p) for p in folder.parent.glob("*_*") if p != folder and (p / "manifest.json").exists())
        hint = f" Weights are also in: {', '.join(others)}." if others else ""
        raise CheckpointError(
            f"checkpoint {folder} is damaged: its manifest.json is missing or unreadable.{hint}"
        ) from None
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {manifest['format']}; this version of qfleet reads format {FORMAT}."
        )
    data = {name: _read(folder / name, entry, folder) for name, entry in files.items()}
    arrays = safetensors.numpy.load(data["state.safetensors"]) if "state.safetensors" in data else {}
    state: State = join(json.loads(data["state.json"]), arrays)
    state["learner"]["model"] = safetensors.numpy.load(data["model.safetensors"])
    return state, manifest


def check_run(folder: Path) -> None:
    """Is there a run?"""
    if not folder.exists():
        raise CheckpointError(
            f"there is no run at {str(folder)!r}. Name a run directory (it holds config.yaml) or a checkpoint in it."
        )
    if not (folder / "config.yaml").exists():
        raise CheckpointError(f"{str(folder)!r} is no run directory: it has no config.yaml.")


def locate(run: str | Path) -> tuple[Path, Path]:
    """RUN as the user names it (a run directory or a checkpoint in it) -> (run directory, checkpoint: best, else newest)."""
    path = Path(run)
    if path.exists() and ((path / "manifest.json").exists() or path.parent.name == "checkpoints"):
        return path.resolve().parent.parent, path.resolve()
    check_run(path)
    best = sorted(
        p for p in (path / "checkpoints").glob("best_*") if (p / "manifest.json").exists() and p.suffix != ".tmp"
    )
    return path, best[-1] if best else newest(path / "checkpoints")
