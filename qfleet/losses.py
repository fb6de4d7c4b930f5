"""Targets and losses of the DQN family: pure functions over tensors that know nothing of networks, n or episode ends.

B batch, A actions, N predicted atoms or quantiles, M target quantiles. `reward` [B] is the (n-step) reward, `discount`
[B] is gamma^k and 0 after a termination. Targets carry no gradient: call their functions under `torch.no_grad()`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Loss(NamedTuple):
    loss: Tensor  # []: mean over the batch of weight * per-sample loss
    priority: Tensor  # [B]: how surprising each sample was, >= 0, no gradient


def _taken(x: Tensor, action: Tensor) -> Tensor:
    """x[b, action[b]]: [B, A] -> [B], [B, A, N] -> [B, N]. (gather: indexing is slower in the backward pass.)"""
    if x.dim() == 2:
        return x.gather(1, action.unsqueeze(1)).squeeze(1)
    return x.gather(1, action.view(-1, 1, 1).expand(-1, 1, x.shape[2])).squeeze(1)


# --- targets -----------------------------------------------------------------------------------------------------


def greedy(q_next: Tensor) -> Tensor:
    """Best action: [B, A] -> [B]."""
    return q_next.argmax(1)


def scalar_target(reward: Tensor, discount: Tensor, q_next: Tensor, select: Tensor | None) -> Tensor:
    """r + discount * max_a q_next -> [B]; double DQN if `select` [B, A] is given: its argmax, valued by q_next."""
    value = q_next.amax(1) if select is None else _taken(q_next, greedy(select))
    return torch.addcmul(reward, discount, value)


def munchausen_bonus(q: Tensor, action: Tensor, alpha: float, tau: float, clip: float = -1.0) -> Tensor:
    """alpha * clamp(tau * log pi(action), clip, 0) -> [B], pi = softmax(q / tau), q [B, A] the target network at obs.

    Add it to the reward before the soft target (Vieillard et al., 2020).
    """
    log_pi = F.log_softmax(q / tau, dim=1)
    return alpha * (tau * _taken(log_pi, action)).clamp(clip, 0.0)


def soft_scalar_target(reward: Tensor, discount: Tensor, q_next: Tensor, tau: float) -> Tensor:
    """r + discount * sum_a pi(a) (q(a) - tau log pi(a)) -> [B]; for pi = softmax(q / tau) the sum is a log-sum-exp."""
    return torch.addcmul(reward, discount, tau * torch.logsumexp(q_next / tau, dim=1))


def categorical_target(
    reward: Tensor, discount: Tensor, next_logits: Tensor, next_action: Tensor, support: Tensor
) -> Tensor:
    """C51: the next distribution, moved by r + discount * z and projected back on the support [N] -> probabilities [B, N].

    Mass between two atoms is shared in proportion to its nearness; mass beyond an end falls on the end.
    """
    probs = _taken(next_logits, next_action).softmax(1)
    atoms = support.shape[0]
    low, high = support[0], support[-1]
    moved = torch.addcmul(reward.unsqueeze(1), discount.unsqueeze(1), support)  # [B, N]
    position = (moved - low) * ((atoms - 1) / (high - low))  # in units of atoms
    return project(probs, position) if probs.is_cpu else project_in_order(probs, position)


def project(probs: Tensor, position: Tensor) -> Tensor:
    """Probabilities at positions among the atoms 0 to N - 1 -> those of the atoms; all [B, N]."""
    # The left neighbour is at most the last but one, so a right one always exists. It gets nothing where position is
    # whole, and everything at the top end and beyond.
    left = position.floor().clamp(0, probs.shape[1] - 2)
    right_share = (position - left).clamp(0.0, 1.0)
    index = left.long()
    out = torch.zeros_like(probs)
    out.scatter_add_(1, index, probs * (1.0 - right_share))
    return out.scatter_add_(1, index + 1, probs * right_share)


def project_in_order(probs: Tensor, position: Tensor) -> Tensor:
    """The same on a GPU, where threads that add to one atom come in any order, and each run would have numbers of its own."""
    atoms = torch.arange(probs.shape[1], device=probs.device)
    distance = position.clamp(0, len(atoms) - 1).unsqueeze(1) - atoms.unsqueeze(1)  # [B, atom, position]
    return (1.0 - distance.abs_()).clamp_(min=0.0).mul_(probs.unsqueeze(1)).sum(2)


def quantile_target(reward: Tensor, discount: Tensor, next_quantiles: Tensor, next_action: Tensor) -> Tensor:
    """r + discount * z(next_action): [B, A, N] -> [B, N]."""
    return torch.addcmul(reward.unsqueeze(1), discount.unsqueeze(1), _taken(next_quantiles, next_action))


def soft_quantile_target(
    reward: Tensor, discount: Tensor, next_quantiles: Tensor, q_next: Tensor, tau: float
) -> Tensor:
    """r + discount * sum_a pi(a) (z(a) - tau log pi(a)) -> [B, N], pi = softmax(q_next / tau)."""
    log_pi = F.log_softmax(q_next / tau, dim=1).unsqueeze(2)  # [B, A, 1]
    soft = (log_pi.exp() * (next_quantiles - tau * log_pi)).sum(1)
    return torch.addcmul(reward.unsqueeze(1), discount.unsqueeze(1), soft)


# --- losses ------------------------------------------------------------------------------------------------------


def scalar_loss(q: Tensor, action: Tensor, target: Tensor, weight: Tensor, kind: str) -> Loss:
    """Huber (threshold 1) or squared TD error; priority = |TD error|."""
    assert kind in ("huber", "mse"), kind
    predicted = _taken(q, action)
    elementwise = F.smooth_l1_loss if kind == "huber" else F.mse_loss
    loss = (weight * elementwise(predicted, target, reduction="none")).mean()
    return Loss(loss, (predicted.detach() - target).abs())


def categorical_loss(logits: Tensor, action: Tensor, target_probs: Tensor, weight: Tensor) -> Loss:
    """Cross entropy; priority = KL(target || prediction), which is 0 for a perfect prediction of a spread-out return."""
    log_probs = F.log_softmax(_taken(logits, action), dim=1)
    cross_entropy = -(target_probs * log_probs).sum(1)
    kl = cross_entropy.detach() - torch.special.entr(target_probs).sum(1)
    return Loss((weight * cross_entropy).mean(), kl.clamp_min(0.0))


def quantile_loss(
    quantiles: Tensor, action: Tensor, taus: Tensor, target: Tensor, weight: Tensor, kappa: float = 1.0
) -> Loss:
    """Quantile Huber loss: sum over N of the mean over M of |tau - 1{u < 0}| huber(u) / kappa, u = target - prediction.

    taus [1 or B, N] are the fractions of the predicted quantiles, target is [B, M]. priority = |mean of u|, the TD error
    of the expectations: on the scale of `scalar_loss`, and free of the spread of the return, which is no error.
    """
    predicted = _taken(quantiles, action)
    u = target.unsqueeze(1) - predicted.unsqueeze(2)  # [B, N, M]
    slope = (taus.unsqueeze(2) - (u < 0).float()).abs()
    huber = F.huber_loss(u, u.new_zeros(()).expand_as(u), reduction="none", delta=kappa)
    per_sample = (slope * huber).sum((1, 2)) / (target.shape[1] * kappa)
    priority = (target.mean(1) - predicted.detach().mean(1)).abs()
    return Loss((weight * per_sample).mean(), priority)
