"""The learner against plain PyTorch: networks, losses and torch.optim put together the ordinary way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from qfleet import losses, products, recipes
from qfleet.config import Config, override
from qfleet.learner import Learner
from qfleet.types import Batch, Spec

SPEC = Spec(obs_shape=(4,), obs_dtype="float32", num_actions=3)
IMAGES = Spec(obs_shape=(84, 84), obs_dtype="uint8", num_actions=3, frame_stack=4)
CPU = torch.device("cpu")


def config(recipe: str = "dqn", **values: object) -> Config:
    small = {
        "network.hidden": (32, 16),
        "learner.batch_size": 8,
        "learner.target_interval": 5,
        "learner.tau": 1.0,
        "learner.adam_eps": 1e-8,
    }
    return override(recipes.make(recipe, "CartPole-v1"), small | {k.replace("__", "."): v for k, v in values.items()})


class Batches:
    """A source of random batches that remembers the priorities it is given."""

    def __init__(self, size: int, spec: Spec = SPEC) -> None:
        self.size, self.spec = size, spec
        self.priorities: list[torch.Tensor] = []

    def _one(self, update: int) -> Batch:
        g = torch.Generator().manual_seed(update)
        n = self.size

        def obs() -> torch.Tensor:
            shape = (n, *self.spec.input_shape)
            if self.spec.obs_dtype == "uint8":
                return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
            return torch.randn(shape, generator=g)

        return Batch(
            obs=obs(),
            action=torch.randint(0, self.spec.num_actions, (n,), generator=g),
            reward=3 * torch.randn(n, generator=g),
            discount=torch.where(torch.rand(n, generator=g) < 0.2, 0.0, 0.99),
            next_obs=obs(),
            id=torch.arange(n),
            weight=torch.rand(n, generator=g) + 0.5,
        )

    def sample(self, update: int, count: int = 1, beta: float = 1.0, size: int = 0) -> Batch:
        return Batch(*map(torch.cat, zip(*(self._one(update + i) for i in range(count)), strict=True)))

    def update_priorities(self, id: torch.Tensor, priority: torch.Tensor) -> None:
        self.priorities.append(priority.clone())


@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("hidden", [(16,), (32, 16), (24, 40, 16)])
@pytest.mark.parametrize("inputs", [4, 50])  # few: the first layer is a kernel; many: a matrix product
@pytest.mark.parametrize("onednn", [False, True])  # who multiplies
def test_handwritten_gradient_equals_autograd(
    loss: str, hidden: tuple[int, ...], inputs: int, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "ONEDNN", onednn)
    spec = Spec(obs_shape=(inputs,), obs_dtype="float32", num_actions=3)
    learner = Learner(config("double", learner__loss=loss, network__hidden=hidden), spec, CPU)
    learner.learn(Batches(8, spec), 3)  # online and target differ now
    assert learner._fused is not None and learner._target_fused is not None
    batch = Batches(8, spec).sample(9)
    target = learner.targets(batch, 0)
    grad, priority, value, q = learner.grads(batch, target, 0)
    grad, priority, q = grad.clone(), priority.clone(), q.clone()
    learner._fused = learner._target_fused = None
    torch.testing.assert_close(target, learner.targets(batch, 0))
    plain, plain_priority, plain_value, plain_q = learner.grads(batch, target, 0)
    torch.testing.assert_close(grad, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(priority, plain_priority)
    assert value == pytest.approx(float(plain_value), rel=1e-6)
    torch.testing.assert_close(q, plain_q)
    assert plain.abs().max() > 1e-3


@pytest.mark.parametrize("where", ["obs", "reward", "weights"])
def test_the_handwritten_gradient_does_not_hide_what_is_no_number(where: str) -> None:
    learner = Learner(config(), SPEC, CPU)
    batch = Batches(8).sample(0)
    if where == "weights":
        learner.flat.data[0] = float("nan")
    else:
        getattr(batch, where)[0] = float("nan")
    loss = learner.grads(batch, learner.targets(batch, 0), 0)[2]
    assert loss != loss


def test_moments_of_dead_units_become_zero_not_denormal() -> None:
    learner = Learner(config(), SPEC, CPU)
    learner.learn(Batches(8), 2)
    weights = learner.flat.data.clone()
    for _ in range(1000):
        learner.apply(torch.zeros_like(learner.grad))
    m = learner.optimizer.m
    assert m.abs().max() == 0 and learner.optimizer.v.max() > 0
    assert not torch.equal(weights, learner.flat.data)  # the first of them still moved by their momentum


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "sgd", "momentum"])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_updates_equal_torch_optim(optimizer: str, decay: float) -> None:
    """20 updates, clipping and the target network included, against nn.Sequential + autograd + torch.optim."""
    momentum = 0.9 if optimizer == "momentum" else 0.0
    kind = "sgd" if momentum else optimizer
    c = config(
        learner__optimizer=kind,
        learner__momentum=momentum,
        learner__weight_decay=decay,
        learner__lr=0.01,
        learner__grad_clip=1.0,
    )
    learner = Learner(c, SPEC, CPU)
    linears = learner.net.plain_mlp()
    assert linears is not None
    net = nn.Sequential(*(x for layer in linears for x in (copy.deepcopy(layer), nn.ReLU())))[:-1]
    for p in net.parameters():
        p.grad = None
        p.data = p.data.clone()
    target = copy.deepcopy(net)
    params = list(net.parameters())
    reference: torch.optim.Optimizer
    if optimizer == "adam":
        reference = torch.optim.AdamW(params, lr=0.01, weight_decay=decay)
    elif optimizer == "rmsprop":
        reference = torch.optim.RMSprop(params, lr=0.01, alpha=0.95)
    else:
        reference = torch.optim.SGD(params, lr=0.01, momentum=momentum)

    source = Batches(8)
    for update in range(20):
        batch = source.sample(update)
        with torch.no_grad():
            y = batch.reward + batch.discount * target(batch.next_obs).max(1).values
        q = net(batch.obs)[torch.arange(8), batch.action]
        loss = (batch.weight * nn.functional.smooth_l1_loss(q, y, reduction="none")).mean()
        reference.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        if optimizer != "adam" and decay:
            for p in params:
                p.data.mul_(1 - 0.01 * decay)
        reference.step()
        if (update + 1) % 5 == 0:
            target.load_state_dict(net.state_dict())

    learner.learn(source, 20)
    for mine, theirs in zip(learner.net.parameters(), params, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)
    for mine, theirs in zip(learner.target_net.parameters(), target.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)
    assert learner.updates == 20 and len(source.priorities) == 20


def test_chunks_change_nothing() -> None:
    """Targets for several updates at once = one by one, also across copies into the target network."""
    whole, single = Learner(config(), SPEC, CPU), Learner(config(), SPEC, CPU)
    assert whole._chunk > 1
    single._chunk = 1
    a, b = whole.learn(Batches(8), 23), single.learn(Batches(8), 23)
    assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-6)
    torch.testing.assert_close(whole.flat.data, single.flat.data, rtol=1e-5, atol=1e-6)


def test_a_target_network_that_others_freeze_counts_from_the_next_update() -> None:
    whole, single = Learner(config(), SPEC, CPU), Learner(config(), SPEC, CPU)
    single._chunk = 1
    for learner in (whole, single):

        def sync(grad: torch.Tensor, samples: int, learner: Learner = learner) -> None:
            learner.optimize(grad)
            if learner.updates % 3 == 0:  # not where its own would be due
                learner.freeze(learner.parameters)

        learner.sync = sync
        learner.learn(Batches(8), 23)
    torch.testing.assert_close(whole.flat.data, single.flat.data, rtol=1e-5, atol=1e-6)


def test_updates_that_others_made_are_not_made_again() -> None:
    """Whatever was sampled for them: not one more than is due, and only its own are told."""
    learner, source = Learner(config(learner__target_interval=100), SPEC, CPU), Batches(8)
    counts: list[int] = []

    def agree(grad: torch.Tensor, samples: int) -> None:
        counts.append(learner.updates)
        learner.updates += 4 if learner.updates == 3 else 1  # three without this one

    learner.sync = agree
    learned = learner.learn(source, 10)
    assert counts == [0, 1, 2, 3, 7, 8, 9] and learned.updates == len(source.priorities) == 7
    assert learner.updates == 10


def test_polyak_target() -> None:
    learner = Learner(config(learner__tau=0.25, learner__target_interval=1), SPEC, CPU)
    before = learner.target.data.clone()
    learner.learn(Batches(8), 1)
    torch.testing.assert_close(learner.target.data, 0.75 * before + 0.25 * learner.flat.data)
    assert not torch.equal(before, learner.target.data)


def test_double_selects_with_the_online_network() -> None:
    learner = Learner(config("double"), SPEC, CPU)
    learner.learn(Batches(8), 3)  # online and target differ now
    batch = Batches(8).sample(9)
    with torch.no_grad():
        action = learner.net.q(batch.next_obs).argmax(1)
        value = learner.target_net.q(batch.next_obs)[torch.arange(8), action]
    torch.testing.assert_close(learner.targets(batch, 9), batch.reward + batch.discount * value)


@pytest.mark.parametrize("recipe", recipes.NAMES)
def test_every_recipe_fits_a_fixed_target(recipe: str) -> None:
    """With discount 0 the target is the reward alone: the loss on one batch must fall a lot."""
    learner = Learner(config(recipe, learner__lr=3e-3, network__v_min=-10.0, network__v_max=10.0), SPEC, CPU)

    class One(Batches):
        def _one(self, update: int) -> Batch:
            return super()._one(0)._replace(discount=torch.zeros(self.size))

    first = learner.learn(One(8), 1).loss_sum
    learner.learn(One(8), 300)
    last = learner.learn(One(8), 1).loss_sum
    assert last < 0.5 * first
    batch = One(8).sample(0)
    with torch.no_grad():
        q = learner.net.q(batch.obs)[torch.arange(8), batch.action]
    if recipe != "munchausen":  # whose bonus is part of the target
        assert (q - batch.reward).abs().mean() < 0.5 * batch.reward.abs().mean()


@pytest.mark.parametrize("recipe", ["dqn", "rainbow", "iqn"])
def test_same_seed_same_numbers_and_state_round_trip(recipe: str) -> None:
    a, b = Learner(config(recipe), SPEC, CPU), Learner(config(recipe), SPEC, CPU)
    assert torch.equal(a.flat.data, b.flat.data)
    assert a.learn(Batches(8), 7) == b.learn(Batches(8), 7)
    other = Learner(config(recipe, seed=2), SPEC, CPU)
    assert not torch.equal(a.flat.data, other.flat.data)
    other = Learner(config(recipe), SPEC, CPU)
    other.load_state(copy.deepcopy(a.state()))
    a.learn(Batches(8), 9)
    other.learn(Batches(8), 9)
    assert torch.equal(a.flat.data, other.flat.data) and torch.equal(a.target.data, other.target.data)


def test_parameters_are_views_of_one_buffer_and_keep_their_strides() -> None:
    c = override(recipes.make("dqn", "pong"), {"learner.batch_size": 2})
    learner = Learner(c, IMAGES, CPU)
    storage = learner.flat.data.untyped_storage().data_ptr()
    for p in learner.net.parameters():
        assert p.untyped_storage().data_ptr() == storage
        assert p.grad is not None and p.grad.stride() == p.stride()
        assert (p.data_ptr() - storage) % 64 == 0
    convs = [p for p in learner.net.parameters() if p.dim() == 4]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in convs) and len(convs) == 3
    before = learner.flat.data.clone()
    out = learner.learn(Batches(2, IMAGES), 2)
    assert out.loss_sum > 0 and not torch.equal(before, learner.flat.data)


def test_mixed_precision_is_close() -> None:
    exact, mixed = Learner(config("c51"), SPEC, CPU), Learner(config("c51", learner__precision="bf16"), SPEC, CPU)
    a, b = exact.learn(Batches(8), 10), mixed.learn(Batches(8), 10)
    assert a.loss_sum != b.loss_sum
    assert a.loss_sum == pytest.approx(b.loss_sum, rel=0.02)


def test_losses_are_averaged_with_importance_weights() -> None:
    learner = Learner(config(), SPEC, CPU)
    batch = Batches(8).sample(0)
    target = learner.targets(batch, 0)
    _, priority, loss, q = learner.grads(batch, target, 0)
    expected = losses.scalar_loss(q, batch.action, target, batch.weight, "huber")
    assert float(loss) == pytest.approx(expected.loss.item(), rel=1e-6)
    torch.testing.assert_close(priority, expected.priority)
