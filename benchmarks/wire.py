"""A push and a pull of the Nature network's parameters (6.76 MB), without applying them: our wire against Ray's own transfer.

    python benchmarks/wire.py

Both to one server process on this machine, medians of 41 calls each. Ray: an array as an argument; an array as a result; and the best it can do for a
pull, a reference to an object that was put once for all readers. And the all-reduce of two processes by Gloo beside a gradient of that network, batch 32, one thread: what overlapping
the two could save at most.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import check, median, record

SIZE = 1_690_000


def serve(port: Any) -> None:
    from qfleet.sync.wire import Listener

    params = np.zeros(4 * SIZE, np.uint8)

    async def push(args: list[Any], arrays: list[Any]) -> Any:
        return len(arrays[0]), ()

    async def pull(args: list[Any], arrays: list[Any]) -> Any:
        return None, [params]

    async def run() -> None:
        port.put(Listener({"push": push, "pull": pull}, "token", "127.0.0.1").port)
        await asyncio.Event().wait()

    asyncio.run(run())


def reduce(rank: int, store: str, out: Any) -> None:
    """Two of these. The first one says how long it took."""
    import torch
    import torch.distributed as dist
    from sync_speed import config_of, filled, spec_of

    from qfleet.config import override
    from qfleet.learner import Learner
    from qfleet.sync.allreduce import Reduced

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = override(config_of({}), {"learner.batch_size": 32})
    learner, replay, mean = Learner(config, spec_of(), torch.device("cpu")), filled(config), Reduced()

    def gradient() -> None:
        batch = replay.sample(0, 1, 1.0, 32)
        learner.grads(batch, learner.targets(batch, 0), 0)

    got = milliseconds(gradient), milliseconds(lambda: mean(learner.grad, 32))
    if rank == 0:
        out.put(got)
    dist.barrier()


def milliseconds(call: Callable[[], Any], repeats: int = 41) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times) * 1e3


def main() -> None:
    import ray

    from qfleet.runtime.resources import FAIR
    from qfleet.sync.wire import Connection

    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    server = context.Process(target=serve, args=(port,), daemon=True)
    server.start()
    ours = Connection(("127.0.0.1", port.get()), "token")
    array = np.random.default_rng(0).standard_normal(SIZE, np.float32)
    small = array[:17_000]
    quiet: dict[str, Any] = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    ray.init(address="local", num_cpus=4, _system_config=FAIR, **quiet)

    class Actor:
        def __init__(self) -> None:
            self.array = np.zeros(SIZE, np.float32)
            self.shared = [ray.put(self.array)]

        async def push(self, array: Any) -> int:
            return len(array)

        async def pull(self) -> Any:
            return self.array

        async def pull_shared(self) -> Any:
            return self.shared

    actor: Any = ray.remote(num_cpus=0)(Actor).remote()
    ray.get(actor.pull.remote())
    rows = {
        "push, ours": lambda: ours("push", [], [array.view(np.uint8)]).receive(),
        "push, Ray": lambda: ray.get(actor.push.remote(array)),
        "pull, ours": lambda: ours("pull").receive(),
        "pull, Ray, an array": lambda: ray.get(actor.pull.remote()),
        "pull, Ray, a shared object": lambda: ray.get(ray.get(actor.pull_shared.remote())[0]).sum,
        "push of 68 kB, ours": lambda: ours("push", [], [small.view(np.uint8)]).receive(),
        "push of 68 kB, Ray": lambda: ray.get(actor.push.remote(small)),
    }
    got = {name: milliseconds(call) for name, call in rows.items()}
    with tempfile.TemporaryDirectory() as folder:
        pair = [context.Process(target=reduce, args=(rank, f"{folder}/store", port), daemon=True) for rank in range(2)]
        for process in pair:
            process.start()
        got["a gradient, batch 32"], got["all-reduce, two processes"] = port.get()
        for process in pair:
            process.join()
    for name, ms in got.items():
        print(f"{name:28s} {ms:6.2f} ms")
    ratios = {
        "push": got["push, ours"] / got["push, Ray"],
        "pull": got["pull, ours"] / min(got["pull, Ray, an array"], got["pull, Ray, a shared object"]),
    }
    print(f"ours / Ray: push {ratios['push']:.2f}, pull {ratios['pull']:.2f} (against the faster of Ray's)")
    record("wire", {"milliseconds": got, "ratios": ratios})
    ours.close()
    server.terminate()
    check([f"{what} takes {ratio:.2f} times as long as Ray's, of 1.5" for what, ratio in ratios.items() if ratio > 1.5])


if __name__ == "__main__":
    main()
