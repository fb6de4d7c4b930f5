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
    expected = plain(frames)
    (expected * slope).sum().backward()
    features = encoder(x)
    (features * slope.to(LOW)).sum().backward()
    tight = 1e-5 if torch.float32 == LOW else 2e-2
    assert relative(features, expected) < tight
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert relative(q.grad, p.grad) < tight, name


@pytest.mark.parametrize("recipe", ["rainbow", "qr", "iqn", "dueling"])
def test_updates_equal_those_of_the_plain_network(recipe: str) -> None:
    """With the same numbers everywhere but in the convolutions. On a GPU parameters are also rounded to bf16."""
    config = override(config_of(), {"recipe": recipe, "network.atoms": 7, **recipes.RECIPES[recipe][1]})
    config = override(
        config, {"network.atoms": 7, "network.v_min": -3.0, "network.v_max": 3.0, "learner.adam_eps": 1e-2}
    )
    plain, ours = (CapturedLearner(config, SPEC, DEVICE) for _ in range(2))
    plain.kernels = ours.kernels = True
    ours._compute_low(LOW)
    replays = filled(config), filled(config)
    for learner, replay in zip((plain, ours), replays, strict=True):
        learner.learn(replay, 3, beta=0.5)
        learner.flush()
    assert ours.updates == plain.updates == 3 and ours.low is not None
    start = CapturedLearner(config, SPEC, DEVICE).flat.data
    tight = 1e-3 if torch.float32 == LOW else 5e-2
    assert relative(ours.flat.data - start, plain.flat.data - start) < tight
    torch.testing.assert_close(ours.low, ours.flat.data.to(LOW), rtol=0, atol=0)
    stack = torch.randint(0, 256, (4, 4, 84, 84), dtype=torch.uint8, device=DEVICE)
    chosen = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    best = Best(ours, ours.net, [4])
    best.publish()
    best(0, stack, None, chosen)
    q = ours.net.q(stack)
    regret = q.max(1).values - q.gather(1, chosen[:, None])[:, 0]
    assert (regret <= tight * q.abs().max()).all()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())
