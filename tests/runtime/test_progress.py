import io
import sys

import pytest

from qfleet.runtime.progress import Progress, bottleneck, duration, eta, is_terminal, line, percent, widths

VALUES = {
    "time/steps_per_second": 3100.4,
    "time/updates_per_second": 820.0,
    "rollout/ep_rew_mean": 187.34,
    "eval/mean_reward": 312.0,
    "train/loss": 0.0123,
    "rollout/exploration_rate": 0.05,
    "pipeline/samples_per_step": 8.0,
    "pipeline/lag": 1.0,
    "pipeline/transfer_mb_per_second": 21.3,
    "pipeline/env": 0.4,
    "pipeline/act": 0.2,
    "pipeline/learn": 0.35,
    "pipeline/wait": 0.05,
}


def drawn(progress: Progress) -> str:
    """The live table as text, 80 columns wide."""
    from rich.console import Console

    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(progress.table())
    return console.file.getvalue()


def test_the_table_has_a_row_for_every_learner() -> None:
    progress = Progress(100, "run", interactive=True)
    progress._values = VALUES | {
        "sync/pushes_per_second": 12.0, "sync/mb_per_second": 3.4, "sync/compression": 3.9, "sync/rejected": 0.1,
        "learner_0/samples_per_second": 1234.0, "learner_0/wait": 0.25, "learner_1/samples_per_second": 321.0, "learner_1/wait": 0.5, "learner_1/staleness": 0.5,
        "learner_12/samples_per_second": 12345.0, "learner_12/mb_per_second": 123.46, "learner_12/wait": 1.0, "learner_12/staleness": 0.98, "learner_12/rejected": 0.25,
    }  # fmt: skip
    text = drawn(progress)
    assert "MB/s 3.40" in text and "compressed 3.9" in text and "rejected 10%" in text
    rows = {line.split()[2]: line for line in text.splitlines() if "learner " in line and "samples/s" in line}
    assert "1,234" in rows["0"] and "25%" in rows["0"]
    assert "321" in rows["1"] and "50%" in rows["1"] and "stale 0.5" in rows["1"]
    assert "samples/s 12,345 MB/s 123.5 waiting 100% stale 0.98 rejected 25%" in rows["12"]
    assert "MB/s" not in rows["0"] and "rejected" not in rows["0"]  # under a launcher they are not known
    progress._values = dict(VALUES)
    assert "learner 0" not in drawn(progress)


def test_the_table_says_how_stale_pushes_were() -> None:
    progress = Progress(100, "run", interactive=True)
    progress._values = VALUES | {"sync/pushes_per_second": 12.0, "sync/stale_0": 0.5, "sync/stale_1": 0.475, "sync/stale_2": 0.022, "sync/stale_4": 0.003, "sync/stale_8": 0.0}  # fmt: skip
    assert "staleness 0: 50%, 1: 48%, 2-3: 2% " in " ".join(drawn(progress).split())
    progress._values |= {"sync/stale_4": 0.2, "sync/stale_8": 0.3}
    assert "4-7: 20%, 8+: 30%" in drawn(progress)
    progress._values |= {"sync/stale_0": 1.0} | {f"sync/stale_{low}": 0.0 for low in (1, 2, 4, 8)}
    assert "staleness" not in drawn(progress)


def test_a_plain_line_shows_everything_known(capsys):
    with Progress(50_000, "CartPole-v1 dqn", interactive=False) as progress:
        progress.update(12_000, VALUES)
        progress.message("checkpoint saved")
    assert capsys.readouterr().out.splitlines() == [
        "CartPole-v1 dqn",
        "step 12,000/50,000  24%  3,100 steps/s  820 upd/s  return 187.3  eval 312.0  loss 0.0123  eps 0.05  limit environments  ETA 13s",
        "checkpoint saved",
    ]


def test_an_evaluation_belongs_to_its_step():
    values = {"eval/mean_reward": 7.25, "eval/step": 1500.0}
    assert line(1500, 9000, values).endswith("eval 7.2")
    assert line(2000, 9000, values).endswith("eval 7.2 (at 1,500)")


def test_what_is_not_known_is_left_out_and_what_was_said_once_is_kept(capsys):
    with Progress(100, "t", interactive=False) as progress:
        progress.update(1, {"eval/mean_reward": 7.0})
        progress.update(50, {"train/loss": 0.5})
    assert capsys.readouterr().out.splitlines()[1:] == [
        "step 1/100  1%  eval 7.0",
        "step 50/100  50%  eval 7.0  loss 0.5",
    ]


def test_percent_is_100_only_when_done():
    assert [percent(s, 1000) for s in (0, 9, 10, 999, 1000, 1008)] == [0, 0, 1, 99, 100, 100]


