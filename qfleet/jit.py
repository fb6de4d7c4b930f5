"""How numba kernels are compiled. Import it only where kernels are used: importing numba takes a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., object])
REORDER = {"reassoc", "contract", "nsz"}  # what vectorising a sum needs; NaN and infinity stay what they are


def kernel(function: F, reorder: bool = False) -> F:
    """Compiled at its first call, without the interpreter lock, and cached on disk where a folder can be written.

    `reorder` lets the compiler reorder sums, always in the same way: faster, and not the last bit of the plain order.
    """
    options = {"nogil": True, "error_model": "numpy", "fastmath": REORDER if reorder else False}
    try:
        compiled: F = njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache folder can be written
        compiled = njit(**options)(function)
    return compiled


def reordering(function: F) -> F:
    """`kernel` with reordered sums."""
    return kernel(function, reorder=True)
