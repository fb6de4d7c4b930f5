"""Triton kernels of the hot path on a GPU. Imported only where they are used; the plain torch code is always there, too.

Tensors are [B, height, width, channels] in memory and bf16 unless said otherwise; sums are float32. With
TRITON_INTERPRET=1 the same kernels run on the CPU, slowly: so they are tested.
"""

from __future__ import annotations


def available() -> bool:
    """Can kernels be compiled here? Besides Triton that takes a GPU, a C compiler and Python's headers."""
    import torch

    try:
        from qfleet.kernels.optimizer import launch_nothing

        launch_nothing()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a missing package, compiler or header, each in its own way
        return False
    return True
