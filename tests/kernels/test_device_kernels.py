"""Sampling kernels against the torch code of the replay, on streams with every kind of episode end."""

import numpy as np
import pytest
import torch

from qfleet.config import Config, EnvConfig, LearnerConfig, ReplayConfig, RuntimeConfig
from qfleet.networks.encoders import space_to_depth
from qfleet.replay import Replay
from qfleet.replay import device_kernels as sampling
from qfleet.replay.priorities import Priorities
from qfleet.types import Spec, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COLUMNS, ROWS, SIDE = 5, 37, 12


def filled(prioritized: bool, n: int, batch: int, stack: int = 4, clip: float = 1.0) -> Replay:
    """Twice around its rings, with ends of episodes here and there."""
    config = Config(
        env=EnvConfig(num_envs=COLUMNS, reward_clip=clip),
        replay=ReplayConfig(capacity=COLUMNS * ROWS, prioritized=prioritized, alpha=0.6, min_steps=0),
        learner=LearnerConfig(n_step=n, gamma=0.9, batch_size=batch),
        runtime=RuntimeConfig(steps_per_round=1),
    )
    spec = Spec(obs_shape=(SIDE, SIDE), obs_dtype="uint8", num_actions=6, frame_stack=stack)
    replay = Replay(config, spec, DEVICE, on_host=False)
    rng = np.random.default_rng(n)
    ended = np.ones(COLUMNS, bool)
    for _ in range(2 * ROWS + 5):
        first, fate = ended, rng.random(COLUMNS)
        terminated, truncated = (fate < 0.1) & ~first, (fate > 0.9) & ~first
        step = (
            rng.integers(0, 256, (1, COLUMNS, SIDE, SIDE), np.uint8),
            rng.integers(0, 6, (1, COLUMNS)),
            (2 * rng.normal(size=(1, COLUMNS))).astype(np.float32),
            terminated[None], truncated[None], first[None],
        )  # fmt: skip
        replay.extend(Step(*map(torch.from_numpy, step)))
        ended = truncated | (terminated & (rng.random(COLUMNS) < 0.7))  # the others: a life lost
    if prioritized:
        for update in range(5):
            sample = replay.sample(update)
            replay.update_priorities(sample.id, torch.from_numpy(rng.random(batch)).to(DEVICE))
    return replay


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prioritized", [False, True])
def test_batches_are_those_of_the_replay(prioritized: bool, n: int) -> None:
    batch = 50
    replay = filled(prioritized, n, batch)
    fast = replay.on_device(batch, kernels=True)
    for update in (0, 7, 2**33):
        expected = replay.sample(update, beta=0.7)
        out = fast.draw(torch.tensor([update], device=DEVICE), torch.tensor([0.7], device=DEVICE))
        for name in ("id", "action", "discount"):
            assert torch.equal(getattr(out, name), getattr(expected, name)), name
        torch.testing.assert_close(out.reward, expected.reward)  # a GPU multiplies and adds in one rounding
        torch.testing.assert_close(out.weight, expected.weight)
        stacked = torch.stack((expected.obs, expected.next_obs)).flatten(0, 1)
        gathered = torch.full((2 * batch, SIDE // 4, SIDE // 4, 64), -1.0, device=DEVICE)
        sampling.gather(fast.frames, out.frames, gathered, 4)
        assert torch.equal(gathered, space_to_depth(stacked).permute(0, 2, 3, 1).float())


def test_priorities_are_updated_as_by_the_replay() -> None:
    """Duplicates, ids overwritten since, ids that are no starts, and errors that are no numbers."""
    batch = 64
    replay, other = filled(True, 3, batch), filled(True, 3, batch)
    fast = replay.on_device(batch, kernels=True)
    rng = np.random.default_rng(5)
    for turn in range(6):
        id = replay.sample(turn).id.clone()
        id[:8] = id[8:16]
        id[16:20] -= COLUMNS * ROWS
        id[20:24] += 1
        error = torch.from_numpy(rng.normal(size=batch).astype(np.float32)).to(DEVICE)
        error[30], error[31] = float("nan"), float("inf")
        other.update_priorities(id, error)
        fast.update(id, error)
        ours, reference = replay._sampler, other._sampler
        assert isinstance(ours, Priorities) and isinstance(reference, Priorities)
        torch.testing.assert_close(ours.leaves, reference.leaves, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.highest, reference.highest, rtol=1e-6, atol=0)
        rebuilt = Priorities(ours.size, 0.6, DEVICE, kernel=False)
        rebuilt.load(ours.leaves, ours.highest)
        assert torch.equal(rebuilt.tree, ours.tree)  # every parent is the sum of its children, to the bit
        other._sampler.tree.copy_(ours.tree)  # go on from the same


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_an_empty_replay_can_be_drawn_from(prioritized: bool, kernels: bool) -> None:
    """Updates are recorded before there is anything to learn from: the draw means nothing, but stays inside the rings."""
    config = Config(
        env=EnvConfig(num_envs=COLUMNS),
        replay=ReplayConfig(capacity=COLUMNS * ROWS, prioritized=prioritized, min_steps=0),
        learner=LearnerConfig(n_step=3, batch_size=8),
        runtime=RuntimeConfig(steps_per_round=1),
    )
    spec = Spec(obs_shape=(SIDE, SIDE), obs_dtype="uint8", num_actions=6, frame_stack=4)
    sampler = Replay(config, spec, DEVICE, on_host=False).on_device(8, kernels)
    with np.errstate(invalid="ignore"):
        drawn = sampler.draw(torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.ones(1, device=DEVICE))
    assert ((drawn.frames >= 0) & (drawn.frames <= COLUMNS * ROWS)).all()
    assert sampler.batch(drawn).obs.shape == (8, 4, SIDE, SIDE)
