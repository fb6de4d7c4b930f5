"""Triton kernels of the hot path on a GPU. Imported only where they are used; the plain torch code is always there, too.

Tensors are [B, height, width, channels] in memory and bf16 unless said otherwise; sums are float32. With
TRITON_INTERPRET=1 the same kernels run on the CPU, slowly: so they are tested.
"""

from __future__ import annotations

import torch

from qfleet.device import AMD as AMD  # less memory for a block of threads, no products of float32 in three parts
from qfleet.device import reason


def why_not(device: torch.device) -> str:
    """Why kernels cannot be compiled here, if so. Besides Triton that takes a GPU, a C compiler and Python's headers."""
    if device.type != "cuda":
        return "kernels need a GPU"
    try:
        from qfleet.kernels.optimizer import launch_nothing

        launch_nothing(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # a missing package, compiler or header, each in its own way
        return reason(e)
    return ""
