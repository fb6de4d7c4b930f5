"""Cores and memory that a process may use, in made-up control groups and with a real affinity."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qfleet import machine


def control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str]) -> None:
    (tmp_path / "cgroup").write_text(group + "\n")
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    monkeypatch.setattr(machine, "PROCESS_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "groups")


@pytest.mark.parametrize(
    ("group", "files", "left"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, 8000 * 1024),
        (
            "0::/a/b",
            {"a/memory.max": "5000", "a/memory.current": "3000", "a/memory.stat": "anon 1\ninactive_file 500"},
            2500,
        ),
        ("0::/elsewhere", {"memory.max": "700", "memory.current": "900"}, 0),
        ("4:memory:/x", {"memory/x/memory.limit_in_bytes": "9000", "memory/x/memory.usage_in_bytes": "1000"}, 8000),
        ("3:cpu:/x", {"cpu/x/memory.max": "1", "cpu/x/memory.current": "1"}, 8000 * 1024),
    ],
)
def test_available_memory_respects_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], left: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    control_groups(tmp_path, monkeypatch, group, files)
    assert machine.free_memory() == left


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "max 100000"}, 16),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "450000 100000"}, 4),
        ("0::/a", {"a/cpu.max": "30000 100000"}, 1),
        ("0::/elsewhere", {"cpu.max": "200000 100000"}, 2),
        ("0::/a", {"a/cpu.max": "9900000 100000"}, 16),
        ("0::/a", {}, 16),
        (
            "5:cpu,cpuacct:/x",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "300000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            3,
        ),
        (
            "5:cpu,cpuacct:/x",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "-1", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            16,
        ),
        ("5:cpuset:/x", {"cpuset/x/cpu.max": "100000 100000"}, 16),
    ],
)
def test_cores_respect_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    control_groups(tmp_path, monkeypatch, group, files)
    assert machine.cores() == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_cores_respect_affinity() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from qfleet import machine; print(machine.cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_the_command_that_adds_an_extra_is_that_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(sys.executable).parent
    monkeypatch.setattr("shutil.which", lambda name: str(folder / name))
    assert machine.install("ray") == 'pip install "qfleet[ray]"'
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.chdir(folder)
    assert machine.install("ray") == f'{Path(sys.executable).name} -m pip install "qfleet[ray]"'


@pytest.mark.parametrize(("vendor", "amd"), [("AuthenticAMD", True), ("GenuineIntel", False), (None, False)])
def test_whose_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str | None, amd: bool) -> None:
    info = tmp_path / "cpuinfo"
    if vendor:
        info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n\nprocessor\t: 1\nvendor_id\t: other\n")
    monkeypatch.setattr(machine, "CPUINFO", info)
    assert machine.amd() is amd


AGAIN = """
import resource, sys, torch
from qfleet import machine
if sys.argv[1] == "kept":
    machine.keep_memory()
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(48 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, *_, again = [pages() for _ in range(30)]  # until pieces of that size have found their places
print(first, again)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is left to the system")
@pytest.mark.parametrize("kept", [True, False])
def test_freed_memory_is_used_again(kept: bool) -> None:
    """Without asking the system for pages, which it does for pieces of this size by default."""
    command = [sys.executable, "-c", AGAIN, "kept" if kept else "not"]
    first, again = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert first > 10 and (again < first / 10) == kept
