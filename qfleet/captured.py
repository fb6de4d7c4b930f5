"""The learner on a GPU: one update is one graph, from the draw to the new priorities; the host is at most a round ahead.

Whatever changes from update to update (its number, learning rate, beta) lives in a tensor that the graph reads. Three kinds
of update, with the same numbers up to rounding: kernels by hand where the network is a Nature network with scalar outputs
(kernels/nature.py); for every other head behind its convolutions the functions of learner.py, differentiated by autograd, on
networks in low precision (kernels/encoder.py); and for everything else the same functions on the network itself.

With several learners the graph ends with the gradient: then they agree, and the parameters are what comes of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qfleet import kernels, networks
from qfleet.config import Config
from qfleet.device import Branches, Captured, Mark, pinned, tensor_cores
from qfleet.learner import Draws, Flat, Learned, Learner
from qfleet.losses import Loss
from qfleet.networks import QNetwork
from qfleet.replay import Replay
from qfleet.replay.device import LARGEST, Drawn, Sampler
from qfleet.types import Batch, Spec, State

LOW = torch.bfloat16
PIXELS = (21, 21, 64)  # of an observation after space-to-depth, as kernels/ read it


class CapturedLearner(Learner):
    """`why_no_kernels`: those of Triton were tried, and failed."""

    def __init__(self, config: Config, spec: Spec, device: torch.device, why_no_kernels: str = "") -> None:
        super().__init__(config, spec, device)
        self._why_no_kernels = why_no_kernels or kernels.why_not(device)
        self.kernels = not self._why_no_kernels
        encoder = self.kernels and has_encoder(config, spec)
        self.by_hand = encoder and suits(config, spec)
        self._agrees = config.learners > 1
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._lr, self._beta, self._q_mean = (torch.zeros(1, device=device) for _ in range(3))
        self._loss_sum = torch.zeros(1, dtype=torch.float64, device=device)
        # The parameters as the products read them, written by the optimiser's kernel.
        self.low: Tensor | None = None
        self._target_low: Tensor | None = None
        self._low_grad: Tensor | None = None
        if self.by_hand:
            self.low, self._target_low = self.flat.data.to(LOW), self.target.data.to(LOW)
        elif encoder:
            self._compute_low(LOW)
        self._branches = Branches(device, 1)
        self._step: Captured | None = None
        self._sampler: Sampler | None = None
        self._reports = [Report(device), Report(device)]  # in turn; the second one is on its way, or empty
        self._reported = 0.0

    def _compute_low(self, dtype: torch.dtype) -> None:
        """Differentiate networks in low precision, whose convolutions are kernels, instead of casting as we go."""
        from qfleet.kernels import optimizer

        (self._online, online), (self._frozen, frozen) = self.low_net(dtype), self.low_net(dtype)
        self.low, self._target_low, self._low_grad = online.data, frozen.data, online.bind_grad()
        self.low.copy_(self.flat.data)
        self._target_low.copy_(self.target.data)
        for p in frozen.named.values():
            p.requires_grad_(False)
        self._pixels = self.low.new_zeros(2 * self.config.learner.batch_size, *PIXELS)
        self._square = torch.zeros(optimizer.programs(self.low.numel(), 0), device=self.device)

    def low_net(self, dtype: torch.dtype) -> tuple[QNetwork, Flat]:
        """A network that reads pixels as the `gather` kernel writes them."""
        from qfleet.kernels.encoder import Encoder

        net = networks.build(self.config, self.spec).to(self.device).eval()
        net.blocks[0] = Encoder(net.blocks[0])  # type: ignore[arg-type]
        return net, Flat(net, self.device, dtype)

    def notes(self) -> list[str]:
        if self.device.type == "cpu":
            return []
        notes = []
        if self._step is not None and self._step.why_not:
            notes.append(f"updates could not be recorded, and are launched kernel by kernel, which is slower ({self._step.why_not})")  # fmt: skip
        if self._why_no_kernels:
            notes.append(f"updates use plain torch operations, which are slower: Triton's do not work here ({self._why_no_kernels})")  # fmt: skip
        return notes

    def learn(self, source: Replay, updates: int, beta: float = 1.0) -> Learned | None:  # type: ignore[override]
        """Queue that many updates; -> what the call before this one did."""
        if self._step is None:
            self.prepare(source)
        assert self._step is not None
        self._lr.fill_(self.lr)
        self._beta.fill_(beta)
        if self._agrees:
            updates = self._agree(updates)
        else:
            self._queue(updates)
        now, before = self._reports
        self._reports = [before, now]
        now.queue(self._loss_sum, self._q_mean, updates)
        return self._read(before)

    def _queue(self, updates: int) -> None:
        assert self._step is not None
        for _ in range(updates):
            self._step()
            self.updates += 1
            if self.updates % self.config.learner.target_interval == 0:
                self.refresh_target()
                if self._target_low is not None:
                    self._target_low.copy_(self.target.data)

    def _agree(self, updates: int) -> int:
        """-> how many it made itself."""
        assert self._step is not None and self.sync is not None
        self.moved()
        made, end, next_one = 0, self.updates + updates, -1
        while self.updates < end:
            if self.updates != next_one:  # others made some
                self._counter.fill_(self.updates)
            made, next_one = made + 1, self.updates + 1
            self.began = time.perf_counter()
            self._step()
            with torch.no_grad():
                self.sync(self.grad, self.batch_size)
            self.moved()
        return made

    def flush(self) -> Learned | None:
        return self._read(self._reports[1])

    def _read(self, report: Report) -> Learned | None:
        """What it says and no earlier one said. This wait keeps the host from running ahead of the device."""
        updates, report.updates = report.updates, 0
        if not updates:
            return None
        began = time.perf_counter()
        total, q_mean = report.read()
        self.wait_seconds += time.perf_counter() - began
        learned = Learned(total - self._reported, q_mean, updates)
        self._reported = total
        return learned

    def prepare(self, source: Replay) -> None:
        """Compile and record the update. What it computes on the way is undone, so the replay may be empty."""
        self._sampler = source.on_device(self.config.learner.batch_size, self.kernels)
        changed = [self.flat.data, self.target.data, *self.flat.buffers, self._counter, self._loss_sum, self._q_mean]
        changed += [self.optimizer.m, self.optimizer.v, self.optimizer.step, *self._sampler.changed]
        if self.low is not None:
            changed.append(self.low)
        self._step = Captured(self._handmade(self._sampler) if self.by_hand else self._update, changed, self.device)

    def _handmade(self, sampler: Sampler) -> Callable[[], None]:
        from qfleet.kernels import nature

        assert self.low is not None and self._target_low is not None
        buffers = nature.Buffers(
            self.flat.data, self.low, self.target.data, self._target_low, self.grad, self.optimizer.m, self.optimizer.v,
            self._counter, self._lr, self._beta, self._loss_sum, self._q_mean,
        )  # fmt: skip
        return nature.Update(self.config, self.flat.places, buffers, sampler, apply=not self._agrees)

    def _update(self) -> None:
        """One update by autograd."""
        assert self._sampler is not None
        grad = self.grad if self._low_grad is None else self._low_grad
        with torch.no_grad():
            batch = self._batch(self._sampler, self._sampler.draw(self._counter, self._beta))
            draws = self._draws(self._counter, len(batch.action))
        grad.zero_()
        out, raw = self._loss_of(batch, draws) if self._low_grad is None else self._loss_low(batch, draws)
        with torch.no_grad():
            self._sampler.update(batch.id, out.priority)
            self._counter += 1
            if not self._agrees:
                self._optimize(grad)
            elif grad is not self.grad:
                self.grad.copy_(grad)
            self._loss_sum += out.loss
            self._q_mean.copy_(self.net.values(raw.float()).gather(1, batch.action.unsqueeze(1)).mean())

    def _loss_of(self, batch: Batch, draws: Draws) -> tuple[Loss, Tensor]:
        """Loss and prediction; the gradient is added up."""
        with torch.no_grad():
            target = self._targets(batch, draws)
        out, raw = self._loss(batch, target, draws)
        out.loss.backward()  # type: ignore[no-untyped-call]
        return out, raw

    def _loss_low(self, batch: Batch, draws: Draws) -> tuple[Loss, Tensor]:
        """The same with networks that we know: the targets are computed beside the prediction."""
        with tensor_cores():
            with torch.no_grad(), self._branches(0):
                target = self._targets(batch, draws)
            raw = self._predict(batch, draws)
            self._branches.join()
            out = self._compare(raw, batch, target, draws)
            out.loss.backward()  # type: ignore[no-untyped-call]
        return out, raw

    def _batch(self, sampler: Sampler, drawn: Drawn) -> Batch:
        if self._low_grad is None:
            return sampler.batch(drawn)
        from qfleet.replay import device_kernels

        device_kernels.gather(sampler.frames, drawn.frames, self._pixels, self.spec.frame_stack)
        obs, next_obs = self._pixels.chunk(2)
        return Batch(obs, drawn.action, drawn.reward, drawn.discount, next_obs, drawn.id, drawn.weight)

    def _optimize(self, grad: Tensor) -> None:
        c = self.config.learner
        if self.low is not None and c.optimizer == "adam":
            from qfleet.kernels import optimizer

            optimizer.squares(grad, self._square)
            optimizer.adam(
                self.flat.data, grad, self.optimizer.m, self.optimizer.v, self.low, self._square, self._counter, self._lr,
                clip=c.grad_clip, eps=c.adam_eps, decay=c.weight_decay,
            )  # fmt: skip
            return
        self.optimizer(self.grad.copy_(grad), self._lr)
        if self.low is not None:
            self.low.copy_(self.flat.data)

    def precision(self) -> torch.autocast:
        return super().precision() if self._low_grad is None else torch.autocast(self.device.type, enabled=False)

    def moved(self) -> None:
        if self.low is not None and self._target_low is not None:
            self.low.copy_(self.flat.data)
            self._target_low.copy_(self.target.data)

    def state(self) -> State:
        if not self._agrees:
            self.optimizer.step.fill_(self.updates)
        return super().state()

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._counter.fill_(self.updates)
        self.moved()


class Report:
    """Two numbers on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.zeros(2, dtype=torch.float64, device=device)
        self._host = pinned((2,), torch.float64, device)
        self._arrived = Mark(device)
        self.updates = 0  # 0: nothing to read

    def queue(self, loss_sum: Tensor, q_mean: Tensor, updates: int) -> None:
        self._device[:1] = loss_sum
        self._device[1:] = q_mean
        self._host.copy_(self._device, non_blocking=True)
        self._arrived.record()
        self.updates = updates

    def read(self) -> tuple[float, float]:
        self._arrived.wait()
        total, q_mean = self._host.tolist()
        return total, q_mean


