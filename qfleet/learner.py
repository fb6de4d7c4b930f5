"""The learner: a batch in, a flat gradient out; a flat gradient in, new parameters out.

    Batch ──targets──▶ ──grads──▶ flat gradient ──(sync, with several learners)──▶ apply ──▶ parameters, target network

Parameters live in one flat buffer; the network's own tensors are views of it. So the optimiser is one kernel,
publishing one copy, and a gradient one array. `grads` and `apply` are the seam at which learners agree: the learner
does not know how many it is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qfleet import losses, machine, networks, rng
from qfleet.config import Config
from qfleet.device import Transfers, pin_copy
from qfleet.networks import QNetwork
from qfleet.types import Batch, Spec, State

if TYPE_CHECKING:
    from qfleet.fused import Mlp, MlpGradient

ALIGN = 16  # floats: every parameter starts on a 64-byte boundary
CHUNK_BYTES = 16 << 20  # of batches sampled in one call
CACHE_BYTES = 512 << 10
IQN_TARGET_SAMPLES = 32
KERNEL_SIZE = 1 << 20  # parameters: beyond, torch's threads are worth more than a cheap call
MODAL = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)  # behave differently when training


class Source(Protocol):
    """Where batches come from (a replay)."""

    def sample(self, update: int, count: int = 1, beta: float = 1.0, size: int = 0) -> Batch: ...
    def update_priorities(self, id: Tensor, priority: Tensor) -> None: ...


class Learned(NamedTuple):
    """What one call of `learn` did."""

    loss_sum: float  # over its updates
    q_mean: float  # mean value of the actions in the last batch
    updates: int


class Draws(NamedTuple):
    """The random numbers of one update; None where the network needs none."""

    noise: Tensor | None  # [1, noise_size], of the online network on obs
    target_noise: Tensor | None  # of the target network
    select_noise: Tensor | None  # of the online network on next_obs (double)
    taus: Tensor | None  # [B, atoms], of the online network (iqn)
    target_taus: Tensor | None  # [B, IQN_TARGET_SAMPLES]


class Flat:
    """One buffer that holds all parameters of a module, which become views of it; the same for gradients."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.named = dict(module.named_parameters())
        sizes = [-(-p.numel() // ALIGN) * ALIGN for p in self.named.values()]
        self.data = torch.zeros(sum(sizes), device=device, dtype=dtype)
        self._at = list(zip(self.named.values(), torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
        self.places = [(p.shape, at) for p, at in self._at]  # shape and offset of every parameter, in order
        for p, at in self._at:
            view = self._view(self.data, p, at)
            view.copy_(p.detach())
            p.data = view
        # What else a user's module keeps (the statistics of a batch normalisation): copied along with the parameters.
        self.buffers = [v for k, v in module.state_dict().items() if k not in self.named]

    def copy_(self, other: Flat) -> None:
        """Take over the parameters and buffers of a network of the same build."""
        self.data.copy_(other.data)
        self.copy_buffers_(other)

    def copy_buffers_(self, other: Flat) -> None:
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.copy_(theirs)

    @staticmethod
    def _view(buffer: Tensor, p: Tensor, at: int) -> Tensor:
        part = buffer[at : at + p.numel()]
        if p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last):
            o, i, h, w = p.shape  # keep the strides convolutions like best
            return part.view(o, h, w, i).permute(0, 3, 1, 2)
        return part.view(p.shape)

    def bind_grad(self) -> Tensor:
        """Make every `.grad` a view of one flat gradient, so that backward() fills it in place."""
        grad = torch.zeros_like(self.data)
        for p, at in self._at:
            p.grad = self._view(grad, p, at)
        return grad


def unbind(batch: Batch, size: int) -> Iterator[Batch]:
    """Consecutive parts of `size` samples."""
    if len(batch.action) == size:
        return iter((batch,))
    return map(Batch._make, zip(*(torch.split(field, size) for field in batch), strict=True))


class Learner:
    """Online and target network, optimiser state, and the two functions over them."""

    def __init__(self, config: Config, spec: Spec, device: torch.device) -> None:
        self.config, self.spec, self.device = config, spec, device
        if device.type == "cpu":
            machine.keep_memory()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.derive(config.seed, "network"))
            self.net: QNetwork = networks.build(config, spec)
        self.target_net: QNetwork = networks.build(config, spec)  # built, not copied: a Keras model cannot be
        self.flat, self.target = Flat(self.net.to(device), device), Flat(self.target_net.to(device), device)
        self.target.copy_(self.flat)
        for p in self.target.named.values():
            p.requires_grad_(False)
        self.grad = self.flat.bind_grad()
        self.net.eval()
        self.target_net.eval()
        self._online, self._frozen = self.net, self.target_net  # those that compute
        self._has_modes = any(isinstance(m, MODAL) for m in self.net.modules())  # only a user's module can
        self.optimizer = Optimizer(config, self.flat.data)
        self.updates = 0
        # With several learners: what happens with a gradient and the number of samples behind it.
        self.sync: Callable[[Tensor, int], None] | None = None
        self.batch_size = config.learner.batch_size  # of this learner: others may have other ones
        self.began = 0.0  # when (time.perf_counter) the newest call of `learn` did
        self.wait_seconds = 0.0  # of the host, for a device
        self.transfers = Transfers(device)  # of batches
        self.lr = config.learner.lr
        self._noise_key, self._tau_key = rng.key(config.seed, "learner noise"), rng.key(config.seed, "learner taus")
        self._chunk = self._largest_chunk()
        # Targets are computed for as many batches at once as keep a layer's activations in a core's cache.
        vector = len(spec.obs_shape) == 1
        self._target_batches = (
            max(1, CACHE_BYTES // (4 * config.learner.batch_size * max(config.network.hidden, default=1)))
            if vector
            else 1
        )
        self._fused: MlpGradient | None
        self._target_fused: Mlp | None
        self._fused, self._target_fused = self._handwritten()
        self._targets: Callable[[Batch, Draws], Tensor] = self._make_targets
        self._loss: Callable[[Batch, Tensor, Draws], tuple[losses.Loss, Tensor]] = self._make_loss
        if config.learner.compile == "on":  # here, and nowhere else, the hot path is compiled
            self._targets = torch.compile(self._make_targets, dynamic=False)
            self._loss = torch.compile(self._make_loss, dynamic=False)

    # --- the two functions ------------------------------------------------------------------------------------

    @torch.no_grad()
    def targets(self, batch: Batch, update: int) -> Tensor:
        """What the online network should have predicted: [B], or [B, N] for a distribution."""
        return self._targets(batch, self._draws(update, batch.action.shape[0]))

    def grads(self, batch: Batch, target: Tensor, update: int) -> tuple[Tensor, Tensor, Tensor | float, Tensor]:
        """-> flat gradient, new priorities [B], loss, the network's output."""
        if self._fused is not None:
            return self.grad, *self._fused.gradient(batch, target)
        with torch.enable_grad():
            out, raw = self._loss(batch, target, self._draws(update, batch.action.shape[0]))
            self.grad.zero_()
            out.loss.backward()  # type: ignore[no-untyped-call]
        return self.grad, out.priority, out.loss.detach().double(), raw.detach()

    def apply(self, grad: Tensor) -> None:
        """Clip, optimise, refresh the target network."""
        self.optimize(grad)
        if self.updates % self.config.learner.target_interval == 0:
            self.refresh_target()

    def optimize(self, grad: Tensor) -> None:
        """Clip, optimise."""
        self.optimizer(grad, self.lr)
        self.updates += 1

    def refresh_target(self) -> None:
        self.freeze(self.flat.data)
        self.target.copy_buffers_(self.flat)

    def freeze(self, parameters: Tensor) -> None:
        """They become those of the target network, or a part of them (tau)."""
        tau = self.config.learner.tau
        if tau == 1.0:
            self.target.data.copy_(parameters)
        else:
            self.target.data.lerp_(parameters, tau)

    def moved(self) -> None:
        """Somebody else wrote the parameters: copies of them, if there are any, follow."""

    @property
    def parameters(self) -> Tensor:
        return self.flat.data

    # --- many updates ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def learn(self, source: Source, updates: int, beta: float = 1.0) -> Learned:
        """Sample, differentiate and apply, `updates` (at least one) times; fewer where other learners have made some of them.

        Batches are sampled, and their targets computed, for several updates at once where nothing in them can change.
        """
        total_loss: Tensor | float = 0.0
        made = 0
        size, interval, end = self.batch_size, self.config.learner.target_interval, self.updates + updates
        self.began = time.perf_counter()
        while self.updates < end:
            first = self.updates
            count = min(self._chunk, end - first, interval - first % interval)
            sampled = source.sample(first, count, beta, size)
            if sampled.obs.device != self.device:  # a replay in main memory
                sampled = Batch(*self.transfers.send(pin_copy(field, self.device) for field in sampled))
            for batch, target in self._with_targets(sampled, size):
                grad, priority, loss, raw = self.grads(batch, target, self.updates)
                if self.sync is None:
                    self.apply(grad)
                else:
                    self.sync(grad, size)
                source.update_priorities(batch.id, priority)
                total_loss, made = total_loss + loss, made + 1
                if self.updates >= end:
                    break
        q = self.net.values(raw.float()).gather(1, batch.action.unsqueeze(1)).mean()
        return Learned(float(total_loss), q.item(), made)

    def _with_targets(self, sampled: Batch, size: int) -> Iterator[tuple[Batch, Tensor]]:
        """One batch after the other. Targets are computed for several at once."""
        for part in unbind(sampled, self._target_batches * size):
            target, frozen = self.targets(part, self.updates), self.target.data._version
            for batch, batch_target in zip(unbind(part, size), torch.split(target, size), strict=True):
                if self.target.data._version != frozen:  # other learners have moved on: a new target network
                    batch_target = self.targets(batch, self.updates)
                yield batch, batch_target

    def notes(self) -> list[str]:
        """What the user should know about how updates run."""
        if self.device.type == "cpu":
            return []
        return ["the replay is not on the GPU: every batch is copied there, and updates are launched kernel by kernel, which is slower"]  # fmt: skip

    def flush(self) -> Learned | None:
        """What was done and not yet told: nothing here; on a device `learn` tells it one call later."""
        return None

    def _handwritten(self) -> tuple[MlpGradient, Mlp] | tuple[None, None]:
        """Online and target network without autograd, where they are plain MLPs on the CPU."""
        c, linears, target_linears = self.config.learner, self.net.plain_mlp(), self.target_net.plain_mlp()
        if not linears or not target_linears or self.device.type != "cpu" or c.precision == "bf16" or c.compile == "on":
            return None, None
        from qfleet.fused import Mlp, MlpGradient

        if not Mlp.suits(linears):
            return None, None
        return MlpGradient(linears, c.loss), Mlp(target_linears)

    def _largest_chunk(self) -> int:
        """Updates whose targets may be computed together: the target network is frozen between copies, and uniform
        samples do not depend on the updates before them. Everything that looks at the online network forbids it."""
        c = self.config
        if c.replay.prioritized or c.learner.double or c.network.noisy or c.network.dist == "iqn":
            return 1
        if c.learner.compile == "on":  # one shape, one compilation
            return 1
        bytes_per_batch = 2 * c.learner.batch_size * self.spec.obs_bytes * self.spec.frame_stack
        return max(1, CHUNK_BYTES // bytes_per_batch)

    # --- inside: pure functions of a batch and the update's random draws -----------------------------------------

    def _make_targets(self, batch: Batch, draws: Draws) -> Tensor:
        c, n, target = self.config.learner, self.config.network, self._frozen
        if self._fused is not None and self._target_fused is not None:
            raw = self._target_fused(batch.next_obs)
            chosen = self._fused(batch.next_obs) if c.double else None
            now = self._target_fused(batch.obs) if c.munchausen else None
        else:
            with self.precision():
                raw = target(batch.next_obs, draws.target_noise, draws.target_taus).float()
                chosen = self._online(batch.next_obs, draws.select_noise, self.net.taus) if c.double else None
                now = target(batch.obs, draws.target_noise, target.taus) if c.munchausen else None
        q_next = target.values(raw)  # expectations in full precision
        select = None if chosen is None else self.net.values(chosen.float())
        q = None if now is None else target.values(now.float())
        reward = batch.reward
        if q is not None:
            reward = reward + losses.munchausen_bonus(q, batch.action, c.munchausen_alpha, c.munchausen_tau)
            if n.dist == "scalar":
                return losses.soft_scalar_target(reward, batch.discount, q_next, c.munchausen_tau)
            return losses.soft_quantile_target(reward, batch.discount, raw, q_next, c.munchausen_tau)
        if n.dist == "scalar":
            return losses.scalar_target(reward, batch.discount, q_next, select)
        action = losses.greedy(q_next if select is None else select)
        if n.dist == "c51":
            assert target.support is not None
            return losses.categorical_target(reward, batch.discount, raw, action, target.support)
        return losses.quantile_target(reward, batch.discount, raw, action)

    def _make_loss(self, batch: Batch, target: Tensor, draws: Draws) -> tuple[losses.Loss, Tensor]:
        raw = self._predict(batch, draws)
        return self._compare(raw, batch, target, draws), raw

    def _predict(self, batch: Batch, draws: Draws) -> Tensor:
        if self._has_modes:
            self.net.train()
        with self.precision():
            raw: Tensor = self._online(batch.obs, draws.noise, draws.taus)
        if self._has_modes:
            self.net.eval()
        return raw.float()

    def _compare(self, raw: Tensor, batch: Batch, target: Tensor, draws: Draws) -> losses.Loss:
        n = self.config.network
        if n.dist == "scalar":
            return losses.scalar_loss(raw, batch.action, target, batch.weight, self.config.learner.loss)
        if n.dist == "c51":
            return losses.categorical_loss(raw, batch.action, target, batch.weight)
        taus = self.net.taus if draws.taus is None else draws.taus
        assert taus is not None
        return losses.quantile_loss(raw, batch.action, taus, target, batch.weight)

    def _draws(self, update: int | Tensor, rows: int) -> Draws:
        """The random numbers of one update. Noisy layers: one sample per forward pass."""
        noise: list[Tensor | None] = [None, None, None]
        taus: list[Tensor | None] = [None, None]
        if self.net.noise_size:
            counter = 3 * update + torch.arange(3, device=self.device)
            noise = list(networks.draw_noise(self._noise_key, counter, self.net.noise_size).chunk(3))
        if self.config.network.dist == "iqn":
            sizes = (self.config.network.atoms, IQN_TARGET_SAMPLES)
            counter = torch.as_tensor(update, device=self.device).view(1)
            both = rng.uniform_torch(self._tau_key, counter, rows * sum(sizes)).float().view(rows, -1)
            taus = [both[:, : sizes[0]].contiguous(), both[:, sizes[0] :].contiguous()]
        return Draws(*noise, *taus)

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.learner.precision == "bf16")

    # --- state ---------------------------------------------------------------------------------------------------

    def state(self) -> State:
        return {
            "model": {k: v.contiguous() for k, v in self.net.state_dict().items()},  # buffers of a user's module too
            "target": {k: v.contiguous() for k, v in self.target_net.state_dict().items()},
            "optimizer": self.optimizer.state(),
            "updates": self.updates,
            "lr": self.lr,
        }

    def load_state(self, state: State) -> None:
        self.net.load_state_dict(state["model"])  # copies into the views of the flat buffers
        self.target_net.load_state_dict(state["target"])
        self.optimizer.load_state(state["optimizer"])
        self.updates, self.lr = state["updates"], state["lr"]


def clip(grad: Tensor, most: float) -> None:
    """Its norm becomes at most that, in place."""
    scale = most / (torch.linalg.vector_norm(grad) + 1e-6)
    if grad.device.type != "cpu" or scale < 1.0:  # looking costs nothing on the CPU, and a stall elsewhere
        grad.mul_(scale.clamp_(max=1.0))


class Optimizer:
    """Clipping, then Adam, RMSprop or SGD, on one flat buffer, in place."""

    def __init__(self, config: Config, data: Tensor) -> None:
        c = config.learner
        self.data = data
        self.kind, self.eps, self.decay, self.clip = c.optimizer, c.adam_eps, c.weight_decay, c.grad_clip
        self.step = torch.zeros((), device=data.device)
        self.momentum = c.momentum
        self.m = torch.zeros_like(data if self.kind == "adam" or self.momentum else data[:0])
        self.v = torch.zeros_like(data if self.kind != "sgd" else data[:0])
        self.adam: Callable[..., None] | None = None  # on the CPU, for networks that are not large
        if self.kind == "adam" and data.device.type == "cpu" and data.numel() <= KERNEL_SIZE:
            from qfleet.fused import adam

            arrays = (self.data.numpy(), self.m.numpy(), self.v.numpy(), self.step.numpy())
            self.adam = functools.partial(adam, *arrays, self.eps, self.clip)

    def __call__(self, grad: Tensor, lr: float | Tensor) -> None:
        """lr may be a tensor [1], for a graph that reads it."""
        if self.decay:
            self.data.mul_(1.0 - lr * self.decay)
        if self.adam is not None:
            self.adam(grad.numpy(), float(lr))
            return
        self.step += 1
        if self.clip:
            clip(grad, self.clip)
        if self.kind == "adam":
            # The kernel behind torch.optim.Adam(fused=True); its Python wrapper costs as much as the kernel here.
            torch._fused_adam_(
                [self.data], [grad], [self.m], [self.v], [], [self.step],
                lr=lr, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=self.eps, amsgrad=False, maximize=False,
            )  # fmt: skip
        elif self.kind == "rmsprop":
            self.v.mul_(0.95).addcmul_(grad, grad, value=0.05)
            self.data.sub_(grad / self.v.sqrt().add_(self.eps) * lr)
        elif self.momentum:
            self.data.sub_(self.m.mul_(self.momentum).add_(grad) * lr)
        else:
            self.data.sub_(grad * lr)

    def state(self) -> State:
        return {"step": self.step, "m": self.m, "v": self.v}

    def load_state(self, state: State) -> None:
        for name in ("step", "m", "v"):
            getattr(self, name).copy_(state[name])
