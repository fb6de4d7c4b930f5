"""Worker processes: how they fail and how they end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.config import EnvConfig
from qfleet.envs import make
from qfleet.envs.subprocess import Subprocess


def workers(id: str = "env_toys:Trouble-v0", num_envs: int = 3, threads: int = 2, **kwargs: Any) -> Subprocess:
    envs = make(EnvConfig(id=id, num_envs=num_envs, vectorize="subprocess", kwargs=kwargs), seed=1, threads=threads)
    assert isinstance(envs, Subprocess)
    return envs


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_exception_arrives_with_its_traceback() -> None:
    with workers() as envs:
        envs.reset()
        pids = [p.pid for p in envs._processes]
        with pytest.raises(
            RuntimeError, match=r"(?s)worker 1 \(process \d+, environments 1 to 2\).*env_toys.py.*hung up"
        ):
            envs.step(np.array([0, 0, 1]))
        assert all(map(gone, pids))


def test_a_dead_worker_is_named() -> None:
    with workers() as envs:
        envs.reset()
        pids = [p.pid for p in envs._processes]
        with pytest.raises(
            RuntimeError, match=r"worker 0 \(process \d+, environments 0 to 0\) died with signal SIGKILL"
        ):
            envs.step(np.array([2, 0, 0]))
        assert all(map(gone, pids))


def test_a_failing_constructor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import env_toys

    monkeypatch.setattr(env_toys.Trouble, "__init__", lambda self, broken: env_toys.Counter.__init__(self))
    with pytest.raises(RuntimeError, match=r"(?s)env_toys.py.*no licence"):  # the worker's class is untouched
        workers(broken=True)


def test_more_workers_than_environments_and_uneven_slices() -> None:
    for num_envs, threads in ((2, 5), (5, 3)):
        with workers("env_toys:Counter-v0", num_envs=num_envs, threads=threads) as envs:
            assert len(envs._processes) == min(num_envs, threads)
            envs.reset()
            s = envs.step(np.arange(num_envs) % 4)
            assert s.reward.tolist() == [1 + i % 4 for i in range(num_envs)]


def test_closing_twice_and_ignoring_signals() -> None:
    envs = workers()
    envs.reset()
    processes = list(envs._processes)
    for p in processes:
        os.kill(p.pid, signal.SIGTERM)  # a batch system's warning to everybody: the parent finishes its step
    assert envs.step(np.zeros(3, np.int64)).obs[:, 1].tolist() == [1, 1, 1]
    envs.close()
    envs.close()
    assert [p.returncode for p in processes] == [0, 0]


def test_workers_do_not_import_torch() -> None:
    code = "import sys, qfleet.envs.subprocess; assert 'torch' not in sys.modules and 'ale_py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


PARENT = """
import sys
from qfleet.config import EnvConfig
from qfleet.envs import make
kwargs = {"file": sys.argv[1], "where": "reset", "keep": True}
envs = make(EnvConfig(id="env_toys:Hanging-v0", num_envs=2, vectorize="subprocess", kwargs=kwargs), seed=1, threads=2)
print(*(p.pid for p in envs._processes), flush=True)
envs.reset()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("hang", [False, True])
def test_workers_end_when_the_parent_is_killed(hang: bool, tmp_path: Path) -> None:
    """Busy or not. No main guard either: the script above would fail under multiprocessing."""
    if hang:
        (tmp_path / "file").touch()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdin and parent.stdout
    # Descriptors of the processes: readable once they have ended, whoever their parent is by then.
    watched = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(watched) == 2
    assert [parent.stdout.readline() for _ in range(2 if hang else 1)] == (["it hangs\n"] * 2 if hang else ["ready\n"])
    assert select.select(watched, [], [], 0)[0] == []
    parent.kill()
    parent.wait()
    ended: set[int] = set()
    while len(ended) < 2:
        ready = select.select([fd for fd in watched if fd not in ended], [], [], 20)[0]
        assert ready, "a worker outlived its parent"
        ended.update(ready)
    for fd in watched:
        os.close(fd)
    parent.stdin.close()
    parent.stdout.close()
