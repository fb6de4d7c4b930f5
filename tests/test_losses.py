"""Targets and losses against cases worked by hand and loops in float64 NumPy."""

import math

import numpy as np
import pytest
import torch

from qfleet import losses

B, A, N, M = 6, 3, 5, 4


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def t(x):
    return torch.tensor(x, dtype=torch.float32)


def close(actual, expected, tol=1e-5):
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=tol, atol=tol)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def huber(u, kappa=1.0):
    return 0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)


def finite_differences(loss, x, step=1e-6):
    """d loss / d x by central differences in float64."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        above, below = x.copy(), x.copy()
        above[i] += step
        below[i] -= step
        gradient[i] = (loss(above) - loss(below)) / (2 * step)
    return gradient


# --- targets -----------------------------------------------------------------------------------------------------


def test_scalar_target_by_hand():
    reward, discount = t([1.0, -1.0]), t([0.5, 0.0])  # the second one terminated
    q_next = t([[2.0, 4.0, 3.0], [9.0, 9.0, 9.0]])
    close(losses.scalar_target(reward, discount, q_next, None), [1 + 0.5 * 4, -1])
    select = t([[0.0, 1.0, 2.0], [0.0, 0.0, 1.0]])  # the online network prefers action 2
    close(losses.scalar_target(reward, discount, q_next, select), [1 + 0.5 * 3, -1])
    assert losses.greedy(q_next).tolist() == [1, 0]


def test_munchausen_bonus_by_hand():
    # pi = (1/4, 3/4) at temperature tau: q = tau * log of it, up to a constant
    tau = 0.5
    q = tau * t([[1.0, 3.0], [1.0, 3.0]]).log() + 7.0
    bonus = losses.munchausen_bonus(q, torch.tensor([0, 1]), alpha=0.9, tau=tau)
    close(bonus, [0.9 * tau * math.log(0.25), 0.9 * tau * math.log(0.75)])
    clipped = losses.munchausen_bonus(q, torch.tensor([0, 1]), alpha=0.9, tau=tau, clip=-0.3)
    close(clipped, [0.9 * -0.3, 0.9 * tau * math.log(0.75)])


def test_munchausen_survives_extreme_values():
    q = t([[1e4, -1e4, 0.0]])
    close(losses.munchausen_bonus(q, torch.tensor([1]), 0.9, 0.03), [-0.9])
    close(losses.munchausen_bonus(q, torch.tensor([0]), 0.9, 0.03), [0.0])
    close(losses.soft_scalar_target(t([1.0]), t([0.5]), q, 0.03), [1 + 0.5 * 1e4])
    quantiles = q.unsqueeze(2) + t([-1.0, 1.0])
    close(losses.soft_quantile_target(t([1.0]), t([0.5]), quantiles, q, 0.03), [[1 + 0.5 * 9999, 1 + 0.5 * 10001]])


def test_soft_targets_against_loops(rng):
    tau, reward, discount = 0.3, rng.normal(size=B), rng.uniform(size=B)
    discount[0] = 0.0
    z = rng.normal(size=(B, A, N))
    q = z.mean(2)
    pi = softmax(q / tau)
    scalar, quantiles = reward.copy(), np.repeat(reward[:, None], N, 1)
    for b in range(B):
        for a in range(A):
            scalar[b] += discount[b] * pi[b, a] * (q[b, a] - tau * np.log(pi[b, a]))
            for n in range(N):
                quantiles[b, n] += discount[b] * pi[b, a] * (z[b, a, n] - tau * np.log(pi[b, a]))
    close(losses.soft_scalar_target(t(reward), t(discount), t(q), tau), scalar)
    close(losses.soft_quantile_target(t(reward), t(discount), t(z), t(q), tau), quantiles)
    close(losses.soft_quantile_target(t(reward), t(discount), t(z), t(q), tau).mean(1), scalar)


def projected(probs, reward, discount, support):
    """The projection of the C51 paper (algorithm 1), one atom at a time."""
    out = np.zeros_like(probs)
    step = support[1] - support[0]
    for b in range(len(probs)):
        for j, z in enumerate(support):
            position = (np.clip(reward[b] + discount[b] * z, support[0], support[-1]) - support[0]) / step
            low, high = math.floor(position), math.ceil(position)
            if low == high:
                out[b, low] += probs[b, j]
            else:
                out[b, low] += probs[b, j] * (high - position)
                out[b, high] += probs[b, j] * (position - low)
    return out


def test_categorical_target_against_the_paper(rng):
    support = np.linspace(-2.0, 3.0, 11)
    logits = rng.normal(size=(B, A, 11)) * 2
    reward, discount = rng.normal(size=B) * 3, rng.uniform(size=B)
    discount[0] = 0.0
    action = np.array([0, 1, 2, 2, 1, 0])
    target = losses.categorical_target(t(reward), t(discount), t(logits), torch.tensor(action), t(support))
    probs = softmax(logits)[np.arange(B), action]
    close(target, projected(probs, reward, discount, support))
    close(target.sum(1), np.ones(B))


@pytest.mark.parametrize("project", [losses.project, losses.project_in_order])
def test_both_projections_by_hand(project):
    """Beyond the ends, on them, on an atom, between two; and several on one atom."""
    position = t([[-2.0, 0.0, 1.0, 1.25], [2.5, 3.0, 7.0, 3.0]])
    probs = t([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    close(project(probs, position), [[0.3, 0.6, 0.1, 0.0], [0.0, 0.0, 0.2, 0.8]], tol=1e-7)


def one_case(reward, discount, probs, support):
    logits = t(probs).log().view(1, 1, -1)
    args = t([reward]), t([discount]), logits, torch.tensor([0]), t(support)
    return losses.categorical_target(*args)[0]


def test_categorical_target_by_hand():
    support, probs = [-1.0, 0.0, 1.0, 2.0], [0.1, 0.2, 0.3, 0.4]
    # atoms on atoms: moved by exactly one place, the two highest meet at the top end
    close(one_case(1.0, 1.0, probs, support), [0.0, 0.1, 0.2, 0.7], tol=1e-7)
    close(one_case(0.0, 1.0, probs, support), probs, tol=1e-7)
    # half way between two atoms
    close(one_case(0.5, 1.0, probs, support), [0.05, 0.15, 0.25, 0.55], tol=1e-6)
    # beyond both ends
    close(one_case(50.0, 1.0, probs, support), [0, 0, 0, 1], tol=1e-6)
    close(one_case(-50.0, 1.0, probs, support), [1, 0, 0, 0], tol=1e-6)
    # terminal: a single value, between the atoms 1 and 2
    close(one_case(1.25, 0.0, probs, support), [0, 0, 0.75, 0.25], tol=1e-6)
    close(one_case(2.0, 0.0, probs, support), [0, 0, 0, 1], tol=1e-6)


def test_categorical_target_keeps_whole_rewards_whole_on_the_usual_support():
    support = torch.linspace(-10, 10, 51)
    for reward in range(-10, 11, 2):
        target = losses.categorical_target(
            t([float(reward)]), t([0.0]), torch.zeros(1, 1, 51), torch.tensor([0]), support
        )
        expected = np.zeros((1, 51))
        expected[0, (reward + 10) * 5 // 2] = 1.0
        close(target, expected, tol=1e-5)


def test_quantile_target_by_hand():
    z = t([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    target = losses.quantile_target(t([1.0, -1.0]), t([0.5, 0.0]), z, torch.tensor([1, 0]))
    close(target, [[2.5, 3.0], [-1.0, -1.0]])


# --- losses ------------------------------------------------------------------------------------------------------

ACTION = np.array([0, 1, 2, 2, 1, 0])


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_scalar_loss_against_loops(rng, kind):
    q, target, weight = rng.normal(size=(B, A)) * 2, rng.normal(size=B), rng.uniform(size=B)
    each = huber if kind == "huber" else lambda u: u * u

    def naive(q):
        return sum(weight[b] * each(q[b, ACTION[b]] - target[b]) for b in range(B)) / B

    x = t(q).requires_grad_()
    out = losses.scalar_loss(x, torch.tensor(ACTION), t(target), t(weight), kind)
    assert out.loss.shape == ()
    close(out.loss, naive(q))
    close(out.priority, np.abs(q[np.arange(B), ACTION] - target))
    assert not out.priority.requires_grad
    out.loss.backward()
    close(x.grad, finite_differences(naive, q))


def test_huber_by_hand():
    out = losses.scalar_loss(t([[0.5], [3.0]]), torch.tensor([0, 0]), t([0.0, 0.0]), t([1.0, 0.5]), "huber")
    close(out.loss, (0.125 + 0.5 * 2.5) / 2)
    close(out.priority, [0.5, 3.0])


def test_categorical_loss_against_loops(rng):
    logits, target, weight = rng.normal(size=(B, A, N)), softmax(rng.normal(size=(B, N))), rng.uniform(size=B)
    target[0] = [0, 0, 1, 0, 0]  # log 0 must not show

    def naive(logits):
        total = 0.0
        for b in range(B):
            log_probs = np.log(softmax(logits[b, ACTION[b]]))
            total -= weight[b] * sum(target[b, n] * log_probs[n] for n in range(N))
        return total / B

    x = t(logits).requires_grad_()
    out = losses.categorical_loss(x, torch.tensor(ACTION), t(target), t(weight))
    close(out.loss, naive(logits))
    kl = [
        sum(p * np.log(p / s) for p, s in zip(target[b], softmax(logits[b, ACTION[b]]), strict=True) if p > 0)
        for b in range(B)
    ]
    close(out.priority, kl)
    assert not out.priority.requires_grad
    out.loss.backward()
    close(x.grad, finite_differences(naive, logits))


def test_categorical_priority_of_a_perfect_prediction_is_zero_not_negative(rng):
    logits = t(rng.normal(size=(64, 1, 51)))
    out = losses.categorical_loss(logits, torch.zeros(64, dtype=torch.long), logits[:, 0].softmax(1), torch.ones(64))
    assert (out.priority >= 0).all() and out.priority.max() < 1e-5


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("kappa", [1.0, 0.5])
def test_quantile_loss_against_loops(rng, rows, kappa):
    z, target, weight = rng.normal(size=(B, A, N)) * 2, rng.normal(size=(B, M)), rng.uniform(size=B)
    taus = rng.uniform(size=(rows, N))

    def naive(z):
        total = 0.0
        for b in range(B):
            for n in range(N):
                for m in range(M):
                    u = target[b, m] - z[b, ACTION[b], n]
                    total += weight[b] * abs(taus[b % rows, n] - (u < 0)) * huber(u, kappa) / kappa / M
        return total / B

    x = t(z).requires_grad_()
    out = losses.quantile_loss(x, torch.tensor(ACTION), t(taus), t(target), t(weight), kappa)
    close(out.loss, naive(z))
    close(out.priority, np.abs(target.mean(1) - z[np.arange(B), ACTION].mean(1)))
    assert not out.priority.requires_grad
    out.loss.backward()
    close(x.grad, finite_differences(naive, z))


def test_quantile_loss_pulls_each_quantile_to_its_fraction():
    """Minimised over many samples of a known distribution, the predictions are its quantiles."""
    taus = t([[0.1, 0.5, 0.9]])
    z = torch.zeros(1, 1, 3, requires_grad=True)
    samples = torch.linspace(0, 10, 1001).view(1, -1)
    for _ in range(300):
        loss = losses.quantile_loss(z, torch.tensor([0]), taus, samples, torch.ones(1), kappa=0.01).loss
        (gradient,) = torch.autograd.grad(loss, z)
        z = (z - 5 * gradient).detach().requires_grad_()
    close(z[0, 0], [1.0, 5.0, 9.0], tol=0.05)
