"""Convolutions for autograd against the plain layers, alone and in whole updates."""

import pytest
import torch
from test_nature import SPEC, config_of, filled

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


@pytest.mark.parametrize("recipe", ["rainbow", "qr", "iqn", "dueling"])
def test_updates_equal_those_of_the_plain_network(recipe: str) -> None:
    """With the same numbers everywhere but in the convolutions. On a GPU parameters are also rounded to bf16."""
    config = override(config_of(), {"recipe": recipe, "network.atoms": 7, **recipes.RECIPES[recipe][1]})
    config = override(
        config, {"network.atoms": 7, "network.v_min": -3.0, "network.v_max": 3.0, "learner.adam_eps": 1e-2}
    )
    plain, ours, mixed, start = (CapturedLearner(config, SPEC, DEVICE) for _ in range(4))
    ours._compute_low(LOW)
    mixed.config = override(config, {"learner.precision": "bf16"})
    for learner in (plain, ours, mixed):
        learner.kernels = True
        learner.learn(filled(config), 3, beta=0.5)
        assert learner.flush() is not None and learner.updates == 3
    moved, expected, rounded = (each.flat.data - start.flat.data for each in (ours, plain, mixed))
    tight = 1e-3 if DEVICE.type == "cpu" else 2.0 * relative(rounded, expected)
    assert ours.low is not None and relative(moved, expected) < tight
    torch.testing.assert_close(ours.low, ours.flat.data.to(LOW), rtol=0, atol=0)
    stack = torch.randint(0, 256, (4, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
    chosen = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    best = Best(ours, ours.net, [4])
    best.publish()
    best(0, stack, None, chosen)
    q = ours.net.q(stack)
    regret = q.max(1).values - q.gather(1, chosen[:, None])[:, 0]
    assert (regret <= max(tight, 0.02) * q.abs().max()).all()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())
