import json
import math
import struct
from pathlib import Path

import pytest

from qfleet.runtime.metrics import Metrics, read
from qfleet.runtime.tensorboard import masked_crc


def lines(run_dir: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_time(rows: list[dict[str, float | None]]) -> list[dict[str, float | None]]:
    return [{k: v for k, v in row.items() if k != "time"} for row in rows]


def tensorboard_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What the real TensorBoard shows for a run directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir), size_guidance={"tensors": 0, "scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.write(8, {"train/loss": 0.5})
    metrics.write(16, {"train/loss": 0.25, "eval/mean_reward": 500})
    assert without_time(lines(tmp_path)) == [
        {"step": 8, "train/loss": 0.5},
        {"step": 16, "train/loss": 0.25, "eval/mean_reward": 500.0},
    ]
    times = [row["time"] for row in lines(tmp_path)]
    assert 0 <= times[0] <= times[1] < 60
    assert metrics.position() == (tmp_path / "metrics.jsonl").stat().st_size
    metrics.close()


def test_nan_and_infinity_are_null_and_come_back_as_nan(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300})
    metrics.close()
    (row,) = lines(tmp_path)
    assert (row["a"], row["b"], row["c"], row["d"]) == (None, None, None, 1e300)
    (back,) = read(tmp_path)
    assert math.isnan(back["a"]) and math.isnan(back["b"]) and back["d"] == 1e300
    shown = tensorboard_scalars(tmp_path)  # float32 cannot hold 1e300: an exploding value is shown as infinite
    assert shown["b"] == [(1, math.inf)] and shown["c"] == [(1, -math.inf)] and shown["d"] == [(1, math.inf)]


def test_resume_cuts_the_file_to_the_byte_and_goes_on(tmp_path):
    first = Metrics(tmp_path)
    first.write(10, {"x": 1})
    position, kept = first.position(), (tmp_path / "metrics.jsonl").read_bytes()
    first.write(20, {"x": 2})
    first.write(30, {"x": 3})
    first.close()
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(b'{"step": 40, "x"')  # killed in the middle of a line

    resumed = Metrics(tmp_path, resume_bytes=position)
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept
    resumed.write(20, {"x": 5})
    assert resumed.position() == (tmp_path / "metrics.jsonl").stat().st_size
    resumed.close()
    assert without_time(lines(tmp_path)) == [{"step": 10, "x": 1.0}, {"step": 20, "x": 5.0}]
    # TensorBoard must not show the values of steps 20 and 30 that the resumed run took back.
    assert tensorboard_scalars(tmp_path) == {"x": [(10, 1.0), (20, 5.0)]}


def test_time_goes_on_after_a_resume(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "time": 1000.0}\n')
    resumed = Metrics(tmp_path, resume_bytes=(tmp_path / "metrics.jsonl").stat().st_size)
    resumed.write(20, {})
    resumed.close()
    assert 1000.0 <= lines(tmp_path)[1]["time"] < 1060.0


def test_a_resume_before_the_first_line_forgets_everything(tmp_path):
    first = Metrics(tmp_path)
    first.write(10, {"x": 1})
    first.close()
    resumed = Metrics(tmp_path, resume_bytes=0)
    resumed.write(5, {"x": 2})
    resumed.close()
    assert without_time(lines(tmp_path)) == [{"step": 5, "x": 2.0}]
    assert tensorboard_scalars(tmp_path) == {"x": [(5, 2.0)]}


def test_a_log_shorter_than_the_checkpoint_says_is_refused_and_a_deleted_one_starts_anew(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "time": 1.0}\n')
    with pytest.raises(ValueError, match=r"holds 26 bytes, but 99 when.*delete it to resume"):
        Metrics(tmp_path, resume_bytes=99)
    (tmp_path / "metrics.jsonl").unlink()
    resumed = Metrics(tmp_path, resume_bytes=99)
    resumed.write(100, {"x": 1})
    assert resumed.position() == (tmp_path / "metrics.jsonl").stat().st_size
    resumed.close()


def test_a_new_log_leaves_the_events_of_other_programs_alone(tmp_path):
    theirs = tmp_path / "events.out.tfevents.1700000000.host.name.4242.0"
    theirs.touch()
    for _ in range(2):  # the second takes the place of the first
        Metrics(tmp_path).close()
    events = list(tmp_path.glob("events.out.tfevents.*"))
    assert theirs in events and len(events) == 2


def test_a_full_disk_is_an_oserror(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = Metrics(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        metrics.write(1, {"x": 1})
    metrics.close()


def test_an_unwritable_run_directory_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        Metrics(tmp_path / "missing")


def test_read_leaves_out_a_line_still_being_written_and_names_a_broken_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0.5, "x": null}\n{"step": 2, "ti')
    (row,) = read(tmp_path)
    assert row["step"] == 1 and math.isnan(row["x"])
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is no JSON object"):
        read(tmp_path)


def test_tensorboard_reads_what_was_written(tmp_path):
    metrics = Metrics(tmp_path)
    for step in (1, 200, 3_000_000_000):  # steps of 1, 2 and 5 varint bytes
        metrics.write(step, {"train/loss": step / 7, "rollout/ep_rew_mean": -21.0, "x" * 200: 0.0})
    metrics.close()
    shown = tensorboard_scalars(tmp_path)
    float32 = [struct.unpack("<f", struct.pack("<f", step / 7))[0] for step in (1, 200, 3_000_000_000)]
    assert shown["train/loss"] == list(zip((1, 200, 3_000_000_000), float32, strict=True))
    assert shown["rollout/ep_rew_mean"] == [(1, -21.0), (200, -21.0), (3_000_000_000, -21.0)]
    assert len(shown["x" * 200]) == 3


def test_every_record_passes_tensorboards_own_checksum(tmp_path):
    """EventAccumulator may skip a damaged record silently; the record reader of the package does not."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    from tensorboard.summary.writer.record_writer import masked_crc32c

    assert masked_crc(b"123456789") == masked_crc32c(b"123456789")
    metrics = Metrics(tmp_path)
    metrics.write(1, {"a": 1.0})
    metrics.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    reader = PyRecordReader_New(str(path))
    records = 0
    while True:
        try:
            reader.GetNext()
        except Exception as end:  # its end-of-file type moved between releases
            assert type(end).__name__ == "OutOfRangeError", end
            break
        records += 1
    assert records == 2  # the version and one summary
