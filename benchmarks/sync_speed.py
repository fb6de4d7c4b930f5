"""Samples per second of two learners on the Nature network, batch 256, one of them slowed, in every way to agree.

    python benchmarks/sync_speed.py [--seconds 40] [--warm 15] [--repeats 3] [--only slowed]

Real learners (their gradient, one thread each) in processes of their own, a replay of random frames, one parameter server in a process of its
own. "Slowed by 4": after every gradient it sleeps three times as long as that took. "Stalls": one of two equal learners sleeps 2 s every 30 s. The limit is
what the two do side by side, each with its own optimiser and without any synchronisation, under the same slowing. Rates are those after `--warm` seconds; the plot shows them
second by second.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import queue
import time
from typing import Any

import numpy as np
from common import RESULTS, check, median, record

FRAMES, COLUMNS = 2000, 2


def config_of(sync: dict[str, Any]) -> Any:
    from qfleet.config import override
    from qfleet.recipes import make

    settings = {f"sync.{name}": value for name, value in sync.items()}
    more = {"learners": 2, "replay.capacity": FRAMES * COLUMNS, "env.num_envs": COLUMNS, "learner.batch_size": 256}
    return override(make("double", "pong"), {**more, "learner.threads": 1, "sync.transport": "server", **settings})


def spec_of() -> Any:
    from qfleet.types import Spec

    return Spec(obs_shape=(84, 84), obs_dtype="uint8", num_actions=6, frame_stack=4)


def filled(config: Any, seed: int = 0) -> Any:
    """A replay of random frames."""
    import torch

    from qfleet.replay import Replay
    from qfleet.types import Step

    replay = Replay(config, spec_of(), torch.device("cpu"), seed=seed)
    g = torch.Generator().manual_seed(seed)
    shape = (FRAMES, COLUMNS)
    no = torch.zeros(shape, dtype=torch.bool)
    frames = torch.randint(0, 256, (*shape, 84, 84), generator=g, dtype=torch.uint8)
    replay.extend(Step(frames, torch.randint(0, 6, shape, generator=g), torch.randn(shape, generator=g), no, no, no))
    return replay


def serve(sync: dict[str, Any], port: Any) -> None:
    import torch

    from qfleet.learner import Learner
    from qfleet.sync.server import Server
    from qfleet.sync.wire import Listener

    torch.set_num_threads(1)

    async def run() -> None:
        config = config_of(sync)
        initial = Learner(config, spec_of(), torch.device("cpu")).flat.data.numpy()
        server = Server(config, initial)
        port.put(Listener(server.handlers(), "token", "127.0.0.1").port)
        await asyncio.Event().wait()

    asyncio.run(run())


def work(rank: int, sync: dict[str, Any], address: Any, slow: float, stall: bool, begin: Any, seconds: float, out: Any) -> None:  # fmt: skip
    import torch

    from qfleet.learner import Learner
    from qfleet.sync.client import Client

    torch.set_num_threads(1)
    config = config_of(sync)
    learner = Learner(config, spec_of(), torch.device("cpu"))
    replay = filled(config, rank)
    pushed: list[tuple[float, int]] = []  # when, samples
    stalls = 0
    if address is not None:
        client = Client(config, rank, 0, len(learner.flat.data), lambda epoch, why: (epoch + 1, [address]), "token")
        client.attach(learner)
    agree = learner.sync

    def slowed(grad: Any, samples: int) -> None:
        nonlocal stalls
        now = time.perf_counter()
        if slow > 1:
            time.sleep((slow - 1) * (now - max(back[0], learner.began)))
        if stall and now - started > 30 * (stalls + 0.5):
            stalls += 1
            time.sleep(2.0)
        if agree is None:
            learner.apply(grad)
        else:
            agree(grad, samples)
        back[0] = time.perf_counter()
        pushed.append((back[0] - started, samples))

    learner.sync = slowed
    begin.wait()
    started = time.perf_counter()
    back = [started]
    while time.perf_counter() - started < seconds:
        learner.learn(replay, 1)
    if address is not None:
        client.leave()
    out.put((rank, pushed))


def run(sync: dict[str, Any], slow: float, stall: bool, seconds: float) -> list[list[tuple[float, int]]]:
    """-> what each learner did, and when."""
    context = multiprocessing.get_context("spawn")
    port, out, begin = context.Queue(), context.Queue(), context.Barrier(2)
    address, server = None, None
    if sync["mode"] != "alone":
        server = context.Process(target=serve, args=(sync, port), daemon=True)
        server.start()
        address = ("127.0.0.1", port.get())
    else:
        sync = {"mode": "sync"}
    processes = [
        context.Process(target=work, args=(r, sync, address, slow if r else 1.0, stall and r == 1, begin, seconds, out))
        for r in range(2)
    ]
    for process in processes:
        process.start()
    found = dict[int, list[tuple[float, int]]]()
    while len(found) < len(processes):
        try:
            rank, pushed = out.get(timeout=1.0)
            found[rank] = pushed
        except queue.Empty:
            if failed := [process for process in processes if process.exitcode]:
                raise SystemExit(f"{len(failed)} of the learners failed") from None
    for process in processes:
        process.join()
    if server is not None:
        server.terminate()
    return [found[r] for r in range(2)]


def rate(done: list[tuple[float, int]], warm: float, seconds: float) -> float:
    return sum(n for when, n in done if warm < when <= seconds) / (seconds - warm)


MODES: dict[str, dict[str, Any]] = {
    "no synchronisation": {"mode": "alone"},
    "async": {"mode": "async"},
    "window": {"mode": "window"},
    "ssp, balanced": {"mode": "ssp", "balance": True},
    "sync, balanced": {"mode": "sync", "balance": True},
    "ssp": {"mode": "ssp"},
    "sync": {"mode": "sync"},
}


BARS = {  # shares to be reached
    ("one slowed by 4", "async"): 0.9,
    ("one slowed by 4", "window"): 0.9,
    ("one slowed by 4", "ssp, balanced"): 0.8,
    ("one slowed by 4", "sync, balanced"): 0.8,
    ("one stalls 2 s every 30 s", "ssp"): 0.9,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm", type=float, default=15.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["slowed", "stalls"], help="one half; nothing is drawn")
    args = parser.parse_args()
    curves, missed = dict[str, dict[str, Any]](), list[str]()
    slowed = ("one slowed by 4", 4.0, False, args.seconds, list(MODES))
    some = ["no synchronisation", "ssp", "sync"]
    stalls = ("one stalls 2 s every 30 s", 1.0, True, max(args.seconds, 60.0 + args.warm), some)
    halves = {"slowed": (slowed,), "stalls": (stalls,), None: (slowed, stalls)}
    for title, slow, stall, seconds, modes in halves[args.only]:
        rates: dict[str, list[list[float]]] = {name: [] for name in modes}
        curves[title] = {}
        for _ in range(args.repeats):
            for name in modes:
                done = run(MODES[name], slow, stall, seconds)
                rates[name].append([rate(d, args.warm, seconds) for d in done])
                curves[title][name] = [np.bincount([int(t) for t, _ in d], [n for _, n in d], int(seconds) + 1)[: int(seconds)].tolist() for d in done]  # fmt: skip
                print(f"{title}: {name:20s} {rates[name][-1][0]:7.1f} + {rates[name][-1][1]:7.1f} samples/s", flush=True)  # fmt: skip
        limit = median([sum(r) for r in rates["no synchronisation"]])
        for name in modes:
            share = [sum(r) / sum(base) for r, base in zip(rates[name], rates["no synchronisation"], strict=True)]
            print(f"{title}: {name:20s} {median([sum(r) for r in rates[name]]):7.1f} samples/s = {median(share):.2f} of {limit:.1f}", flush=True)  # fmt: skip
            if (bar := BARS.get((title, name))) is not None:
                missed += [f"{title}: {name} {median(share):.2f} of {bar}"] * (median(share) < bar)
            record("sync_speed", {"what": title, "mode": name, "samples_per_second": rates[name], "share": median(share), "shares": share})  # fmt: skip
    if args.only is None:
        draw(curves)
    check(missed)


def draw(curves: dict[str, dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(12, 4))
    for axis, (title, modes) in zip(axes, curves.items(), strict=True):
        for name, (first, second) in modes.items():
            both = np.array(first) + np.array(second)
            smooth = np.convolve(both, np.ones(5) / 5, mode="valid")
            axis.plot(np.arange(len(smooth)) + 2.5, smooth, label=name)
        axis.set(title=f"two learners, {title}", xlabel="seconds", ylabel="samples/s", ylim=(0, None))
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(RESULTS / "sync_speed.png", dpi=80)


if __name__ == "__main__":
    main()
