"""Whole networks: what `build` makes of a config, shapes, expectations, dueling, quantiles, noise."""

import pytest
import torch
from torch import nn

from qfleet.config import Config, ConfigError, NetworkConfig
from qfleet.networks import build, midpoints
from qfleet.networks.encoders import Flat, Grid, Impala, Nature
from qfleet.types import Spec

VECTOR = Spec(obs_shape=(5,), obs_dtype="float32", num_actions=3)
SPECS = {
    "vector": (VECTOR, Flat),
    "stacked vector": (Spec(obs_shape=(5,), obs_dtype="float32", num_actions=3, frame_stack=2), Flat),
    "ram": (Spec(obs_shape=(128,), obs_dtype="uint8", num_actions=3), Flat),
    "atari": (Spec(obs_shape=(84, 84), obs_dtype="uint8", num_actions=3, frame_stack=4), Nature),
    "minatar": (Spec(obs_shape=(10, 10, 6), obs_dtype="bool", num_actions=3), Grid),
    "colour": (Spec(obs_shape=(24, 20, 3), obs_dtype="uint8", num_actions=3, frame_stack=2), Impala),
    "colour 84x84": (Spec(obs_shape=(84, 84, 3), obs_dtype="uint8", num_actions=3), Impala),
}


def make(spec=VECTOR, seed=0, **network):
    torch.manual_seed(seed)
    return build(Config(network=NetworkConfig(**{"hidden": (8, 6), **network})), spec)


def observations(spec, batch=4):
    torch.manual_seed(1)
    x = torch.rand(batch, *spec.input_shape)
    return (x * 255).to(torch.uint8) if spec.obs_dtype == "uint8" else (x > 0.5 if spec.obs_dtype == "bool" else x)


@pytest.mark.parametrize("name", SPECS)
def test_auto_picks_the_encoder(name):
    spec, encoder = SPECS[name]
    network = make(spec)
    assert type(network.blocks[0]) is encoder
    q = network.q(observations(spec))
    assert q.shape == (4, 3) and q.dtype == torch.float32 and q.isfinite().all()


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("dist", ["scalar", "c51", "qr", "iqn"])
def test_every_combination_has_its_shape_and_trains_every_parameter(dist, noisy, dueling):
    network = make(dist=dist, noisy=noisy, dueling=dueling, atoms=7)
    obs = observations(VECTOR)
    assert (network.noise_size > 0) == noisy
    noise = torch.randn(1, network.noise_size) if noisy else None
    raw = network(obs, noise, torch.rand(4, 9) if dist == "iqn" else None)
    assert raw.shape == {"scalar": (4, 3), "c51": (4, 3, 7), "qr": (4, 3, 7), "iqn": (4, 3, 9)}[dist]
    assert network.values(raw).shape == (4, 3)
    (raw * torch.randn_like(raw)).sum().backward()
    for parameter_name, p in network.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, parameter_name


def test_plain_mlp_is_a_sequence_of_linears_with_the_same_parameters():
    network = make(seed=11)
    torch.manual_seed(11)
    plain = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    obs = observations(VECTOR)
    assert torch.equal(network(obs), plain(obs))
    linears = network.plain_mlp()
    assert linears is not None
    assert [(m.in_features, m.out_features) for m in linears] == [(5, 8), (8, 6), (6, 3)]
    for other in ({"dueling": True}, {"noisy": True}, {"dist": "qr"}):
        assert make(**other).plain_mlp() is None
    assert make(SPECS["ram"][0]).plain_mlp() is None  # its encoder scales
    assert make(SPECS["minatar"][0]).plain_mlp() is None


class AsInMemory(nn.Module):
    """[B, C, H, W] -> [B, H * W * C]: the order in which our features leave the last convolution."""

    def forward(self, x):
        return x.permute(0, 2, 3, 1).flatten(1)


def test_nature_starts_as_the_plain_network():
    spec = SPECS["atari"][0]
    network = make(spec, seed=2, hidden=(512,))
    torch.manual_seed(2)
    plain = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
        AsInMemory(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 3),
    )  # fmt: skip
    obs = observations(spec)
    torch.testing.assert_close(network(obs), plain(obs / 255.0), rtol=1e-4, atol=1e-6)


