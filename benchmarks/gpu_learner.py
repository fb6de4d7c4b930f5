"""The learner alone on one GPU: whole updates (draw, gather, targets, loss, backward, Adam), Nature network, double DQN, n = 3.

    python benchmarks/gpu_learner.py [--batch 32 256 1024] [--recipe rainbow] [--profile]

Ours by hand and by autograd (both recorded as one graph), uniform and prioritised, each on a replay of 1M steps on the GPU, in turn; after them
the same update as one would write it today, compiled by torch.compile and recorded: bf16 autocast, channels last, plain
convolutions, torch.optim.Adam(fused, capturable), frames gathered by index. The limit is the time in which the bytes that
an update cannot avoid (frames, activations once written and once read in each pass, parameters) cross the memory at its
measured bandwidth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from common import interruptible, median, record
from torch import Tensor, nn

DEVICE = torch.device("cuda")
ENVS, CAPACITY = 512, 1_000_000


def filled(config: Any, spec: Any) -> Any:
    from qfleet.replay import Replay
    from qfleet.types import Step

    replay = Replay(config, spec, DEVICE)
    g = torch.Generator(DEVICE).manual_seed(0)
    shape = (100, ENVS)
    for _ in range(CAPACITY // ENVS // 100 + 2):
        ended = torch.rand(shape, device=DEVICE, generator=g) < 0.001
        rows = (
            torch.randint(0, 256, (*shape, 84, 84), dtype=torch.uint8, device=DEVICE, generator=g),
            torch.randint(0, 6, shape, device=DEVICE, generator=g),
            torch.randn(shape, device=DEVICE, generator=g),
            ended, torch.zeros_like(ended), ended.roll(1, 0),
        )  # fmt: skip
        replay.extend(Step(*rows))
    return replay


def rate(update: Callable[[], Any], updates: int = 300, repeats: int = 7) -> float:
    """Updates per second, the median of some runs."""
    return in_turn({"": update}, updates, repeats)[""]


def in_turn(contestants: dict[str, Callable[[], Any]], updates: int = 300, repeats: int = 7) -> dict[str, float]:
    """Updates per second of each, medians: they take turns, so that all see the same GPU."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, update in contestants.items():
            update()  # not counted
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(updates):
                update()
            torch.cuda.synchronize()
            rates[name].append(updates / (time.perf_counter() - began))
    return {name: median(found) for name, found in rates.items()}


def ours(batch: int, prioritized: bool = False, by_hand: bool = True, recipe: str = "double", more: Sequence[str] = ()) -> Callable[[], Any]:  # fmt: skip
    """A recorded update, with a replay of its own."""
    from qfleet import recipes
    from qfleet.captured import CapturedLearner
    from qfleet.config import override
    from qfleet.types import Spec

    spec = Spec(obs_shape=(84, 84), obs_dtype="uint8", num_actions=6, frame_stack=4)
    settings = {
        "env.num_envs": ENVS, "replay.capacity": CAPACITY, "learner.batch_size": batch,
        "learner.n_step": 3, "learner.precision": "bf16", "learner.target_interval": 1_000_000,
    }  # fmt: skip
    if prioritized:
        settings["replay.prioritized"] = True
    settings |= dict(item.split("=", 1) for item in more)
    config = override(recipes.make(recipe, "pong", gpu=True), settings)
    before = torch.cuda.memory_allocated()
    replay = filled(config, spec)
    gigabytes = (torch.cuda.memory_allocated() - before) / 1e9
    print(f"  replay of {CAPACITY:,} steps: {gigabytes:.3f} GB on the GPU", flush=True)
    record("gpu_learner", {**about(), "what": "replay", "prioritized": prioritized, "steps": CAPACITY, "gigabytes": gigabytes})  # fmt: skip
    learner = CapturedLearner(config, spec, DEVICE)
    if not by_hand:
        learner.by_hand, learner.low = False, None
    learner.prepare(replay)
    step = learner._step
    assert step is not None
    if step.why_not:
        print(f"  not recorded: {step.why_not}")
    learner._lr.fill_(1e-4)
    learner._beta.fill_(0.5)

    def update(kept: object = (learner, replay)) -> None:  # a graph does not keep what it reads
        step()

    return update


def about() -> dict[str, Any]:
    return {"gpu": torch.cuda.get_device_name()}


def show_kernels(step: Callable[[], Any], updates: int = 20) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(updates):
            step()
        torch.cuda.synchronize()
    kernels = sorted((e for e in seen.key_averages() if e.device_time_total), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in kernels)
    print(
        f"  {sum(e.count for e in kernels) / updates:.0f} kernels an update, {total / updates:.0f} µs if one after the other"
    )
    for e in kernels[:25]:
        print(f"  {e.device_time_total / updates:8.1f} µs x{e.count / updates:3.0f}  {e.key[:90]}")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        q: Tensor = self.layers((x.to(torch.bfloat16) / 255.0).contiguous(memory_format=torch.channels_last))
        return q


