"""Kernels compile for a GPU, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path


def test_every_kernel_of_an_update_compiles(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [
        "_adam", "_forward", "_gather", "_greedy", "_input_grad", "_last_grad", "_loss", "_nothing", "_prioritized", "_reduce", "_squares",
        "_uniform", "_update", "_weight_grad",
    ]  # fmt: skip