def has_encoder(config: Config, spec: Spec) -> bool:
    """Is the encoder the one of kernels/encoder.py?"""
    return (
        config.network.kind in ("auto", "nature")
        and (spec.obs_shape, spec.obs_dtype, spec.frame_stack) == ((84, 84), "uint8", 4)
        and config.learner.precision == "bf16"
        and config.learner.compile != "on"
        and config.learner.batch_size <= LARGEST
    )


def suits(config: Config, spec: Spec) -> bool:
    """Can kernels/nature.py do what is behind the encoder?"""
    n, c = config.network, config.learner
    return (
        n.dist == "scalar"
        and not (n.dueling or n.noisy)
        and len(n.hidden) == 1
        and n.hidden[0] % 128 == 0
        and spec.num_actions <= 32
        and c.optimizer == "adam"
    )


class Best:
    """Greedy actions of groups of environments on the device, with a copy of the parameters that `publish` renews."""

    def __init__(self, learner: CapturedLearner, net: QNetwork, sizes: Sequence[int]) -> None:
        self._learner, self._net = learner, net
        self._low: Tensor | None = None
        if learner.low is None:
            return
        self._inputs = [learner.low.new_zeros(size, *PIXELS) for size in sizes]
        self._frames = [torch.arange(4 * size, device=learner.device) for size in sizes]
        if not learner.by_hand:
            self._net, flat = learner.low_net(learner.low.dtype)
            self._low = flat.data
            return
        from qfleet.kernels import nature

        self._low = learner.low.clone()
        params = nature.Params.of(self._low, learner.flat.places)
        self._forwards = [nature.Forward(params, params, size) for size in sizes]

    def publish(self) -> None:
        if self._low is not None and self._learner.low is not None:
            self._low.copy_(self._learner.low)

    @torch.no_grad()
    def __call__(self, group: int, stack: Tensor, noise: Tensor | None, action: Tensor) -> None:
        if self._low is None:
            with self._learner.precision():
                action.copy_(self._net.q(stack, noise).argmax(1))
            return
        from qfleet.kernels import head
        from qfleet.replay import device_kernels

        x = self._inputs[group]
        device_kernels.gather(stack.flatten(0, 1), self._frames[group], x, 4)
        if not self._learner.by_hand:
            with tensor_cores():
                action.copy_(self._net.q(x, noise).argmax(1))
            return
        forward = self._forwards[group]
        forward(x)
        head.greedy(forward.h, forward.last, action)
