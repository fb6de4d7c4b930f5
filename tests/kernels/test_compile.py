"""Kernels compile for a GPU, on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("architecture", "most"),
    [
        pytest.param("89", 101_376, marks=pytest.mark.long),
        ("90", 232_448),
        pytest.param("gfx942", 65_536, marks=pytest.mark.long),
        pytest.param("gfx1100", 65_536, marks=pytest.mark.long),
    ],
    ids=["RTX 40", "H100", "MI300", "RX 7900"],
)
def test_every_kernel_of_an_update_compiles(architecture: str, most: int, tmp_path: Path) -> None:
    """And fits into the shared memory of such a GPU."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), architecture],
        capture_output=True,
        text=True,
        check=False,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shared = json.loads(done.stdout)
    assert sorted(shared) == [
        "_adam", "_forward", "_gather", "_greedy", "_input_grad", "_last_grad", "_loss", "_nothing", "_prioritized", "_reduce", "_squares",
        "_uniform", "_update", "_weight_grad", "_weights",
    ]  # fmt: skip
    assert max(shared.values()) <= most, shared
