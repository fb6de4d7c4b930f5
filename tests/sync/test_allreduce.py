"""All-reduce and learners that train alone for a while, in three real processes of a Gloo group."""

import multiprocessing
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fleet import BATCH, FEATURES, HIDDEN, SIZE, Games, Problem, Server, config_of, learned, learner_of, sync_of

from qfleet.config import Config, SyncConfig
from qfleet.learner import Learner, Optimizer
from qfleet.sync import allreduce
from qfleet.sync.group import Group
from qfleet.sync.local import Local
from qfleet.types import Spec

RANKS, CLOCKS = 3, 100
PLACES = [(torch.Size((FEATURES, HIDDEN)), 0), (torch.Size((HIDDEN,)), FEATURES * HIDDEN)]


class Pupil:
    """A learner as far as `Local` knows it."""

    def __init__(self, config: Config, initial: torch.Tensor) -> None:
        self.parameters, self.target = initial.clone(), initial.clone()
        self.lr, self.updates = config.learner.lr, 0
        self._optimizer = Optimizer(config, self.parameters)

    def optimize(self, grad: torch.Tensor) -> None:
        self._optimizer(grad, self.lr)
        self.updates += 1

    def freeze(self, parameters: torch.Tensor) -> None:
        self.target.copy_(parameters)


def gradients(rank: int, config: Config, sync: SyncConfig, dtype: torch.dtype) -> torch.Tensor:
    problem = Problem(dtype)
    pupil, mean = Pupil(config, problem.initial), allreduce.make(sync, PLACES, SIZE, seed=1)
    for clock in range(CLOCKS):
        pupil.optimize(mean(problem.worker_grad(pupil.parameters, rank, clock), BATCH))
    return pupil.parameters


def local(rank: int, config: Config, sync: SyncConfig, clocks: int = CLOCKS) -> torch.Tensor:
    """-> parameters, centre, target."""
    problem = Problem()
    pupil = Pupil(config, problem.initial)
    centre = allreduce.Centre(sync, allreduce.make(sync, PLACES, SIZE, seed=1), problem.initial)
    alone = Local(sync, config.learner.target_interval, RANKS, problem.initial, centre)
    for clock in range(clocks):
        alone.step(pupil, problem.worker_grad(pupil.parameters, rank, clock), BATCH)
    return torch.stack((pupil.parameters, centre.newest(), pupil.target))


def consensus(rank: int, sync: SyncConfig) -> torch.Tensor:
    """Each learner has a quadratic of its own: a (x - b)^2 / 2, another curvature a in every coordinate."""
    a, b = quadratic(rank)
    config = config_of(lr=0.1)
    pupil = Pupil(config, torch.zeros(SIZE, dtype=torch.float64))
    centre = allreduce.Centre(sync, allreduce.Reduced(), pupil.parameters)
    alone = Local(sync, 10, RANKS, pupil.parameters, centre)
    for _ in range(8000):
        alone.step(pupil, a * (pupil.parameters - b), 1)
    return torch.stack((pupil.parameters, centre.newest()))


def learners(rank: int, config: Config) -> torch.Tensor:
    """Real ones -> parameters, target."""
    learner = learner_of(config)
    learner.sync = Group(config, learner).agree
    learner.learn(Games(rank), CLOCKS)
    return torch.stack((learner.flat.data, learner.target.data))


def quadratic(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return 0.2 + torch.rand(SIZE, generator=g, dtype=torch.float64), torch.randn(SIZE, generator=g, dtype=torch.float64)


def low_rank(rank: int) -> torch.Tensor:
    """Vectors, what everybody agreed on, and what was kept, twenty times."""
    mean = allreduce.LowRank([(torch.Size((16, 40)), 0), (torch.Size((30,)), 640)], 672, 2, seed=1)
    rows = []
    for k in range(20):
        x = torch.randn(672, generator=torch.Generator().manual_seed(100 * rank + k))
        before = mean.residual.clone()
        rows += [x + before, mean(x, weight=1.0 + rank), mean.residual.clone()]
    return torch.stack(rows)


def compressed(rank: int, codec: str) -> torch.Tensor:
    mean = allreduce.make(
        sync_of("sync", codec=codec, **({"topk": 0.05} if codec == "topk" else {})), PLACES, SIZE, seed=1
    )
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))
    return torch.stack([mean(x, weight=1.0 + rank) for _ in range(300)])


