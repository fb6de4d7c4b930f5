"""Stateless random numbers: an independent reference, NumPy = torch, and sanity of the distribution."""

from __future__ import annotations

import numpy as np
import torch

from qfleet import rng


def reference(key: int, counter: int, i: int) -> float:
    """SplitMix64 in Python integers."""
    mask = (1 << 64) - 1
    z = (key + ((counter << 32) + i) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return (z >> 11) * 2.0**-53


def test_numpy_and_torch_equal_the_reference() -> None:
    for seed, counter in ((0, 0), (1, 5), (123_456_789, 2**31 - 1)):
        key = rng.key(seed, "test")
        expected = [reference(key, counter, i) for i in range(100)]
        assert rng.uniform(key, counter, 100).tolist() == expected
        assert rng.uniform_torch(key, torch.tensor([7, counter]), 100)[1].tolist() == expected


def test_purposes_seeds_and_counters_differ() -> None:
    draws = {
        tuple(rng.uniform(rng.key(seed, purpose), counter, 3))
        for seed in range(5)
        for purpose in ("explore", "replay")
        for counter in range(5)
    }
    assert len(draws) == 50
    assert 0 <= rng.derive(3, "network") < 2**31


def test_distribution() -> None:
    u = rng.uniform(rng.key(1, "u"), 0, 200_000)
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 100, (0, 1))[0]
    chi2 = ((counts - 2000) ** 2 / 2000).sum()
    assert 60 < chi2 < 150  # 99 degrees of freedom
    across = np.concatenate([rng.uniform(rng.key(1, "u"), c, 1) for c in range(20_000)])
    assert abs(across.mean() - 0.5) < 0.01  # counters are independent of each other, too
    assert abs(np.corrcoef(across[:-1], across[1:])[0, 1]) < 0.03


def test_normal() -> None:
    z = rng.normal_torch(rng.key(2, "z"), torch.arange(4), 50_000).double()
    assert z.mean().abs() < 0.01
    assert (z.std() - 1).abs() < 0.01
    assert (z.pow(4).mean() - 3).abs() < 0.1
    assert z.isfinite().all()
