"""The records that flow through qfleet, and the glossary.

Glossary
--------
step        one environment transition whose action was used; reset rows do not count.
row         one line of a replay stream: an observation, the action taken there, and the reward and flags it produced.
column      one stream of rows, fed by one environment.
end         a row whose action terminated (or, for learning, lost a life) or truncated the episode.
first       a row that holds the first observation of an episode.
start       a row from which a complete n-step window can be gathered; only starts are sampled.
round       the steps collected between two joins of acting and learning, and the updates that belong to them.
lag         0: act, then update on what was just seen. 1: act and update at the same time, on rows of earlier rounds.
version     number of updates applied to the parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = np.ndarray[Any, Any]
# What a stateful part hands to a checkpoint: nested dicts of str whose leaves are arrays, tensors or JSON values.
State: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the learner must know of an environment."""

    obs_shape: tuple[int, ...]  # of one observation as stored: no stack, no batch
    obs_dtype: str  # "uint8", "bool" or "float32"
    num_actions: int
    frame_stack: int = 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one network input: the stack comes first when there is one."""
        return self.obs_shape if self.frame_stack == 1 else (self.frame_stack, *self.obs_shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"uint8": torch.uint8, "bool": torch.bool, "float32": torch.float32}[self.obs_dtype]

    @property
    def obs_bytes(self) -> int:
        return math.prod(self.obs_shape) * (4 if self.obs_dtype == "float32" else 1)


class Step(NamedTuple):
    """R complete rows of C columns, as they enter the replay. Leading shape [R, C] everywhere."""

    obs: Tensor  # [R, C, *obs_shape]
    action: Tensor  # [R, C] int64
    reward: Tensor  # [R, C] float32, raw (never clipped)
    terminated: Tensor  # [R, C] bool: the bootstrap stops here (true end, or a life lost)
    truncated: Tensor  # [R, C] bool: the episode was cut here; it bootstraps from the next row
    first: Tensor  # [R, C] bool: obs is the first of an episode


class Batch(NamedTuple):
    """What the loss sees. It knows nothing of n-step, of episode ends or of frame stacks."""

    obs: Tensor  # [B, *input_shape], stored dtype
    action: Tensor  # [B] int64
    reward: Tensor  # [B] float32: n-step sum of (clipped) rewards
    discount: Tensor  # [B] float32: gamma^k, 0 after a termination
    next_obs: Tensor  # [B, *input_shape]
    id: Tensor  # [B] int64: absolute row * columns + column; never reused, so a stale one is recognised
    weight: Tensor  # [B] float32: importance weights; ones when sampling is uniform