def bytes_sent() -> int:
    """By the TCP connections of this process, without what was sent again: as the kernel counts (struct tcp_info)."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(fd))) as s:
                info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # no such socket
            continue
        sent, again = struct.unpack_from("QQ", info, 200)
        total += sent - again
    return total


def counted(rank: int) -> torch.Tensor:
    """Of every codec what ten agreements sent: as was counted, and by the kernel's count."""
    rows = []
    for codec, more in CODECS.items():
        mean = allreduce.make(sync_of("sync", codec=codec, **more), [(torch.Size((100, 100)), 0)], 100_000, seed=1)
        dist.barrier()
        before = bytes_sent()
        for _ in range(10):
            mean(torch.ones(100_000), 1.0)
        dist.barrier()
        rows.append([mean.used.bytes, bytes_sent() - before])
    return torch.tensor(rows, dtype=torch.float64)


def compression(rank: int) -> torch.Tensor:
    """-> of an agreement in int8: bytes in fp32, bytes sent, numbers."""
    config = replace(config_of(), sync=sync_of("sync", codec="int8"))
    learner = Learner(config, Spec(obs_shape=(4,), obs_dtype="float32", num_actions=2), torch.device("cpu"))
    group = Group(config, learner)
    group.agree(torch.ones_like(learner.flat.data), BATCH)
    counts = group.traffic.counts()
    return torch.tensor([counts["sync/plain_bytes"], counts["sync/bytes"], len(learner.flat.data)])