def compiled(batch: int) -> Callable[[], Any]:
    """The peer, recorded."""
    frames = torch.randint(0, 256, (CAPACITY, 84, 84), dtype=torch.uint8, device=DEVICE)
    action = torch.randint(0, 6, (CAPACITY,), device=DEVICE)
    reward, done = torch.randn(CAPACITY, device=DEVICE), torch.rand(CAPACITY, device=DEVICE) < 0.001
    online, target = (Plain().to(DEVICE, memory_format=torch.channels_last) for _ in range(2))  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, fused=True, capturable=True)
    offsets, steps = torch.arange(-3, 1, device=DEVICE), torch.arange(3, device=DEVICE)
    gammas = 0.99**steps

    def loss() -> Tensor:
        at = torch.randint(4, CAPACITY - 4, (batch,), device=DEVICE)
        obs, after = frames[at[:, None] + offsets], frames[at[:, None] + offsets + 3]
        ended = done[at[:, None] + steps]
        alive = 1.0 - (ended.float().cumsum(1) - ended.float()).clamp(max=1.0)
        returns = (reward[at[:, None] + steps].clamp(-1, 1) * alive * gammas).sum(1)
        with torch.autocast("cuda", torch.bfloat16):
            with torch.no_grad():
                best = online(after).argmax(1, keepdim=True)
                value = target(after).gather(1, best).squeeze(1).float()
            q = online(obs).gather(1, action[at].unsqueeze(1)).squeeze(1).float()
        goal = returns + 0.99**3 * (1.0 - ended.any(1).float()) * value
        return F.smooth_l1_loss(q, goal)

    fast = torch.compile(loss)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        fast().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(online.parameters(), 10.0, foreach=True)
        optimizer.step()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(5):
            update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()

    def again(kept: object = update) -> None:  # a graph does not keep what it reads
        graph.replay()

    return again


def limit(batch: int, bandwidth: float) -> float:
    """Updates per second if only unavoidable bytes counted: see the module's text."""
    frames = 2 * batch * 4 * 84 * 84
    activations = 2 * batch * (20 * 20 * 32 + 9 * 9 * 64 + 7 * 7 * 64 + 512)  # bf16, one network, one batch
    passes = activations * 2 * 3 + activations * 3  # written and read in three forward passes; backward
    parameters = 1_690_000 * (4 * 7 + 2)  # Adam: read p, g, m, v; write p, m, v and the bf16 copy
    return bandwidth / (frames + passes + parameters)


def copy_bandwidth() -> float:
    a = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return rate(lambda: b.copy_(a), 20) * 2 * a.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[32, 256, 1024])
    parser.add_argument("--recipe", help="this one alone")
    parser.add_argument("--profile", action="store_true", help="show the kernels of an update")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE", help="with --recipe")
    parser.add_argument("--no-peer", action="store_true", help="leave torch.compile out")
    parser.add_argument("--peer", action="store_true", help="torch.compile alone")
    args = parser.parse_args()
    interruptible()
    bandwidth = copy_bandwidth()
    print(f"memory {bandwidth / 1e12:.2f} TB/s", flush=True)
    for batch in () if args.peer else args.batch:
        if args.recipe:
            step = ours(batch, recipe=args.recipe, more=args.set)
            made = {args.recipe: step}
        else:
            step = ours(batch)
            made = {"by hand": step, "prioritised": ours(batch, prioritized=True), "autograd": ours(batch, by_hand=False)}  # fmt: skip
        if args.profile:
            show_kernels(step)
        say(batch, in_turn(made), bandwidth)
        del step, made
        torch.cuda.empty_cache()
    for batch in (
        () if args.no_peer or args.recipe else args.batch
    ):  # after all of ours: each compiles for half a minute
        say(batch, {"torch.compile": rate(compiled(batch))}, bandwidth)
        torch.cuda.empty_cache()


def say(batch: int, rates: dict[str, float], bandwidth: float) -> None:
    """Printed and recorded as soon as it is known."""
    most = limit(batch, bandwidth)
    for name, updates in rates.items():
        print(f"batch {batch:5d}  {name:14s} {updates:9,.0f} updates/s = {updates * batch:11,.0f} samples/s; limit {most:,.0f} updates/s", flush=True)  # fmt: skip
        record("gpu_learner", {**about(), "what": name, "batch": batch, "updates_per_second": updates, "bandwidth_limit": most})  # fmt: skip
    if "prioritised" in rates:
        print(f"batch {batch:5d}  prioritised costs {rates['by hand'] / rates['prioritised'] - 1:.1%} more", flush=True)


if __name__ == "__main__":
    main()
