import importlib.metadata
import platform
import sys
import tomllib
from pathlib import Path

import torch

from qfleet import doctor, machine
from qfleet.acting import placement


def lines() -> dict[str, tuple[str, str]]:
    return {name: (value, note) for name, value, note in doctor.report()}


def test_it_reports_this_machine():
    found = lines()
    assert found["python"][0] == platform.python_version()
    assert found["torch"][0] == torch.__version__
    assert found["gymnasium"][0] == importlib.metadata.version("gymnasium")
    assert found["cpu"][0] and float(found["memory"][0].removesuffix(" GB")) > 0.1
    assert {"cpu bf16", "compiler", "ale-py", "[video]", "[box2d]"} <= found.keys()
    assert not [name for name, (value, note) in found.items() if "Error" in note]


def test_a_missing_torch_is_said_and_the_rest_still_appears(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` raise ImportError
    found = lines()
    assert found["torch"] == ("missing", "pip install torch")
    assert found["gpu"][0] == "none"
    assert "python" in found and "[video]" in found


def test_missing_packages_name_the_line_that_adds_them(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "imageio_ffmpeg" else object())
    found = lines()
    assert found["gymnasium"] == ("missing", "pip install gymnasium")
    assert found["[video]"] == ("missing", f"qfleet video: {machine.install('video')}")  # half of it is not enough
    assert found["[minatar]"][0] == "installed"


def test_a_broken_part_is_reported_and_does_not_stop_the_others(monkeypatch):
    def broken():
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    found = lines()
    assert found["gpus"] == ("unknown", "RuntimeError: driver too old")
    assert "[video]" in found


def test_gpus_are_listed(monkeypatch):
    class Properties:
        name, total_memory, major, minor = "H200", 150_000_000_000, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    assert lines()["gpu 1"] == ("H200", "150 GB, compute capability 9.0")


def test_a_gpu_says_from_where_on_it_acts_sooner(monkeypatch):
    measured = {"LunarLander-v3": (3.0, 3.0, 3.0), "pong": (3.0, 1.0, 0.5)}

    def crossover(config, spec, gpu):
        return [(batch, 1e-3, gpu * 1e-3) for batch, gpu in zip((1, 8, 64), measured[config.env.id], strict=True)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(placement, "crossover", crossover)
    found = lines()
    assert found["acting, MLP"][0] == "CPU"
    assert found["acting, Nature CNN"][0] == "GPU from 8 environments on"
    assert "1: 1.00 and 3.00, 8: 1.00 and 1.00, 64: 1.00 and 0.50" in found["acting, Nature CNN"][1]


def test_compiler_and_headers(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert lines()["compiler"][0] == "missing"
    (tmp_path / "g++").touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert "Python.h is missing" in lines()["compiler"][1]
    (tmp_path / "Python.h").touch()
    assert lines()["compiler"] == (str(tmp_path / "g++"), "torch.compile is usable on the CPU")


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(extras) - {"dev", "bench", "serve", "data"}  # not built yet
