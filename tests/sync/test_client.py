"""Workers in threads and servers in an event loop: pushes, waits and pulls as on a cluster, without one."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fleet import BATCH, SIZE, Games, Problem, config_of, learned, learner_of, sync_of

from qfleet.config import Config
from qfleet.runtime.actors import ServerActor
from qfleet.sync.client import Client
from qfleet.sync.policies import Commit, Key, Outcome, Push
from qfleet.sync.server import Server
from qfleet.sync.shard import Copy, Position, ranges
from qfleet.sync.traffic import rates
from qfleet.sync.wire import Connection, Listener, Peer, Unreachable, WireError

CLOCKS = 100
LIMIT = 60.0  # seconds, where somebody may wait for ever


class Pupil:
    """A learner as far as a client knows it."""

    def __init__(self, config: Config, size: int) -> None:
        self.config, self.lr, self.updates = config, config.learner.lr, 0
        self.batch_size, self.began = config.learner.batch_size, 0.0
        self.flat, self.target = Buffer(size), Buffer(size)
        self.sync: Callable[[torch.Tensor, int], None] = lambda grad, samples: None

    @property
    def parameters(self) -> torch.Tensor:
        return self.flat.data

    def optimize(self, grad: torch.Tensor) -> None:
        self.flat.data.sub_(grad * self.lr)
        self.updates += 1

    def freeze(self, parameters: torch.Tensor) -> None:
        self.target.data.copy_(parameters)


class Buffer:
    def __init__(self, size: int) -> None:
        self.data = torch.zeros(size)


class Running:
    """Servers in a loop on a thread of their own."""

    def __init__(self, config: Config, initial: torch.Tensor) -> None:
        self.config, self.size = config, len(initial)
        self.loop = asyncio.new_event_loop()
        self.clients, self.closed = list[Client](), False
        self._moved, self._epoch = threading.Condition(), 0
        self.may_return = [threading.Event() for _ in range(config.learners)]  # a worker, to servers that moved
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.servers = self.call(self._make(initial)).result()

    async def _make(self, initial: torch.Tensor) -> list[Server]:
        self.ranges = ranges(len(initial), self.config.sync.servers)
        first, *others = [Server(self.config, initial[r].numpy(), self._forward) for r in self.ranges]
        self._listen([first, *others])
        return [first, *others]

    def _forward(self, commits: Sequence[Commit], discarded: Sequence[Key], cut: int) -> None:
        for peer in self.peers:
            peer("carry_out", [commits, discarded, cut])

    def _listen(self, servers: Sequence[Server]) -> None:
        self.listeners = [Listener(server.handlers(), "token", "127.0.0.1") for server in servers]
        self.peers = [Peer(("127.0.0.1", listener.port), "token", lambda: None) for listener in self.listeners[1:]]

    async def _replace(self, number: int, copy: Copy) -> int:
        for listener in self.listeners:
            await listener.close()
        for peer in self.peers:
            peer.task.cancel()
        position, log = self.servers[0].shard.position, list(self.servers[0].shard.log)
        survivors = [server for i, server in enumerate(self.servers) if i != number]
        dropped = sum(server.catch_up(log, lost=True) for server in survivors)
        part = copy.part(self.ranges[number])
        self.servers[number] = Server(self.config, part.params, self._forward)
        self.servers[number].restore(part, position, {})
        self._listen(self.servers)
        return dropped

    def replace(self, number: int, copy: Copy) -> int:
        """A shard other than the first is lost, and begins with that copy, as on a cluster. -> pushes that were dropped"""
        dropped: int = self.call(self._replace(number, copy)).result(LIMIT)
        with self._moved:
            self._epoch += 1
            self._moved.notify_all()
        return dropped

    def until(self, true: Callable[[], object]) -> None:
        """Look between the servers' coroutines until it is."""

        async def look() -> None:
            while not true():
                await asyncio.sleep(0)

        self.call(look()).result(LIMIT)

    def call(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def client(self, worker: int, incarnation: int = 0) -> Client:
        def find(epoch: int, why: str) -> tuple[int, list[tuple[str, int]]]:
            with self._moved:
                self._moved.wait_for(lambda: self._epoch > epoch or self.closed, LIMIT)
            if self.closed:
                raise RuntimeError("the servers are closed")
            if epoch >= 0:
                self.may_return[worker].wait(LIMIT)
            return self._epoch, [("127.0.0.1", listener.port) for listener in self.listeners]

        made = Client(self.config, worker, incarnation, self.size, find, "token")
        self.clients.append(made)
        return made

    def counts(self) -> dict[str, float]:
        """Of all clients together."""
        every = [client.traffic.counts() for client in self.clients]
        return {name: sum(counts[name] for counts in every) for name in every[0]}

    @property
    def target(self) -> torch.Tensor:
        return torch.cat([server.shard.target for server in self.servers])

    @property
    def params(self) -> torch.Tensor:
        return torch.cat([server.shard.params for server in self.servers])

    def close(self) -> None:
        with self._moved:
            self.closed = True
            self._moved.notify_all()
        for event in self.may_return:
            event.set()
        for client in self.clients:
            client.close()

        async def end() -> None:
            for listener in self.listeners:
                await listener.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self.call(end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make(
        mode: str,
        servers: int = 1,
        learners: int = 3,
        learner: dict[str, Any] | None = None,
        initial: torch.Tensor | None = None,
        **sync: Any,
    ) -> Running:
        config = replace(config_of(**(learner or {})), sync=sync_of(mode, servers=servers, transport="server", **sync))
        config = replace(config, env=replace(config.env, num_envs=learners * 2), learners=learners)
        made.append(Running(config, Problem(torch.float32).initial if initial is None else initial))
        return made[-1]

    yield make
    for each in made:
        each.close()


def at_once(run: Callable[[int, Any], None], pupils: Sequence[Any]) -> None:
    """Each in a thread. Those that hang end when the fixture closes their connections."""
    pool = ThreadPoolExecutor(len(pupils))
    futures = [pool.submit(run, worker, pupil) for worker, pupil in enumerate(pupils)]
    pool.shutdown(wait=False)
    for future in futures:
        future.result(LIMIT)


def work(running: Running, workers: int, clocks: int = CLOCKS) -> list[Pupil]:
    """All workers at once, each in a thread, on the fixed batches."""
    problem = Problem(torch.float32)
    _, pupils = joined(running, workers)

    def run(worker: int, pupil: Pupil) -> None:
        for clock in range(clocks):
            rows = pupil.batch_size
            pupil.sync(problem.worker_grad(pupil.parameters, worker, clock, rows), rows)

    at_once(run, pupils)
    return pupils


def joined(on: Running, workers: int) -> tuple[list[Client], list[Pupil]]:
    clients, pupils = [on.client(w) for w in range(workers)], [Pupil(on.config, SIZE) for _ in range(workers)]
    for client, pupil in zip(clients, pupils, strict=True):
        client.attach(pupil)  # type: ignore[arg-type]
    return clients, pupils


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_workers_at_once_in_sync_are_one_learner(running: Callable[..., Running], servers: int) -> None:
    on = running("sync", servers)
    pupils = work(on, 3)
    expected = Problem(torch.float32).alone(config_of(), 3, CLOCKS)
    torch.testing.assert_close(on.params, expected, rtol=0, atol=2e-6)
    for pupil in pupils:
        assert torch.equal(pupil.parameters, on.params) and torch.equal(pupil.target.data, pupils[0].target.data)
        assert torch.equal(pupil.target.data, on.params)  # frozen every 10 clocks, and so after the last
    counts = on.counts()
    assert counts["sync/pushes"] == counts["sync/stale_0"] == 300 and not counts["sync/rejected"]


@pytest.mark.parametrize(
    ("learner", "codec"), [({}, {}), ({"momentum": 0.9, "lr": 0.02}, {"codec": "topk", "topk": 1.0})]
)
def test_real_learners_are_one_with_their_batches_together(
    running: Callable[..., Running], learner: dict[str, Any], codec: dict[str, Any]
) -> None:
    """In float32, whose sums depend on their order. With momentum: all of the vector is sent by top-k, which has the momentum in the optimiser's place."""
    config = config_of(**learner)
    on = running("sync", 2, learner=learner, initial=learner_of(config).flat.data, **codec)
    learners = [learner_of(on.config) for _ in range(3)]
    for worker, each in enumerate(learners):
        on.client(worker).attach(each)
    at_once(lambda worker, each: each.learn(Games(worker), CLOCKS), learners)
    expected = learned(config, 3, CLOCKS)
    for each in learners:
        torch.testing.assert_close(torch.stack((each.flat.data, each.target.data)), expected, rtol=0, atol=1e-5)


def test_batches_are_divided_by_given_weights(running: Callable[..., Running]) -> None:
    on = running("sync", 2, learners=2, weights=(3.0, 1.0))
    work(on, 2)
    expected = Problem(torch.float32).alone(config_of(), 2, CLOCKS, rows=[12, 4])
    torch.testing.assert_close(on.params, expected, rtol=0, atol=2e-6)


def test_batches_are_divided_by_measured_speed(running: Callable[..., Running]) -> None:
    """One needs three times as long for a sample. The sum stays what it is, and a gradient weighs as much as it has samples behind it."""
    on = running("sync", 2, learners=2, balance=True)
    clients, pupils = joined(on, 2)
    for client, cost in zip(clients, (1.0, 3.0), strict=True):
        work = client._work
        work.tell = lambda tell=work.tell, cost=cost: (n := tell()[0], n * cost)  # type: ignore[method-assign]
    problem, rows = Problem(torch.float32), list[list[int]]()
    expected, lr = problem.initial.clone(), on.config.learner.lr
    for clock in range(CLOCKS):
        rows.append([pupil.batch_size for pupil in pupils])
        grads = [problem.worker_grad(expected, w, clock, n) * n for w, n in enumerate(rows[-1])]
        expected -= lr * torch.stack(grads).sum(0) / (2 * BATCH)
        update(pupils, clock + 1)
    assert rows[0] == [8, 8] and rows[-1] == [12, 4] and {sum(row) for row in rows} == {16}
    torch.testing.assert_close(on.params, expected, rtol=0, atol=2e-6)


def test_clipping_happens_at_the_worker(running: Callable[..., Running]) -> None:
    on = running("sync", 2, learners=1, learner={"grad_clip": 0.05})
    work(on, 1)
    expected = Problem(torch.float32).alone(config_of(grad_clip=0.05), 1, CLOCKS)
    torch.testing.assert_close(on.params, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("mode", "more"),
    [("async", {}), ("ssp", {"staleness": 1}), ("window", {"window": 2}), ("window", {"window_ms": 1.0})],
)
def test_modes_without_a_barrier_apply_everything_once(
    running: Callable[..., Running], mode: str, more: dict[str, Any]
) -> None:
    """And learn: the loss on fresh data falls to a fraction."""
    on = running(mode, 2, **more)
    if more.get("window_ms"):
        on.call(on.servers[0].ticking(0.0005))
    first = on.servers[0]
    offer, staleness = first.policy.offer, list[int]()

    def noted(push: Push, now: float = 0.0) -> Outcome:
        outcome = offer(push, now)
        staleness.append(outcome.staleness)
        return outcome

    first.policy.offer = noted  # type: ignore[method-assign]
    work(on, 3)
    on.clients[0].flush()  # nobody waits for the last window, and for the other shard to hear of it
    assert len(staleness) == on.counts()["sync/pushes"] == 300
    assert {server.shard.version for server in on.servers} == {first.policy.version}
    assert not any(server.shard.missing for server in on.servers)
    problem = Problem(torch.float32)
    x, y = problem.batch(77, 0, 500)

    def error(params: torch.Tensor) -> float:
        w, v = params[:80].view(5, 16), params[80:96]
        return float((((x @ w).tanh() @ v - y) ** 2).mean())

    assert error(on.params) < 0.5 * error(problem.initial)
    if mode == "ssp":
        assert max(staleness) <= 2 * 3 + 2  # the bound on clocks bounds versions


@pytest.mark.parametrize("mode", ["localsgd", "diloco", "admm", "easgd"])
def test_local_modes_meet_on_the_server(running: Callable[..., Running], mode: str) -> None:
    on = running(mode, 2, local_steps=5, **({"rho_adapt": False} if mode == "admm" else {}))
    pupils = work(on, 3)
    assert on.servers[0].policy.version == (60 if mode == "easgd" else 20)
    if mode in ("localsgd", "diloco"):
        assert all(torch.equal(pupil.parameters, on.params) for pupil in pupils)
    assert (on.params - Problem(torch.float32).initial).abs().max() > 0.1


TARGETS, CURVES = np.random.default_rng(1).normal(size=(2, 3, SIZE))  # of each worker: curve (x - target)^2 / 2
CURVES = 0.2 + CURVES**2


def quadratic(worker: int, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(CURVES[worker] * (x.numpy() - TARGETS[worker])).float()


@pytest.mark.parametrize(("rho", "adapt"), [(0.3, False), (100.0, True)])
def test_admm_on_servers_written_out(running: Callable[..., Running], rho: float, adapt: bool) -> None:
    on = running("admm", 2, learner={"lr": 0.05}, local_steps=5, rho=rho, rho_adapt=adapt)
    clients, pupils = joined(on, 3)

    def run(worker: int, pupil: Pupil) -> None:
        for _ in range(CLOCKS):
            pupil.sync(quadratic(worker, pupil.parameters), BATCH)

    at_once(run, pupils)
    centre = Problem().initial.numpy()
    x, u, r = np.stack([centre] * 3), np.zeros((3, SIZE)), np.full((3, 1), rho)
    for clock in range(CLOCKS):
        x = x - 0.05 * CURVES * (x - TARGETS)
        x = (x + 0.05 * r * (centre - u)) / (1 + 0.05 * r)
        if clock % 5 == 4:
            before, centre = centre, (r * (x + u)).sum(0) / r.sum()
            u = u + x - centre
            primal = ((x - centre) ** 2).sum(1, keepdims=True)
            dual = r**2 * ((centre - before) ** 2).sum()
            factor = np.where(primal > 100 * dual, 2.0, np.where(dual > 100 * primal, 0.5, 1.0)) if adapt else 1.0
            r, u = r * factor, u / factor
    rhos = [client.state()["local"]["rho"] for client in clients]
    assert rhos == r[:, 0].tolist() and (rhos != [rho] * 3) == adapt
    torch.testing.assert_close(on.params, torch.from_numpy(centre).float(), rtol=0, atol=1e-5)
    ours = torch.stack([pupil.parameters for pupil in pupils])
    torch.testing.assert_close(ours, torch.from_numpy(x).float(), rtol=0, atol=1e-5)


def test_easgd_on_servers_written_out(running: Callable[..., Running]) -> None:
    """One after the other: each meets the centre that those before it have moved."""
    on = running("easgd", 2, learner={"lr": 0.05}, local_steps=5)
    _, pupils = joined(on, 3)
    centre = Problem().initial.numpy()
    x = np.stack([centre] * 3)
    for clock in range(CLOCKS):
        for worker, pupil in enumerate(pupils):
            pupil.sync(quadratic(worker, pupil.parameters), BATCH)
            x[worker] -= 0.05 * CURVES[worker] * (x[worker] - TARGETS[worker])
            if clock % 5 == 4:
                move = 0.5 / 3 * (x[worker] - centre)
                x[worker], centre = x[worker] - move, centre + move
    torch.testing.assert_close(on.params, torch.from_numpy(centre).float(), rtol=0, atol=1e-5)
    ours = torch.stack([pupil.parameters for pupil in pupils])
    torch.testing.assert_close(ours, torch.from_numpy(x).float(), rtol=0, atol=1e-5)


def test_what_is_too_old_is_refused_and_its_worker_goes_on_with_the_newest(running: Callable[..., Running]) -> None:
    on = running("async", 2, learners=2, staleness=2)
    clients, pupils = joined(on, 2)
    update(pupils[:1], 3)
    before = on.params
    assert not torch.equal(pupils[1].parameters, before)
    pupils[1].sync(torch.full((SIZE,), 1e3), BATCH)
    assert torch.equal(on.params, before) and torch.equal(pupils[1].parameters, before)
    assert on.servers[0].shard.applied == {0: (0, 2)} and clients[1].version == 3
    on.until(lambda: not any(server.shard._staged for server in on.servers))
    assert rates(clients[1].traffic.counts(), 1.0)["sync/rejected"] == 1.0
    pupils[1].sync(torch.ones(SIZE), BATCH)  # at half the learning rate, as half of the samples
    torch.testing.assert_close(on.params, before - 0.05)
    assert torch.equal(pupils[1].parameters, on.params)
    assert rates(clients[1].traffic.counts(), 1.0)["sync/rejected"] == 0.5
    assert rates(clients[0].traffic.counts(), 1.0)["sync/rejected"] == 0.0


def test_a_push_that_is_refused_takes_nothing_with_it_that_topk_had_kept(running: Callable[..., Running]) -> None:
    """Its gradient is dropped whole; what was due of those before it comes with the next one."""
    on = running("async", 2, learners=2, staleness=2, codec="topk", topk=0.5)
    clients, pupils = joined(on, 2)
    begun, first, second = on.params, torch.linspace(1.0, 2.0, SIZE), torch.full((SIZE,), 0.25)
    pupils[1].sync(first, BATCH)
    update(pupils[:1], 3)
    before, kept = on.params, deepcopy(clients[1].state()["codecs"])
    assert not torch.equal(before, begun) and all(codec["residual"].any() for codec in kept)
    pupils[1].sync(torch.full((SIZE,), 1e3), BATCH)
    assert clients[1].traffic.counts()["sync/rejected"] == 1 and torch.equal(on.params, before)
    for codec, was in zip(clients[1].state()["codecs"], kept, strict=True):
        assert torch.equal(codec["residual"], was["residual"])
    pupils[1].sync(second, BATCH)
    left = torch.cat([codec["residual"] for codec in clients[1].state()["codecs"]])
    due = torch.cat([codec["residual"] for codec in kept]) + second
    torch.testing.assert_close(on.params, before - 0.05 * (due - left))


def test_a_server_closes_windows_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pushes any more; also after a repair, at which it stops and begins to listen again."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    problem = Problem(torch.float32)
    config = replace(config_of(), learners=2, sync=sync_of("window", window=9, window_ms=1.0))
    actor, gradient = ServerActor(config, 0, problem.initial.numpy(), "token"), np.ones(SIZE, np.float32).view(np.uint8)

    async def check() -> None:
        server = actor._server
        for worker in range(2):
            await server.join(worker, 0)
        for clock in range(2):
            await actor.listen([])
            push = Push(0, 0, clock, clock, BATCH, 0.1)
            assert (await server.exchange(push, gradient, -1)).position.version == clock
            reply = await asyncio.wait_for(server.fetch(clock + 1, -1), LIMIT)
            assert reply is not None and reply.position.progress == (clock + 1) / 2
            await actor.pause()
        torch.testing.assert_close(server.shard.params, problem.initial - 0.1)

    asyncio.run(check())


def test_a_worker_that_leaves_does_not_hold_up_the_others(running: Callable[..., Running]) -> None:
    on = running("sync", 2, learners=2)
    problem = Problem(torch.float32)
    gone = on.client(1)
    gone.attach(Pupil(on.config, SIZE))  # type: ignore[arg-type]
    pupil, client = Pupil(on.config, SIZE), on.client(0)
    client.attach(pupil)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: pupil.sync(problem.worker_grad(pupil.parameters, 0, 0), BATCH))
        on.until(lambda: on.servers[0].policy.clocks[0])  # its push has arrived
        assert not waiting.done()
        on.call(on.servers[0].leave(1)).result()
        waiting.result(30)
    assert on.servers[0].policy.version == 1
    back = on.client(1, incarnation=1)
    again = Pupil(on.config, SIZE)
    back.attach(again)  # type: ignore[arg-type]
    assert torch.equal(again.parameters, on.params) and back.version == 1


def update(pupils: Sequence[Pupil], until: int) -> None:
    """All of them at once, until they have that many updates."""
    problem = Problem(torch.float32)

    def run(worker: int, pupil: Pupil) -> None:
        while pupil.updates < until:
            rows = pupil.batch_size
            pupil.sync(problem.worker_grad(pupil.parameters, worker, pupil.updates, rows), rows)

    at_once(run, pupils)


@pytest.mark.parametrize(("mode", "each"), [("sync", 1), ("localsgd", 5)])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_worker_that_the_server_has_forgotten_joins_again(
    running: Callable[..., Running], mode: str, each: int, ahead: int
) -> None:
    """As after a restart at which it did not answer, while the others made some versions: nobody waits for ever, and all end with the same parameters."""
    on = running(mode, 2, **({"local_steps": each} if mode == "localsgd" else {}))
    clients, pupils = joined(on, 3)
    on.call(on.servers[0].leave(2)).result()
    update(pupils[:2], ahead * each)
    update(pupils[2:], ahead * each)
    if ahead > 1:
        assert pupils[2].updates == ahead * each and torch.equal(pupils[2].parameters, on.params)
        assert torch.equal(pupils[2].target.data, on.target if mode == "sync" else on.params)
    update(pupils, CLOCKS)
    assert on.servers[0].policy.clocks.keys() == {0, 1, 2} and on.servers[0].shard.version == CLOCKS // each
    assert all(torch.equal(pupil.parameters, on.params) and pupil.updates == CLOCKS for pupil in pupils)
    assert torch.equal(pupils[2].target.data, pupils[0].target.data)
    assert clients[2].traffic.counts()["sync/rejected"] <= 1


def test_a_backup_worker_that_is_late_is_not_owed_what_it_missed(running: Callable[..., Running]) -> None:
    """Two go on without the third; its push comes too late, and it goes on from where they are."""
    on = running("sync", 2, backup=1)
    clients, pupils = joined(on, 3)
    update(pupils[:2], 3)
    pupils[2].sync(torch.ones(SIZE), BATCH)
    assert clients[2].traffic.counts()["sync/rejected"] == 1
    assert pupils[2].updates == clients[2].version == 3
    assert all(torch.equal(pupil.parameters, on.params) for pupil in pupils)
    update(pupils, CLOCKS)
    assert [pupil.updates for pupil in pupils] == [CLOCKS] * 3 and on.servers[0].shard.version == CLOCKS


@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_a_push_that_waits_when_a_shard_is_lost_is_made_again(running: Callable[..., Running], mode: str) -> None:
    """One worker's push waits for the other's; the second shard is replaced, without its part of it; the other pushes before the first one is back."""
    on = running(mode, 2, learners=2, **({"local_steps": 1} if mode == "localsgd" else {}))
    clients, pupils = joined(on, 2)
    policy, problem = on.servers[0].policy, Problem(torch.float32)

    def push(worker: int) -> None:
        pupils[worker].sync(problem.worker_grad(problem.initial, worker, 0), BATCH)

    pool = ThreadPoolExecutor(2)
    first = pool.submit(push, 0)
    on.until(lambda: not policy.ready(0))
    assert on.replace(1, clients[0].copy()) == 1
    on.may_return[1].set()
    second = pool.submit(push, 1)
    on.until(lambda: policy.clocks[1])
    on.may_return[0].set()
    pool.shutdown(wait=False)  # those that hang end with the fixture
    first.result(LIMIT)
    second.result(LIMIT)
    assert [server.shard.version for server in on.servers] == [1, 1]
    assert not any(server.shard.missing for server in on.servers)
    torch.testing.assert_close(on.params, problem.alone(config_of(), 2, 1), rtol=0, atol=2e-6)


def test_pushes_of_a_window_that_is_open_when_a_shard_is_lost_are_dropped_whole(
    running: Callable[..., Running],
) -> None:
    """Their worker has gone on: nobody would repeat them."""
    on = running("window", 2, learners=2, window=2)
    clients, pupils = joined(on, 2)
    for event in on.may_return:
        event.set()
    update(pupils[:1], 1)
    assert on.replace(1, clients[0].copy()) == 1
    update(pupils[1:], 1)
    assert on.servers[0].policy.version == 0
    update(pupils[:1], 2)
    clients[0].flush()
    assert [s.shard.applied for s in on.servers] == [{0: (0, 1), 1: (0, 0)}] * 2
    assert [s.shard.version for s in on.servers] == [1, 1] and not any(s.shard.missing for s in on.servers)


@pytest.mark.parametrize(("mode", "more"), [("async", {}), ("ssp", {}), ("window", {"window": 1})])
def test_who_was_late_goes_on_with_the_target_of_the_others(
    running: Callable[..., Running], mode: str, more: dict[str, Any]
) -> None:
    """One does something else, as saving a checkpoint. What it pushes next is as old as it is."""
    on = running(mode, 2, learners=2, learner={"target_interval": 4}, **more)
    clients, pupils = joined(on, 2)
    update(pupils[1:], 8)
    assert not torch.equal(on.target, Problem(torch.float32).initial)
    update(pupils[:1], 1)
    assert torch.equal(pupils[0].target.data, on.target) and torch.equal(pupils[0].parameters, on.params)
    counts = clients[0].traffic.counts()
    assert counts["sync/stale"] == counts["sync/stale_8"] * 8 == 8


def test_a_cut_is_the_same_version_on_all_servers_while_pushes_go_on(running: Callable[..., Running]) -> None:
    on = running("async", 3, learners=4)
    clients, pupils = joined(on, 4)
    problem, cuts = Problem(torch.float32), list[list[Any]]()

    def run(worker: int, pupil: Pupil) -> None:
        if worker == 3:
            for number in range(1, 20):
                clients[3].flush(cut=number)
                cuts.append([on.call(server.cut(number)).result(LIMIT) for server in on.servers])
            return
        for clock in range(100):
            pupil.sync(problem.worker_grad(pupil.parameters, worker, clock), BATCH)

    at_once(run, pupils)
    versions = [{state["version"] for state in states} for states in cuts]
    assert all(len(of_all) == 1 for of_all in versions) and len(set().union(*versions)) > 2, versions
    assert all(state["applied"] == states[0]["applied"] for states in cuts for state in states)


@pytest.mark.parametrize(("mode", "more"), [("async", {}), ("ssp", {}), ("window", {"window": 2})])
def test_modes_without_a_barrier_resume_with_every_push_once(
    running: Callable[..., Running], mode: str, more: dict[str, Any]
) -> None:
    """One saves its part, and goes on; so do the others, later, which change the target network; a window is open. Nobody waits while the servers'
    states are copied, all of one version. Then all begin anew."""
    settings = {"learner": {"target_interval": 4}, **more}
    on, parts = running(mode, 2, **settings), dict[int, Any]()
    clients, pupils = joined(on, 3)

    def saved(worker: int) -> None:
        flat, target = pupils[worker].parameters.clone(), pupils[worker].target.data.clone()
        parts[worker] = (flat, target, pupils[worker].updates, deepcopy(clients[worker].state()))

    update(pupils, 3)
    saved(0)
    update(pupils[:1], 5)
    update(pupils[1:], 12)
    for worker in (1, 2):
        saved(worker)
    clients[0].flush(cut=1)
    update(pupils, 16)
    states = [on.call(server.cut(1)).result(LIMIT) for server in on.servers]
    target = torch.cat([state["target"] for state in states])
    assert not torch.equal(target, on.target)
    again = running(mode, 2, **settings)
    for server, state in zip(again.servers, states, strict=True):
        server.load_state(state)
    new_clients, new_pupils = joined(again, 3)
    for worker, (flat, target, updates, state) in parts.items():
        new_pupils[worker].flat.data.copy_(flat)
        new_pupils[worker].target.data.copy_(target)
        new_pupils[worker].updates = updates
        new_clients[worker].load_state(state)
    position = again.servers[0].shard.position
    assert position.applied == {0: (0, 4), 1: (0, 11), 2: (0, 11)} and position.progress == pytest.approx(29 / 3)
    assert not torch.equal(again.target, parts[0][1])
    update(new_pupils[:1], 4)
    assert torch.equal(new_pupils[0].target.data, again.target) and torch.equal(again.target, target)
    counts = new_clients[0].traffic.counts()
    assert counts["sync/stale"] == position.version - parts[0][3]["given"][0] > 0
    update(new_pupils, 20)
    new_clients[0].flush()
    for server in again.servers:
        assert server.shard.applied == {0: (0, 21), 1: (0, 19), 2: (0, 19)} and not server.shard.missing
    # Pushes are versions, or parts of them: none is missing, and none is there twice.
    commits = [[key for key, _ in commit.parts] for commit in again.servers[0].shard.log]
    keys = sorted(key for commit in commits for key in commit)
    assert keys == sorted(
        (w, 0, n) for w, first, end in ((0, 5, 22), (1, 12, 20), (2, 12, 20)) for n in range(first, end)
    )
    assert [c.version for c in again.servers[0].shard.log] == list(
        range(position.version + 1, again.servers[0].shard.version + 1)
    )


@pytest.mark.parametrize(("mode", "more"), [("async", {}), ("window", {"window": 1})])
def test_what_topk_kept_is_not_sent_again_by_who_went_on_after_it_had_saved(
    running: Callable[..., Running], mode: str, more: dict[str, Any]
) -> None:
    """Its pushes since then are in the servers' parameters. Who did not go on has what it kept."""
    settings = {"learner": {"momentum": 0.9, "lr": 0.02}, "codec": "topk", "topk": 0.1, **more}
    on = running(mode, 2, learners=2, **settings)
    clients, pupils = joined(on, 2)
    update(pupils, 3)
    parts = [deepcopy(client.state()) for client in clients]
    assert all(codec[name].any() for part in parts for codec in part["codecs"] for name in ("residual", "velocity"))
    update(pupils[:1], 8)
    clients[0].flush(cut=1)
    again = running(mode, 2, learners=2, **settings)
    for server, old in zip(again.servers, on.servers, strict=True):
        server.load_state(on.call(old.cut(1)).result(LIMIT))
    new_clients, _ = joined(again, 2)
    for client, part in zip(new_clients, parts, strict=True):
        client.load_state(part)
    kept = [client.state()["codecs"] for client in new_clients]
    assert not any(codec[name].any() for codec in kept[0] for name in ("residual", "velocity"))
    for codec, saved in zip(kept[1], parts[1]["codecs"], strict=True):
        assert all(torch.equal(codec[name], saved[name]) for name in ("residual", "velocity"))


def test_who_connects_while_a_server_closes_is_told() -> None:
    async def closing() -> socket.socket:
        listener = Listener({}, "token", "127.0.0.1")
        sock = socket.create_connection(("127.0.0.1", listener.port), timeout=10)  # the kernel takes it
        listener._accept()
        await listener.close()
        await listener.close()
        return sock

    with asyncio.run(closing()) as sock:
        assert sock.recv(1) == b""


def test_a_worker_that_never_reaches_a_server_gives_up() -> None:
    config, said = replace(config_of(), sync=sync_of("sync", heartbeat=0.01)), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    def find(epoch: int, why: str = "") -> tuple[int, list[tuple[str, int]]]:
        assert epoch < 10**5  # it would go on for ever
        said.extend([why] if why else [])
        return epoch + 1, [("127.0.0.1", port)]

    refused = rf"no server answers at 127\.0\.0\.1:{port} \(Connection refused\)"
    with pytest.raises(Unreachable, match=rf"{refused}, \d+ times in a row.*firewall"):
        Client(config, 0, 0, SIZE, find, "token")
    assert len(said) == 1


def test_a_worker_that_gave_up_says_why_again(running: Callable[..., Running]) -> None:
    """It takes no part any more, and need not leave: its part of a checkpoint can be saved."""
    on = running("sync", learners=1, heartbeat=0.01)
    (client,), (pupil,) = joined(on, 1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    client._find = lambda epoch, why: (epoch + 1, [("127.0.0.1", port)])
    client._servers[0].close()
    for call in (lambda: update([pupil], 1), client.newest, client.leave, client.flush):
        with pytest.raises(Unreachable, match=rf"127\.0\.0\.1:{port}.*firewall"):
            call()
        assert not client.joined
    assert client.state()["sequence"] == 1


def test_a_server_looks_for_the_others_before_it_begins() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    server = ServerActor(config_of(), 0, Problem(torch.float32).initial.numpy(), "token")
    with pytest.raises(WireError, match=f"no server answers at 127.0.0.1:{port}"):
        asyncio.run(server.listen([("127.0.0.1", port)]))


def test_a_server_is_restored_from_whatever_is_newest() -> None:
    config, initial = config_of(), Problem(torch.float32).initial.numpy()
    copy = Copy(Position(3, 0, 3.0, {}), initial + 1, initial + 1)

    async def restored(version: int) -> torch.Tensor:
        actor = ServerActor(config, 0, initial, "token")
        snapshot = {**await actor.state(), "version": version, "params": torch.from_numpy(initial + 2)}
        await actor.restore(snapshot, copy, Position(5, 0, 5.0, {0: (0, 4)}), {0: (0, True)})
        assert actor._server.shard.position == Position(5, 0, 5.0, {0: (0, 4)})
        return actor._server.shard.params

    torch.testing.assert_close(asyncio.run(restored(2)), torch.from_numpy(initial + 1))
    torch.testing.assert_close(asyncio.run(restored(4)), torch.from_numpy(initial + 2))
    torch.testing.assert_close(asyncio.run(restored(6)), torch.from_numpy(initial + 1))  # others are not as far


@pytest.mark.parametrize("servers", [1, 2])
def test_compressed_pushes_are_counted_as_whole_messages(servers: int) -> None:
    """Of a Nature network with six actions, as part of what fp32 takes: headers, scales and indices included."""
    size, sent = 1_687_216, dict[str, float]()
    for codec in ("fp32", "bf16", "int8", "topk"):
        config = replace(config_of(), sync=sync_of("sync", servers=servers, transport="server", codec=codec))
        on = Running(config, torch.zeros(size))
        try:
            client, pupil = on.client(0), Pupil(on.config, size)
            client.attach(pupil)  # type: ignore[arg-type]
            before = sum(connection.sent for connection in client._servers)
            pupil.sync(torch.randn(size, generator=torch.Generator().manual_seed(1)), BATCH)
            counts = client.traffic.counts()
            sent[codec] = sum(connection.sent for connection in client._servers) - before
        finally:
            on.close()
        assert counts["sync/plain_bytes"] == 4 * size
        assert (
            counts["sync/bytes"] <= sent[codec] <= counts["sync/bytes"] + 100 * servers
        )  # and what asks for the answer
        assert (counts["sync/pushes"], counts["sync/samples"], counts["sync/stale_0"]) == (1, BATCH, 1)
    assert 4 * size < sent["fp32"] < 4.001 * size
    for codec, most in (("bf16", 0.501), ("int8", 0.27), ("topk", 0.025)):
        assert sent[codec] <= most * sent["fp32"]


def test_a_server_of_another_run_refuses(running: Callable[..., Running]) -> None:
    on = running("sync")
    with pytest.raises(WireError, match="belongs to another run"):
        Connection(("127.0.0.1", on.listeners[0].port), "other")
    with pytest.raises(WireError, match="no server answers"):
        Connection(("127.0.0.1", 9), "token")
    client = on.client(0)
    with pytest.raises(WireError, match="KeyError"):
        client._servers[0]("nonsense").receive()
    client.newest()  # and goes on
