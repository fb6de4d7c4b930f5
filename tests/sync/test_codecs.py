"""What a codec loses is right in the mean, or kept for later to the bit."""

from dataclasses import replace

import pytest
import torch
from fleet import sync_of

from qfleet import rng
from qfleet.config import Config, ConfigError, LearnerConfig, SyncConfig
from qfleet.learner import Optimizer
from qfleet.sync import codecs

SIZE = 1000  # not a multiple of a block


def vector(seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, generator=g) * torch.logspace(-6, 2, SIZE)
    x[500:510] = 0.0
    return x


def made(codec: str, worker: int = 0, **values: float) -> codecs.Codec:
    return codecs.make(sync_of("sync", codec=codec, **values), SIZE, seed=1, worker=worker)


def test_fp32_is_exact() -> None:
    codec = made("fp32")
    message = codec.encode(vector())
    assert message.nbytes == 4 * SIZE and torch.equal(codec.decode(message), vector())


@pytest.mark.parametrize(("name", "most"), [("bf16", 0.5), ("int8", 0.27)])
def test_rounding_at_random_is_right_in_the_mean(name: str, most: float) -> None:
    codec, x, draws = made(name), vector(), 2000
    message = codec.encode(x)
    assert message.nbytes <= most * 4 * SIZE
    worst = torch.zeros(SIZE)
    total = torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(draws):
        error = codec.decode(codec.encode(x)).double() - x.double()
        total += error
        worst = worst.maximum(error.abs().float())
    scale = (
        x.abs() * 2**-7
        if name == "bf16"
        else torch.cat([block.abs().max() / 127 * torch.ones(len(block)) for block in x.split(codecs.BLOCK)])
    )
    assert (worst <= scale * 1.0001).all()  # never further than to the next level
    assert worst.max() > 0
    # Means of 2000 draws, each at most half a level away in standard deviation: five standard errors, a thousand times.
    assert (total.abs() / draws <= 5 * scale / 2 / draws**0.5).all()


def test_rounding_uses_the_stateless_numbers_of_rng() -> None:
    x = vector()
    message = made("int8").encode(x)
    u = rng.uniform(rng.key(1, "codec 0 0"), 0, SIZE)
    scale = torch.cat([(b.abs().max() / 127).expand(len(b)) for b in x.split(codecs.BLOCK)]).double()
    levels = (x.double() / scale + torch.from_numpy(u)).floor().clamp(-127, 127)
    torch.testing.assert_close(made("int8").decode(message).double(), levels * scale, rtol=1e-6, atol=0)
    assert (made("int8").encode(x) == message).all() and not (made("int8", worker=1).encode(x) == message).all()


def test_bf16_leaves_infinity_and_what_needs_no_rounding() -> None:
    codec = codecs.BFloat16(5, key=3)
    x = torch.tensor([float("inf"), float("-inf"), 1.5, 0.0, -3.0])
    assert torch.equal(codec.decode(codec.encode(x)), x)
    assert codec.decode(codec.encode(torch.full((5,), float("nan")))).isnan().all()


def test_topk_sends_the_largest_and_keeps_the_rest() -> None:
    codec = made("topk", topk=0.01)
    assert isinstance(codec, codecs.TopK)
    sent, given = torch.zeros(SIZE), torch.zeros(SIZE)
    for k in range(50):
        x = torch.randn(SIZE, generator=torch.Generator().manual_seed(k)).mul(64).round()  # sums are exact
        due = codec.residual + x
        message = codec.encode(x)
        assert message.nbytes == 80 <= 0.025 * 4 * SIZE
        got = codec.decode(message)
        chosen = got != 0
        assert chosen.sum() == 10 and due[chosen].abs().min() >= due[~chosen].abs().max()
        sent, given = sent + got, given + x
        assert torch.equal(sent + codec.residual, given)


def test_topk_carries_the_momentum_of_sgd() -> None:
    """All of it sent, it is sgd with momentum; a part sent, everything arrives in the end with the momentum it had."""
    config = replace(
        Config(), learner=LearnerConfig(optimizer="sgd", momentum=0.9), sync=sync_of("async", codec="topk")
    )
    whole, part = (codecs.TopK(SIZE, k, codecs.momentum_of(config)) for k in (1.0, 0.1))
    plain = replace(config, learner=replace(config.learner, grad_clip=0.0, optimizer="sgd"))
    ours, theirs = torch.zeros(SIZE), torch.zeros(SIZE)
    optimizer = Optimizer(plain, theirs)
    sent = torch.zeros(SIZE)
    for k in range(20):
        x = vector(k)
        optimizer(x.clone(), 0.1)
        ours -= 0.1 * whole.decode(whole.encode(x))
        sent -= 0.1 * part.decode(part.encode(x))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sent - 0.1 * part.residual, theirs, rtol=1e-5, atol=1e-5)
    assert codecs.momentum_of(replace(config, sync=sync_of("diloco", codec="topk"))) == 0.0  # there the learner has it


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_topk_keeps_nothing_of_a_message_that_is_taken_back(momentum: float) -> None:
    codec, other = (codecs.TopK(SIZE, 0.1, momentum) for _ in range(2))
    for k in range(3):
        codec.encode(vector(k))
        other.encode(vector(k))
    codec.encode(vector(77))
    codec.take_back()
    assert (codec.encode(vector(3)) == other.encode(vector(3))).all()
    assert all(torch.equal(codec.state()[name], value) for name, value in other.state().items())
    codec.forget()
    assert (codec.encode(vector(4)) == codecs.TopK(SIZE, 0.1, momentum).encode(vector(4))).all()


def test_momentum_is_for_sgd() -> None:
    with pytest.raises(ConfigError, match=r"learner\.momentum is for --learner\.optimizer sgd"):
        LearnerConfig(momentum=0.9)


@pytest.mark.parametrize("name", ["bf16", "int8", "topk"])
def test_a_codec_goes_on_from_its_state(name: str) -> None:
    whole, again = made(name), made(name)
    whole.encode(vector(1))
    again.load_state({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in whole.state().items()})
    assert (again.encode(vector(2)) == whole.encode(vector(2))).all()
    assert not (made(name).encode(vector(2)) == again.encode(vector(2))).all()


def test_what_cannot_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="ssp needs a server"):
        SyncConfig(mode="ssp", transport="allreduce")
    with pytest.raises(ConfigError, match="powersgd compresses whole matrices"):
        SyncConfig(mode="async", codec="powersgd")
    assert SyncConfig(codec="powersgd").over == "allreduce"