def test_expectations():
    c51 = make(dist="c51", atoms=3, v_min=-1.0, v_max=3.0)
    assert torch.equal(c51.support, torch.tensor([-1.0, 1.0, 3.0]))
    logits = torch.tensor([[[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]]).log()
    torch.testing.assert_close(c51.values(logits), torch.tensor([[1.6, -1.0]]))
    qr = make(dist="qr", atoms=4)
    assert torch.equal(qr.taus, torch.tensor([[0.125, 0.375, 0.625, 0.875]]))
    assert torch.equal(qr.values(torch.tensor([[[1.0, 2.0, 3.0, 6.0]]])), torch.tensor([[3.0]]))
    assert make().support is None and make().taus is None
    for network in (c51, qr):  # constants of the config, not weights
        assert not {"support", "taus"} & set(network.state_dict())


def test_dueling_subtracts_the_mean_advantage():
    for dist in ("scalar", "qr"):
        network = make(dist=dist, dueling=True, atoms=4)
        obs = observations(VECTOR)
        x = network.blocks[1](network.blocks[0](obs))
        head = network.blocks[2]
        shape = (4, 3) if dist == "scalar" else (4, 3, 4)
        value = head.value(x, None).view(4, 1, *shape[2:])
        advantage = head.advantage(x, None).view(shape)
        torch.testing.assert_close(network(obs), value + (advantage - advantage.sum(1, keepdim=True) / 3))
        assert head.value.hidden.out_features == head.advantage.hidden.out_features == 6
        assert [layer.out_features for layer in network.blocks[1].layers] == [8]


def test_implicit_quantiles_depend_on_their_own_fraction_only():
    network = make(dist="iqn", dueling=True)
    obs, taus = observations(VECTOR), torch.rand(4, 6)
    raw = network(obs, None, taus)
    for b in range(4):
        for t in range(6):
            alone = network(obs[b : b + 1], None, taus[b : b + 1, t : t + 1])
            torch.testing.assert_close(raw[b : b + 1, :, t : t + 1], alone)
    assert (raw[:, :, 0] - raw[:, :, 1]).abs().max() > 1e-4
    every = midpoints(32).expand(4, 32)
    torch.testing.assert_close(network.q(obs), network(obs, None, every).mean(2))


def test_cosine_embedding():
    network = make(dist="iqn", hidden=(4,))
    head = network.blocks[2]
    obs, tau = observations(VECTOR, 1), 0.3
    cosines = torch.tensor([torch.pi * i * tau for i in range(64)]).cos()
    product = obs[0] * head.embed(cosines).relu()
    expected = head.advantage.out(head.advantage.hidden(product).relu())
    torch.testing.assert_close(network(obs, None, torch.tensor([[tau]]))[0, :, 0], expected)


def test_noise_rows_are_samples_of_their_own():
    network = make(noisy=True, dueling=True, dist="c51", atoms=5)
    obs = observations(VECTOR)
    noise = torch.randn(4, network.noise_size)
    each = torch.cat([network(obs[i : i + 1], noise[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(network(obs, noise), each)
    torch.testing.assert_close(network(obs, noise[:1]), network(obs, noise[:1].expand(4, -1)))
    assert not torch.equal(network(obs, noise[:1]), network(obs, noise[1:2]))
    assert torch.equal(network(obs), network(obs, torch.zeros(1, network.noise_size)))


def test_noise_size_and_which_layers_are_noisy():
    # An MLP's first layer stands for the encoder and stays plain; behind a convolution all layers are noisy.
    assert make(noisy=True).noise_size == (8 + 6) + (6 + 3)
    grid = SPECS["minatar"][0]
    assert make(grid, noisy=True).noise_size == (1024 + 8) + (8 + 6) + (6 + 3)
    dueling = make(noisy=True, dueling=True, hidden=(8,))  # no torso left: both streams are noisy
    assert dueling.noise_size == 2 * (5 + 8) + (8 + 1) + (8 + 3)
    assert make().noise_size == 0


def test_no_hidden_layers():
    for options in ({}, {"dueling": True}, {"dist": "iqn"}, {"noisy": True}):
        network = make(hidden=(), **options)
        assert network.q(observations(VECTOR)).shape == (4, 3)


def test_convolutions_need_images():
    with pytest.raises(ConfigError, match=r"'nature', but observations of shape \(5,\)"):
        make(kind="nature")
    assert type(make(SPECS["minatar"][0], kind="mlp").blocks[0]) is Flat
