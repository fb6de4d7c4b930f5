"""Encoders against plain torch modules on explicitly permuted and scaled inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qfleet.config import ConfigError
from qfleet.networks.encoders import (
    Flat,
    Grid,
    Image,
    Impala,
    Nature,
    fold_weight,
    image_of,
    space_to_depth,
    unfold_weight,
)
from qfleet.types import Spec


def spec(shape, dtype="uint8", stack=1):
    return Spec(obs_shape=shape, obs_dtype=dtype, num_actions=3, frame_stack=stack)


def bytes_(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_image_layouts():
    assert image_of(spec((84, 84), stack=4)) == Image(4, 84, 84, "CHW")
    assert image_of(spec((84, 84))) == Image(1, 84, 84, "HW")
    assert image_of(spec((4, 84, 84))) == Image(4, 84, 84, "CHW")
    assert image_of(spec((10, 10, 4), "bool")) == Image(4, 10, 10, "HWC")
    assert image_of(spec((10, 10, 10), "bool")) == Image(10, 10, 10, "HWC")
    assert image_of(spec((64, 48, 3), stack=2)) == Image(6, 64, 48, "KHWC")
    assert image_of(spec((3, 64, 48), stack=2)) == Image(6, 64, 48, "KCHW")
    assert image_of(spec((8,), "float32", stack=4)) is None
    assert image_of(spec((5, 5), "float32")) is None


def test_fold_weight_is_the_same_convolution():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 24, 28, dtype=torch.float64), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    folded = F.conv2d(F.pixel_unshuffle(x, 4), fold_weight(weight))
    torch.testing.assert_close(folded, F.conv2d(x, weight, stride=4), rtol=1e-12, atol=1e-12)
    assert torch.equal(unfold_weight(fold_weight(weight)), weight)


def test_space_to_depth_moves_the_bytes_where_pixel_unshuffle_does():
    x = bytes_(2, 3, 8, 12)
    assert torch.equal(space_to_depth(x), F.pixel_unshuffle(x, 4))
    assert torch.equal(space_to_depth(x.transpose(0, 1)), F.pixel_unshuffle(x.transpose(0, 1), 4))
    assert space_to_depth(x).is_contiguous(memory_format=torch.channels_last)


def plain_nature(channels):
    return nn.Sequential(
        nn.Conv2d(channels, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(), nn.Conv2d(64, 64, 3),
        nn.ReLU(),
    )  # fmt: skip


@pytest.mark.parametrize("size", [(84, 84), (51, 46)])  # sides that 4 does not divide: the stride leaves a rest out
def test_nature_is_the_plain_network_and_learns_like_it(size):
    torch.manual_seed(7)
    encoder = Nature(Image(4, *size, "CHW"))
    torch.manual_seed(7)
    plain = plain_nature(4)
    obs = bytes_(3, 4, *size)
    ours, theirs = encoder(obs), plain(obs / 255.0).permute(0, 2, 3, 1).flatten(1)  # ours come as they lie in memory
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert encoder.features == theirs.shape[1]

    (ours * torch.linspace(-1, 1, ours.shape[1])).sum().backward()
    (theirs * torch.linspace(-1, 1, ours.shape[1])).sum().backward()
    torch.testing.assert_close(unfold_weight(encoder.conv1.weight.grad), plain[0].weight.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(encoder.conv1.bias.grad, plain[0].bias.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(encoder.conv3.weight.grad, plain[4].weight.grad, rtol=1e-3, atol=1e-4)


def test_nature_reads_other_layouts_alike():
    torch.manual_seed(0)
    encoder = Nature(Image(6, 40, 44, "CHW"))
    frames = bytes_(3, 2, 40, 44, 3)  # [B, stack, H, W, C]
    chw = frames.permute(0, 1, 4, 2, 3).flatten(1, 2)  # channels: all of frame 0, then all of frame 1
    expected = encoder(chw)
    encoder.order = "KCHW"
    torch.testing.assert_close(encoder(chw.unflatten(1, (2, 3))), expected)
    # KHWC folds to the same channel order: stack-major
    encoder.order = "KHWC"
    torch.testing.assert_close(encoder(frames), expected)


def test_grid_is_minatars_network():
    torch.manual_seed(5)
    encoder = Grid(Image(4, 10, 10, "HWC"))
    torch.manual_seed(5)
    plain = nn.Conv2d(4, 16, 3)
    obs = bytes_(6, 10, 10, 4) > 200
    torch.testing.assert_close(encoder(obs), plain(obs.permute(0, 3, 1, 2).float()).relu().flatten(1))
    assert encoder.features == 1024


def test_impala_against_functional_form():
    torch.manual_seed(5)
    encoder = Impala(Image(3, 21, 30, "HWC"))
    obs = bytes_(2, 21, 30, 3)
    convs = iter([m for m in encoder.modules() if isinstance(m, nn.Conv2d)])
    x = obs.permute(0, 3, 1, 2) / 255.0
    for channels in (16, 32, 32):
        x = F.max_pool2d(next(convs)(x), 3, 2, 1)
        assert x.shape[1] == channels
        for _ in range(2):
            first, second = next(convs), next(convs)
            x = x + second(first(x.relu()).relu())
    assert next(convs, None) is None
    out = encoder(obs)
    torch.testing.assert_close(out, x.relu().flatten(1))
    assert encoder.features == out.shape[1] == 32 * 3 * 4


def test_impala_gradients_survive_the_in_place_operations():
    torch.manual_seed(0)
    encoder = Impala(Image(1, 6, 6, "HW")).double()
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    weight = encoder.stages[2].conv1.weight
    loss = lambda: encoder.stages(x.unsqueeze(1)).relu().pow(2).sum()  # noqa: E731
    loss().backward()
    step = 1e-6
    with torch.no_grad():
        weight[1, 2, 1, 1] += step
        above = loss()
        weight[1, 2, 1, 1] -= 2 * step
        below = loss()
    torch.testing.assert_close(weight.grad[1, 2, 1, 1], (above - below) / (2 * step), rtol=1e-4, atol=1e-7)


def test_scaling_by_dtype():
    assert torch.equal(Flat(spec((2,)))(torch.tensor([[0, 255]], dtype=torch.uint8)), torch.tensor([[0.0, 1.0]]))
    assert torch.equal(Flat(spec((2,), "bool"))(torch.tensor([[False, True]])), torch.tensor([[0.0, 1.0]]))
    x = torch.tensor([[-3.0, 300.0]])
    assert Flat(spec((2,), "float32"))(x) is x
    stacked = torch.arange(6.0).view(1, 3, 2)
    assert torch.equal(Flat(spec((2,), "float32", stack=3))(stacked), torch.arange(6.0).view(1, 6))


def test_input_is_never_changed():
    for encoder, obs in (
        (Grid(Image(4, 10, 10, "HWC")), bytes_(2, 10, 10, 4)),
        (Impala(Image(4, 10, 10, "HWC")), torch.randn(2, 10, 10, 4)),
        (Nature(Image(2, 36, 36, "CHW")), torch.randn(2, 2, 36, 36)),
    ):
        before = obs.clone()
        encoder(obs)
        assert torch.equal(obs, before)


def test_too_small_images_are_refused():
    with pytest.raises(ConfigError, match=r"at least 36x36.*20x90"):
        Nature(Image(4, 20, 90, "CHW"))
    with pytest.raises(ConfigError, match="at least 3x3"):
        Grid(Image(4, 2, 9, "HWC"))
