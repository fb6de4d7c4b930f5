"""Compiles every kernel of an update for the architecture given (90: H100 and H200; gfx942: MI300), without such a GPU; prints each one's shared memory.

Run as a program by test_compile.py. Triton's interpreter accepts what its compiler refuses. So the launches of a whole update are made with a driver that only
says what to compile for, and with `warmup`, which compiles and does not launch.
"""

# ruff: noqa: E402 - what they are compiled for is settled before kernels are imported

import json
import sys
from typing import Any

import torch

ARCHITECTURE = sys.argv[1]
AMD = ARCHITECTURE.startswith("gfx")
if AMD:  # as a build of torch for it would say, before kernels are imported
    torch.version.hip = "7.0"

import triton
from test_nature import SPEC, config_of, filled
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from qfleet.captured import CapturedLearner
from qfleet.kernels import head, nature, optimizer
from qfleet.learner import Learner

shared: dict[str, int] = {}  # bytes, the most of all launches of a kernel


class Driver:
    """Enough of one to compile."""

    def get_current_target(self) -> GPUTarget:
        if AMD:
            return GPUTarget("hip", ARCHITECTURE, 64 if ARCHITECTURE.startswith("gfx9") else 32)
        return GPUTarget("cuda", int(ARCHITECTURE), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        shared[self.fn.__name__] = max(shared.get(self.fn.__name__, 0), kernel.metadata.shared)
        return kernel

    JITFunction.run = only_compile  # type: ignore[method-assign]
    nature.product = lambda a, b, out: None  # a CPU has no product of bf16 that gives float32
    for settings in (
        {},
        {"learner__double": True, "learner__loss": "mse", "learner__weight_decay": 0.1, "learner__batch_size": 1},
        {
            "learner__munchausen": True,
            "replay__prioritized": True,
            "learner__grad_clip": 0.0,
            "learner__batch_size": 1000,
        },
    ):
        config = config_of(**settings)
        learner = Learner(config, SPEC, torch.device("cpu"))
        data = learner.flat.data
        low, zeros = data.bfloat16(), torch.zeros_like(data)
        one = torch.zeros(1)
        buffers = nature.Buffers(
            data, low, data, low, zeros, zeros, zeros, torch.zeros(1, dtype=torch.int64), one, one, one.double(), one
        )
        sampler = filled(config).on_device(config.learner.batch_size, kernels=True)
        nature.Update(config, learner.flat.places, buffers, sampler)()
        params = nature.Params.of(low, learner.flat.places)
        forward = nature.Forward(params, params, 7)
        head.greedy(forward.h, forward.last, torch.zeros(7, dtype=torch.int64))
    config = config_of(learner__double=True, network__dueling=True, replay__prioritized=True)
    by_autograd = CapturedLearner(config, SPEC, torch.device("cpu"))
    by_autograd.kernels = True
    by_autograd._compute_low(torch.bfloat16)
    by_autograd.learn(filled(config), 1)
    optimizer._nothing[(1,)](one)
    print(json.dumps(shared))


if __name__ == "__main__":
    main()
