"""Stateless random numbers: a pure function of (seed, purpose, counter, index).

There is no hidden state to save, so a run resumes, is captured or is redistributed without changing a number.
The generator is SplitMix64's finaliser over a keyed 64-bit counter. NumPy and torch give identical values: the
host draws exploration with NumPy, the learner draws replay positions with torch on its own device.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from qfleet.types import Array

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def key(seed: int, purpose: str) -> int:
    """The 64-bit key of one purpose of one run (pure Python: computed once)."""
    z = (seed * _GOLDEN + zlib.crc32(purpose.encode()) * _MIX1) & _MASK
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def derive(seed: int, purpose: str) -> int:
    """A seed for a part that wants an ordinary integer (an environment, a network's initialisation)."""
    return key(seed, purpose) >> 33


def uniform(key: int, counter: int, n: int) -> Array:
    """n float64 numbers in [0, 1): draw `counter` of the stream `key`. Each draw may hold up to 2**32 numbers."""
    with np.errstate(over="ignore"):
        z = np.arange(n, dtype=np.uint64) + np.uint64((counter << 32) & _MASK)
        z = z * np.uint64(_GOLDEN) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch has no uint64 arithmetic, and >> on int64 keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform_torch(key: int, counter: Tensor, n: int) -> Tensor:
    """The same numbers as `uniform`, one row per counter: counter [K] int64 -> [K, n] float64, on counter's device."""
    z = torch.arange(n, dtype=torch.int64, device=counter.device) + (counter << 32).unsqueeze(-1)
    z = z * _signed(_GOLDEN) + _signed(key)
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    z = z ^ _shift(z, 31)
    return _shift(z, 11).to(torch.float64) * 2.0**-53


def normal_torch(key: int, counter: Tensor, n: int) -> Tensor:
    """Standard normal numbers by Box-Muller from `uniform_torch`: counter [K] -> [K, n] float32."""
    u = uniform_torch(key, counter, 2 * n)
    radius = torch.sqrt(-2.0 * torch.log1p(-u[:, :n]))
    return (radius * torch.cos(2.0 * torch.pi * u[:, n:])).float()
