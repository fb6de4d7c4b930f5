"""Matrix products on the CPU, by whoever is fastest there.

MKL, by which torch multiplies, leaves AMD's processors at AVX2, also those with AVX-512; oneDNN, which torch brings along, does not. On such a
one (EPYC, Zen 5) the layer of 3136 x 512 of a Nature network takes MKL 1.0 ms at batch 32, each way, and oneDNN 0.4 to 0.5.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfleet import machine

ONEDNN = machine.amd() and torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
LARGE = 1 << 20  # multiplications: below, autograd's own call costs less than it takes longer


def _onednn(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """x w' + b."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")
    return out


def product(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
    """out = x w' + b, without a gradient."""
    if ONEDNN:
        out.copy_(_onednn(x, w, b))
    elif b is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(b, x, w.t(), out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """F.linear."""
    large = x.numel() * len(weight) >= LARGE
    if not (ONEDNN and large and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32):
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            _onednn(grad, weight.t(), None) if to_x else None,
            _onednn(grad.t(), x.t(), None) if to_weight else None,
            grad.sum(0) if to_bias else None,
        )
