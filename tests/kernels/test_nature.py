"""The hand-written update of a Nature network against autograd, torch.optim.Adam and the losses of qfleet.losses."""

from typing import Any

import numpy as np
import pytest
import torch

from qfleet import recipes
from qfleet.config import Config, override
from qfleet.kernels import nature
from qfleet.learner import Learner
from qfleet.replay import Replay
from qfleet.types import Batch, Spec, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
ENVS, ROWS = 3, 20
SPEC = Spec(obs_shape=(84, 84), obs_dtype="uint8", num_actions=5, frame_stack=4)


def config_of(**settings: Any) -> Config:
    base = {
        "env.num_envs": ENVS, "replay.capacity": ENVS * ROWS, "replay.min_steps": 0, "learner.batch_size": 3, "learner.n_step": 2,
        "network.hidden": (128,), "runtime.steps_per_round": 1, "learner.lr": 1e-3, "learner.grad_clip": 0.05, "learner.double": False,
    }  # fmt: skip
    return override(recipes.make("dqn", "pong"), base | {k.replace("__", "."): v for k, v in settings.items()})


def filled(config: Config) -> Replay:
    replay = Replay(config, SPEC, DEVICE, on_host=False)
    rng = np.random.default_rng(0)
    ended = np.ones(ENVS, bool)
    for _ in range(ROWS + 3):
        terminated = (rng.random(ENVS) < 0.15) & ~ended
        step = (
            rng.integers(0, 256, (1, ENVS, 84, 84), np.uint8), rng.integers(0, 5, (1, ENVS)),
            rng.normal(size=(1, ENVS)).astype(np.float32), terminated[None], np.zeros((1, ENVS), bool), ended[None],
        )  # fmt: skip
        replay.extend(Step(*map(torch.from_numpy, step)))
        ended = terminated
    return replay


@pytest.mark.parametrize(
    ("settings", "apply"),
    [
        ({}, True),
        ({}, False),
        ({"learner__double": True, "learner__loss": "mse", "learner__weight_decay": 0.1}, True),
        ({"learner__munchausen": True, "learner__grad_clip": 0.0}, True),
        ({"learner__double": True, "replay__prioritized": True}, True),
    ],
    ids=["dqn", "dqn, gradient alone", "double", "munchausen", "prioritized"],
)
def test_updates_equal_autograd(settings: dict[str, Any], apply: bool) -> None:
    config = config_of(**settings)
    replay, reference_replay = filled(config), filled(config)
    reference = Learner(config, SPEC, DEVICE)
    torch.manual_seed(3)
    reference.target.data.add_(0.02 * torch.randn_like(reference.target.data))  # two different networks
    data, target = reference.flat.data.clone(), reference.target.data.clone()
    buffers = nature.Buffers(
        data=data, low=data.to(LOW), target=target, target_low=target.to(LOW), grad=torch.zeros_like(data),
        m=torch.zeros_like(data), v=torch.zeros_like(data), counter=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        lr=torch.full((1,), config.learner.lr, device=DEVICE), beta=torch.full((1,), 0.6, device=DEVICE),
        loss_sum=torch.zeros(1, dtype=torch.float64, device=DEVICE), q_mean=torch.zeros(1, device=DEVICE),
    )  # fmt: skip
    update = nature.Update(
        config, reference.flat.places, buffers, replay.on_device(config.learner.batch_size, kernels=True), apply
    )
    mixed = Learner(override(config, {"learner.precision": "bf16"}), SPEC, DEVICE)
    losses = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for number in range(3):
        before = buffers.data.clone()
        update()
        assert torch.equal(buffers.data, before) != apply
        batch = reference_replay.sample(number, beta=0.6)
        mixed.flat.copy_(reference.flat)
        mixed.target.copy_(reference.target)

        def step(learner: Learner, batch: Batch = batch, number: int = number) -> tuple[torch.Tensor, ...]:
            """Gradient, priorities, loss and mean value."""
            grad, priority, loss, raw = learner.grads(batch, learner.targets(batch, number), number)
            q = raw.gather(1, batch.action.unsqueeze(1)).mean()
            return grad.clone(), priority, torch.as_tensor(loss), q

        expected = step(reference)
        if DEVICE.type == "cuda":  # twice the error of torch's own mixed precision
            allowed = [max(2e-3, 2.0 * relative(a, b)) for a, b in zip(step(mixed), expected, strict=True)]
            assert allowed[0] < 0.2
        else:
            allowed = [2e-5] * 4
        grad, priority = expected[:2]
        reference.apply(reference.grad.copy_(grad))
        reference_replay.update_priorities(batch.id, priority)
        got = (buffers.grad, update.priority, buffers.loss_sum[0] - losses, buffers.q_mean[0])
        losses = buffers.loss_sum[0].clone()
        errors = [relative(a, b) for a, b in zip(got, expected, strict=True)]
        assert all(error < limit for error, limit in zip(errors, allowed, strict=True)), (errors, allowed)
        if torch.float32 == LOW and apply:
            torch.testing.assert_close(buffers.data, reference.flat.data, rtol=0, atol=2e-5)
        else:  # Adam turns small gradients into whole steps: compare what a step starts from, not where rounding led
            buffers.data.copy_(reference.flat.data)
            buffers.low.copy_(reference.flat.data)
    assert buffers.counter.item() == 3


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())