CODECS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {}, "int8": {}, "topk": {"topk": 0.1}, "powersgd": {}}
MOMENTUM = replace(config_of(momentum=0.9, lr=0.02), sync=sync_of("sync", codec="topk", topk=1.0))
ADAM = {"optimizer": "adam", "lr": 1e-2, "grad_clip": 0.05}
JOBS: dict[str, Callable[[int], torch.Tensor]] = {
    "sgd float64": lambda r: gradients(r, config_of(), sync_of("sync"), torch.float64),
    "sgd float32": lambda r: gradients(r, config_of(), sync_of("sync"), torch.float32),
    "adam, clipped": lambda r: gradients(r, config_of(**ADAM), sync_of("sync"), torch.float32),
    "localsgd 1": lambda r: local(r, config_of(), sync_of("localsgd", local_steps=1)),
    "diloco 1": lambda r: local(r, config_of(), sync_of("diloco", local_steps=1, outer_lr=1.0, outer_momentum=0.0)),
    "localsgd 5": lambda r: local(r, config_of(target_interval=7), sync_of("localsgd", local_steps=5)),
    "diloco 5": lambda r: local(r, config_of(), sync_of("diloco", local_steps=5)),
    "easgd": lambda r: local(r, config_of(), sync_of("easgd", local_steps=5, transport="allreduce")),
    "admm": lambda r: consensus(r, sync_of("admm", local_steps=5, rho=0.3, rho_adapt=False)),
    "admm adaptive": lambda r: consensus(r, sync_of("admm", local_steps=5, rho=100.0)),
    "low rank": low_rank,
    "bytes": counted,
    "compression": compression,
    "learners": lambda r: learners(r, config_of()),
    "learners, momentum": lambda r: learners(r, MOMENTUM),
    **{name: lambda r, name=name: compressed(r, name) for name in ("bf16", "int8", "topk")},  # type: ignore[misc]
}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    torch.save({name: job(rank) for name, job in JOBS.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """What every rank got, by job."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(rank, str(folder))) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * RANKS
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


def same(done: list[dict[str, torch.Tensor]], job: str) -> torch.Tensor:
    """The result of all ranks, which must be the same to the bit."""
    assert all(torch.equal(each[job], done[0][job]) for each in done)
    return done[0][job]


@pytest.mark.parametrize(
    ("job", "config", "dtype", "tolerance"),
    [
        ("sgd float64", config_of(), torch.float64, 1e-13),
        ("sgd float32", config_of(), torch.float32, 2e-6),
        ("adam, clipped", config_of(**ADAM), torch.float32, 2e-5),
    ],
)
def test_gradients_agree_to_those_of_one_learner(
    done: list[dict[str, torch.Tensor]], job: str, config: Config, dtype: torch.dtype, tolerance: float
) -> None:
    problem = Problem(dtype)
    expected = problem.alone(config, RANKS, CLOCKS)
    assert (expected - problem.initial).abs().max() > 0.1
    torch.testing.assert_close(same(done, job), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("job", "config"), [("learners", config_of()), ("learners, momentum", MOMENTUM)])
def test_real_learners_are_one_with_their_batches_together(
    done: list[dict[str, torch.Tensor]], job: str, config: Config
) -> None:
    """In float32, whose sums depend on their order. With momentum: all of the vector is sent by top-k, which has the momentum in the optimiser's place."""
    torch.testing.assert_close(same(done, job), learned(config, RANKS, CLOCKS), rtol=0, atol=1e-5)


def test_one_local_step_is_averaging(done: list[dict[str, torch.Tensor]]) -> None:
    """With plain SGD the mean of the parameters after one step is a step by the mean gradient."""
    expected = Problem().alone(config_of(), RANKS, CLOCKS)
    for job in ("localsgd 1", "diloco 1"):
        torch.testing.assert_close(same(done, job)[0], expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(same(done, "diloco 1"), same(done, "localsgd 1"), rtol=0, atol=1e-13)


def alone(momentum: float, lr: float, steps: int, target_interval: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Local SGD written out: centre and target after CLOCKS updates. The outer optimiser is torch's."""
    problem, rate = Problem(), config_of().learner.lr
    centre = torch.nn.Parameter(problem.initial.clone())
    outer = torch.optim.SGD([centre], lr=lr, momentum=momentum, nesterov=momentum > 0)
    workers, target = [centre.detach().clone() for _ in range(RANKS)], centre.detach().clone()
    for clock in range(CLOCKS):
        for rank, x in enumerate(workers):
            x -= rate * problem.worker_grad(x, rank, clock)
        if (clock + 1) % steps == 0:
            centre.grad = centre.detach() - torch.stack(workers).mean(0)
            outer.step()
            workers = [centre.detach().clone() for _ in range(RANKS)]
        if (clock + 1) % target_interval == 0:
            target = centre.detach().clone()
    return centre.detach(), target


@pytest.mark.parametrize(
    ("job", "momentum", "lr", "interval"), [("localsgd 5", 0.0, 1.0, 7), ("diloco 5", 0.9, 0.7, 10)]
)
def test_local_steps_and_outer_optimiser(
    done: list[dict[str, torch.Tensor]], job: str, momentum: float, lr: float, interval: int
) -> None:
    centre, target = alone(momentum, lr, 5, interval)
    got = same(done, job)
    torch.testing.assert_close(got[0], centre, rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], centre, rtol=0, atol=1e-12)
    torch.testing.assert_close(got[2], target, rtol=0, atol=1e-12)


def test_elastic_averaging_written_out(done: list[dict[str, torch.Tensor]]) -> None:
    problem, rate, e = Problem(), config_of().learner.lr, 0.5 / RANKS
    centre = problem.initial.clone()
    workers = [centre.clone() for _ in range(RANKS)]
    for clock in range(CLOCKS):
        for rank, x in enumerate(workers):
            x -= rate * problem.worker_grad(x, rank, clock)
        if (clock + 1) % 5 == 0:
            moves = [e * (x - centre) for x in workers]
            for x, d in zip(workers, moves, strict=True):
                x -= d
            centre = centre + torch.stack(moves).sum(0)
    for rank in range(RANKS):
        torch.testing.assert_close(done[rank]["easgd"][0], workers[rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(done[rank]["easgd"][1], centre, rtol=0, atol=1e-12)


@pytest.mark.parametrize("job", ["admm", "admm adaptive"])
def test_admm_finds_the_consensus_of_quadratics(done: list[dict[str, torch.Tensor]], job: str) -> None:
    """The minimum of their sum is known: the mean of the b weighted by the a."""
    a, b = (torch.stack(parts) for parts in zip(*map(quadratic, range(RANKS)), strict=True))
    expected = (a * b).sum(0) / a.sum(0)
    assert (expected - b.mean(0)).abs().max() > 0.1
    for each in done:
        torch.testing.assert_close(each[job][1], expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(each[job][0], expected, rtol=0, atol=1e-6)


def test_low_rank_keeps_what_it_does_not_say(done: list[dict[str, torch.Tensor]]) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0]) / 6
    for k in range(20):
        due, agreed, kept = (torch.stack([each["low rank"][3 * k + i] for each in done]) for i in range(3))
        assert torch.equal(agreed[0], agreed[1]) and torch.equal(agreed[0], agreed[2])
        torch.testing.assert_close(
            agreed[0] + (weights[:, None] * kept).sum(0), (weights[:, None] * due).sum(0), rtol=0, atol=2e-5
        )
        assert kept[:, :640].abs().max() > 0.1 and not kept[:, 640:].any()
        assert torch.linalg.matrix_rank(agreed[0][:640].view(16, 40), tol=1e-3) == 2


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk"])
def test_compressed_means(done: list[dict[str, torch.Tensor]], codec: str) -> None:
    """The mean over three hundred messages is the weighted mean of the vectors: nothing is lost for good."""
    got = same(done, codec)
    vectors = torch.stack([torch.randn(SIZE, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)])
    expected = (torch.tensor([1.0, 2.0, 3.0])[:, None] / 6 * vectors).sum(0)
    assert not torch.equal(got[0], expected)
    torch.testing.assert_close(got.mean(0), expected, rtol=0, atol=0.3 if codec == "topk" else 5e-3)


def test_a_server_and_all_reduce_agree(done: list[dict[str, torch.Tensor]]) -> None:
    problem, config = Problem(), config_of()
    server = Server(config, sync_of("diloco"), problem.initial, RANKS, shards=2)
    seen = problem.initial.clone()
    workers = [seen.clone() for _ in range(RANKS)]
    for clock in range(CLOCKS):
        for rank, x in enumerate(workers):
            x -= config.learner.lr * problem.worker_grad(x, rank, clock)
        if (clock + 1) % 5 == 0:
            base = server.policy.version
            for rank, x in enumerate(workers):
                server.push(rank, x - seen, base, samples=5 * BATCH, lr=1.0)
            seen = server.params.clone()
            workers = [seen.clone() for _ in range(RANKS)]
    torch.testing.assert_close(seen, same(done, "diloco 5")[1], rtol=0, atol=1e-12)


def test_bytes_are_those_on_the_wire(done: list[dict[str, torch.Tensor]]) -> None:
    """A ring of three: vectors that are reduced go round as 4/3 of their size, messages that are gathered as twice theirs."""
    for each in done:
        for (codec, _), (ours, kernels) in zip(CODECS.items(), each["bytes"].tolist(), strict=True):
            assert ours <= kernels <= 1.02 * ours, codec
        numbers = each["bytes"][:, 0] / 10 / 4e5
        expected = torch.tensor([4 / 3, 2 * 0.5, 2 * 0.254, 2 * 0.2, 4 / 3 * 0.908], dtype=torch.float64)
        torch.testing.assert_close(numbers, expected, rtol=2e-3, atol=0)


def test_compression_is_against_the_same_agreement_in_fp32(done: list[dict[str, torch.Tensor]]) -> None:
    """Not against the vector: messages that are gathered go to everybody."""
    plain, sent, numbers = same(done, "compression").tolist()
    assert plain == 4 * 4 * numbers // 3
    assert plain / sent == pytest.approx(4 / 3 / (2 * 0.254), rel=0.01)


def test_gradients_are_clipped_before_they_get_momentum(tmp_path: Path) -> None:
    """As in the optimiser, where one learner has both."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        config = replace(MOMENTUM, learner=replace(MOMENTUM.learner, grad_clip=0.5))
        torch.testing.assert_close(learners(0, config), learned(config, 1, CLOCKS), rtol=0, atol=1e-5)
    finally:
        dist.destroy_process_group()


def take_over(rank: int, folder: str) -> None:
    """Rank 0 has made updates, and dies before rank 1 has taken over everything."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    learner = Learner(config_of(), Spec(obs_shape=(4,), obs_dtype="float32", num_actions=2), torch.device("cpu"))
    group, before, broadcast = Group(config_of(), learner), learner.flat.data.clone(), dist.broadcast

    def last(tensor: torch.Tensor, source: int) -> None:
        broadcast(tensor, source)
        os._exit(0)

    if rank == 0:
        learner.updates = 7
        learner.flat.data.add_(1.0)
        learner.target.data.add_(1.0)
        dist.broadcast = last
    with pytest.raises(RuntimeError):
        group.adopt()
    unchanged = torch.equal(learner.flat.data, before) and torch.equal(learner.target.data, before)
    Path(folder, "got").write_text(f"{learner.updates} {unchanged}")


def test_nobody_claims_updates_whose_parameters_it_did_not_get(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=take_over, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert (tmp_path / "got").read_text() == "0 True"
