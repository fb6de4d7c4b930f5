"""Convolutions for autograd against the plain layers, alone and in whole updates."""

from typing import Any

import pytest
import torch
from test_nature import SPEC, config_of, filled, relative

from qfleet import recipes
from qfleet.captured import Best, CapturedLearner
from qfleet.config import override
from qfleet.kernels.encoder import Encoder
from qfleet.networks.encoders import Image, Nature, channels_last_
from qfleet.replay import device_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def test_features_and_gradients_equal_the_plain_layers() -> None:
    torch.manual_seed(0)
    plain, ours = (Nature(Image(4, 84, 84, "CHW")).to(DEVICE) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    channels_last_(ours)
    encoder = Encoder(ours.to(LOW))
    frames = torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
    x = torch.zeros(5, 21, 21, 64, dtype=LOW, device=DEVICE)
    device_kernels.gather(frames.flatten(0, 1), torch.arange(20, device=DEVICE), x, 4)
    slope = torch.randn(5, 64 * 49, device=DEVICE)

    def gradients(features: torch.Tensor, module: torch.nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        (features.float() * slope).sum().backward()
        return [features, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    expected = gradients(plain(frames), plain)
    got = gradients(encoder(x), ours)
    allowed = [1e-5] * 7
    if DEVICE.type == "cuda":  # rounding turns some ReLUs: twice the error of torch's own mixed precision
        with torch.autocast("cuda", torch.bfloat16):
            mixed = plain(frames)
        allowed = [2.0 * relative(a, b) for a, b in zip(gradients(mixed, plain), expected, strict=True)]
    errors = [relative(a, b) for a, b in zip(got, expected, strict=True)]
    assert all(error < limit for error, limit in zip(errors, allowed, strict=True)), (errors, allowed)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("rainbow", {}),
        ("qr", {"learner.tau": 0.3}),
        ("iqn", {"learner.optimizer": "sgd"}),
        ("dueling", {"learner.optimizer": "rmsprop"}),
        ("dueling", {"learners": 2}),
    ],
    ids=["rainbow", "qr tau", "iqn sgd", "dueling rmsprop", "dueling agreed on"],
)
def test_updates_equal_those_of_the_plain_network(recipe: str, settings: dict[str, Any]) -> None:
    """Also across a refresh of the target network, and when saved and loaded. On a GPU parameters are rounded to bf16."""
    config = override(
        override(config_of(), recipes.RECIPES[recipe][1]),
        {"network.atoms": 7, "network.v_min": -3.0, "network.v_max": 3.0, "learner.adam_eps": 1e-2, "learner.target_interval": 2, **settings},
    )  # fmt: skip

    def made(low: bool) -> CapturedLearner:
        learner = CapturedLearner(config, SPEC, DEVICE)
        learner.kernels = True
        if low:
            learner._compute_low(LOW)
        learner.sync = lambda grad, samples: learner.apply(grad)  # used where there are several
        return learner

    def trained(learner: CapturedLearner) -> tuple[torch.Tensor, float, float]:
        """3 updates, and 2 more by another learner that takes over -> how far parameters moved, losses, mean value."""
        replay, start, total = filled(config), learner.flat.data.clone(), 0.0
        following = made(learner.low is not None)
        following.config = learner.config
        for each, updates in ((learner, 3), (following, 2)):
            if each is following:
                each.load_state(learner.state())
            each.learn(replay, updates, beta=0.5)
            told = each.flush()
            assert told is not None and told.updates == updates
            total += told.loss_sum
        learner.load_state(following.state())
        return learner.flat.data - start, total, told.q_mean

    ours, mixed = made(low=True), made(low=False)
    mixed.config = override(config, {"learner.precision": "bf16"})
    (expected, loss, q), (moved, our_loss, our_q), rounded = trained(made(low=False)), trained(ours), trained(mixed)
    tight = 1e-3 if DEVICE.type == "cpu" else 2.0 * relative(rounded[0], expected)
    assert tight < 0.3 and relative(moved, expected) < tight
    assert ours.low is not None and torch.equal(ours.low, ours.flat.data.to(LOW))
    spread = (0.0, 0.0) if DEVICE.type == "cpu" else (2 * abs(rounded[1] - loss), 2 * abs(rounded[2] - q))
    assert our_loss == pytest.approx(loss, rel=2e-2 if DEVICE.type == "cuda" else 1e-4, abs=spread[0])
    assert our_q == pytest.approx(q, rel=2e-2 if DEVICE.type == "cuda" else 1e-3, abs=spread[1])
    stack = torch.randint(0, 256, (4, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
    chosen = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    best = Best(ours, ours.net, [4])
    best.publish()
    best(0, stack, None, chosen)
    values = ours.net.q(stack)
    regret = values.max(1).values - values.gather(1, chosen[:, None])[:, 0]
    assert (regret <= (1e-5 if DEVICE.type == "cpu" else 0.02) * values.abs().max()).all()
