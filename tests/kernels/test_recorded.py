"""A recorded update against the same kernels launched one by one."""

import pytest
import torch
from test_nature import DEVICE, ENVS, SPEC, config_of, filled

from qfleet import recipes
from qfleet.captured import CapturedLearner
from qfleet.config import override
from qfleet.device import Captured
from qfleet.learner import Learned
from qfleet.types import Step

gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="nothing is recorded without a GPU")


@gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("recipe", recipes.NAMES)
def test_recorded_updates_are_those_that_were_recorded(recipe: str, precision: str) -> None:
    """The same draws, losses, priorities and parameters, across refreshes of the target network, to the rounding of float32."""
    settings = {
        "network.atoms": 7,
        "learner.target_interval": 3,
        "learner.adam_eps": 1e-4,
        "learner.precision": precision,
    }
    config = override(override(config_of(), recipes.RECIPES[recipe][1]), settings)

    def trained(recorded: bool) -> list[torch.Tensor]:
        learner, replay = CapturedLearner(config, SPEC, DEVICE), filled(config)
        learner.prepare(replay)
        assert learner._step is not None and learner._step._graph is not None, learner.notes()
        if not recorded:
            learner._step._graph = None
        for updates in (1, 4, 2):
            learner.learn(replay, updates, beta=0.5)
        told = learner.flush()
        assert told is not None and learner.updates == 7
        batch = replay.sample(99, beta=0.5)  # priorities decide what is drawn, and how it weighs
        numbers = torch.tensor([told.loss_sum, told.q_mean], device=DEVICE)
        return [learner.flat.data, learner.target.data, numbers, batch.action.float(), batch.weight]

    for got, expected in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("recipe", ["double", "rainbow"])
def test_nothing_between_two_updates_waits_for_the_gpu(recipe: str) -> None:
    """But for the numbers of the round before, which are waited for by an event: that is no error to torch."""
    config = override(config_of(), recipes.RECIPES[recipe][1] | {"learner.target_interval": 3})
    learner, replay = CapturedLearner(config, SPEC, DEVICE), filled(config)
    learner.prepare(replay)
    fields = (
        torch.zeros(4, ENVS, 84, 84, dtype=torch.uint8),
        torch.zeros(4, ENVS, dtype=torch.int64),
        torch.zeros(4, ENVS),
    )
    no = torch.zeros(4, ENVS, dtype=torch.bool)
    rows = Step(*(field.pin_memory() for field in (*fields, no, no, no)))

    def once() -> Learned | None:
        replay.extend(rows)
        return learner.learn(replay, 5, beta=0.5)

    try:
        torch.cuda.set_sync_debug_mode("error")
        told = [once() for _ in range(3)]
        with pytest.raises(RuntimeError, match="synchroniz"):
            learner.grad.sum().item()  # this would be one
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert learner.updates == 15 and told[0] is None and told[2] is not None


@gpu
def test_what_cannot_be_recorded_is_launched() -> None:
    count = torch.zeros(1, device=DEVICE)

    def step() -> None:
        count.add_(1)
        count.cpu()  # waits for the GPU

    captured = Captured(step, [count], DEVICE)
    assert captured.why_not and count.item() == 0
    captured()
    assert count.item() == 1


@gpu
def test_too_little_memory_is_no_reason_to_launch() -> None:
    """The run would go on slowly, where there is a setting to change."""
    runs, count = [], torch.zeros(1, device=DEVICE)

    def step() -> None:
        runs.append(count.add_(1))
        if len(runs) == 3:  # while it is recorded
            torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)

    with pytest.raises(torch.OutOfMemoryError):
        Captured(step, (), DEVICE)