def test_eta_is_the_rest_at_the_present_speed_also_for_a_resumed_run():
    assert eta(40_000, 50_000, {"time/steps_per_second": 500.0}) == 20.0
    assert eta(50_008, 50_000, {"time/steps_per_second": 500.0}) == 0.0
    assert eta(0, 50_000, {"time/steps_per_second": 0.0}) is None
    assert eta(0, 50_000, {}) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (11.2, "12s"), (60, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (None, "-")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_stacked_bar_cells_are_proportional_and_fill_the_width():
    assert widths([0.5, 0.25, 0.25, 0.0], 8) == [4, 2, 2, 0]
    assert widths([1.0, 1.0, 1.0], 10) == [4, 3, 3]
    assert widths([0.3, 0.3, 0.4], 4) == [1, 1, 2]
    assert widths([0.0, 0.0], 10) == [0, 0]
    assert widths([float("nan"), 1.0], 10) == [0, 0]


def test_the_table_shows_every_part_within_80_columns(capsys):
    with Progress(50_000, "CartPole-v1 dqn", interactive=True) as progress:
        progress.update(12_000, VALUES)
        progress.update(12_500, {"eval/mean_reward": 250.0})
        text = drawn(progress)
    for part in (
        "CartPole-v1 dqn",
        "12,500 / 50,000",
        "25%",
        "ETA 13s",
        "steps/s 3,100",
        "updates/s 820",
        "training 187.3",
    ):
        assert part in text
    for part in ("samples/step 8", "lag 1", "MB/s copied 21", "limit     environments"):
        assert part in text
    for part in ("evaluation 250.0", "best 312.0", "loss 0.0123", "epsilon 0.050", "envs 40%", "waiting 5%"):
        assert part in text
    assert text.count("█") == 60 and max(map(len, text.splitlines())) <= 80
    assert "12,500 / 50,000" in capsys.readouterr().out, "close draws the last state even when just drawn"


def test_shares_of_the_time_add_up(capsys):
    with Progress(100, "t", interactive=True) as progress:
        progress.update(1, {"pipeline/env": 0.25, "pipeline/learn": 0.5, "pipeline/transfer": 0.001})
        text = drawn(progress)
    assert "envs 25%" in text and "learner 50%" in text and "other 25%" in text and "copies" not in text


def test_no_table_under_mpirun(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert is_terminal()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert not is_terminal()


def test_a_line_about_several_learners():
    assert line(1, 10, {"sync/wait": 0.24, "sync/staleness": 1.0}).endswith("waiting 24%  stale 1")


def test_a_resumed_run_shows_the_best_of_all_its_evaluations(capsys):
    with Progress(100, "t", interactive=True) as progress:
        progress.update(60, {"eval/mean_reward": 10.0, "eval/best_mean_reward": 90.0})
        progress.update(80, {"eval/mean_reward": float("nan")})
        assert "best 90.0" in drawn(progress)


def test_the_table_is_drawn_a_few_times_a_second_however_often_it_is_told(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("qfleet.runtime.progress.time.monotonic", lambda: clock[0])
    with Progress(10_000, "t", interactive=True) as progress:
        refreshes = []
        monkeypatch.setattr(progress._live, "refresh", lambda: refreshes.append(clock[0]))
        for step in range(1000):
            clock[0] = 100.0 + step / 1000
            progress.update(step, {})
    assert refreshes[:4] == [100.0, 100.25, 100.5, 100.75]
    assert len(refreshes) == 5  # and the last one of close


def test_text_is_shown_as_it_is_not_as_markup(capsys):
    with Progress(10, "[bold]env[0]", interactive=True) as progress:
        progress.message("saved [step 5] to runs/[x]")
        assert "[bold]env[0]" in drawn(progress)
    assert "saved [step 5] to runs/[x]" in capsys.readouterr().out


@pytest.mark.parametrize("interactive", [True, False])
def test_a_reader_that_goes_away_does_not_stop_the_run(monkeypatch, interactive):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with Progress(10, "t", interactive=interactive) as progress:
        progress.update(5, VALUES)
        progress.message("hello")
    assert isinstance(sys.stdout, Closed), "the live table must give sys.stdout back"


def test_line_for_negative_returns_and_huge_losses():
    assert "return -1,500.0" in line(1, 2, {"rollout/ep_rew_mean": -1500.0})
    assert "loss 1.235e+09" in line(1, 2, {"train/loss": 1234567890.0})


@pytest.mark.parametrize(
    ("env", "act", "learn", "for_actions", "for_learner", "transfer", "limit"),
    [
        (0.8, 0.1, 0.2, 0.0, 0.0, 0.0, "environments"),
        (0.2, 0.1, 0.7, 0.0, 0.0, 0.0, "learning"),
        (0.1, 0.2, 0.97, 0.0, 0.7, 0.0, "learning"),
        (0.2, 0.3, 0.6, 0.4, 0.0, 0.0, "acting"),
        (0.4, 0.1, 0.5, 0.0, 0.5, 0.0, "learning"),  # lag 0 on a GPU: what is waited for is the learner
        (0.5, 0.45, 0.6, 0.0, 0.0, 0.0, "environments"),  # the learner is busy, and nobody waits for it
        (0.3, 0.2, 0.7, 0.45, 0.0, 0.0, "acting"),
        (0.3, 0.2, 0.7, 0.0, 0.45, 0.0, "learning"),
        (0.3, 0.1, 0.15, 0.45, 0.0, 0.1, "acting"),  # a GPU that is slow to answer
        (0.05, 0.03, 0.1, 0.85, 0.0, 0.8, "copies"),
        (0.2, 0.1, 0.7, 0.0, 0.0, 0.5, "copies"),  # of batches, from a replay in main memory
        (0.6, 0.1, 0.3, 0.0, 0.0, 0.2, "environments"),
    ],
)
def test_the_bottleneck_is_named(
    env: float, act: float, learn: float, for_actions: float, for_learner: float, transfer: float, limit: str
) -> None:
    values = {
        "pipeline/env": env, "pipeline/act": act, "pipeline/learn": learn, "pipeline/transfer": transfer,
        "pipeline/wait_actions": for_actions, "pipeline/wait": for_actions + for_learner,
    }  # fmt: skip
    assert bottleneck(values).startswith(limit)
    assert line(1, 10, values).endswith(f"limit {limit}")
    assert bottleneck({}) == ""
