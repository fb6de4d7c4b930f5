import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from qfleet.plot import Curve, band, bootstrap, iqm, labels, load, plot


def make_run(
    path: Path, recipe: str = "dqn", seed: int = 1, env: str = "CartPole-v1", scale: float = 1.0, lr: float = 0.001
) -> Path:
    path.mkdir()
    config = {"env": {"id": env}, "recipe": recipe, "seed": seed, "learner": {"lr": lr}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": s, "time": 0.1 * s, "rollout/ep_rew_mean": 0.5 * scale * s} for s in range(100, 600, 100)]
    for row in rows[1::2]:
        row["eval/mean_reward"] = scale * row["step"]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def curve(steps: list[float], values: list[float]) -> Curve:
    empty = np.empty(0), np.empty(0)
    return Curve(
        env="e", recipe="r", seed=0, settings={}, steps=np.array(steps), values=np.array(values), background=empty
    )


def test_iqm_drops_a_quarter_at_each_end():
    assert iqm(np.array([100.0, 1.0, 2.0, -100.0])) == 1.5
    assert iqm(np.array([5.0, 1.0, 3.0])) == 3.0  # fewer than four: nothing to drop
    assert iqm(np.array([0.0, 9.0, 1.0, 2.0, 3.0])) == 2.0  # floor(5 / 4) = 1 at each end
    assert iqm(np.arange(8.0)) == 3.5
    np.testing.assert_array_equal(iqm(np.array([[1.0, 10.0], [3.0, 30.0]])), [2.0, 20.0])  # along axis 0


def test_bootstrap_equals_the_enumeration_of_all_resamples():
    for x in ([0.0, 1.0, 5.0], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]):
        means = [np.mean(draw) for draw in itertools.product(x, repeat=len(x))]  # each equally likely
        exact = np.percentile(means, (2.5, 97.5), method="inverted_cdf")
        found = bootstrap(np.array(x), lambda s: s.mean(axis=0), reps=20_000, seed=3)
        np.testing.assert_allclose(found, exact, atol=1e-12)
    np.testing.assert_allclose(exact, (1 / 6, 5 / 6))  # six coins: all tails has 1/64 < 2.5%, at most one head 7/64


def test_bootstrap_draws_whole_seeds_and_is_reproducible():
    x = np.random.default_rng(0).normal(size=(6, 1)) + np.zeros((6, 2))  # both columns alike in every seed
    low, high = bootstrap(x, lambda s: s[..., 0].mean(axis=0) - s[..., 1].mean(axis=0), reps=200)
    assert (low, high) == (0.0, 0.0)
    np.testing.assert_array_equal(bootstrap(x, iqm, 200, seed=1), bootstrap(x, iqm, 200, seed=1))
    assert bootstrap(x, iqm, 200)[0].shape == (2,)


def test_a_band_covers_the_common_steps_and_interpolates():
    steps, middle, low, high = band([curve([0, 100, 200], [0, 10, 20]), curve([50, 150], [25, 35])])
    np.testing.assert_array_equal(steps, [50, 100, 150])
    np.testing.assert_array_equal(middle, [15, 20, 25])  # means of (5, 25), (10, 30), (15, 35)
    np.testing.assert_array_equal(low, [5, 10, 15])
    np.testing.assert_array_equal(high, [25, 30, 35])
    with pytest.raises(ValueError, match="no steps in common"):
        band([curve([0, 10], [0, 1]), curve([20, 30], [0, 1])])


def test_a_long_log_is_thinned():
    long = curve(list(range(2000)), list(range(2000)))
    steps, middle, _, _ = band([long, long])
    assert len(steps) == 500 and (steps[0], steps[-1]) == (0, 1999)
    np.testing.assert_allclose(middle, steps)


def test_load_takes_the_rows_that_have_the_metric(tmp_path):
    run = make_run(tmp_path / "a", recipe="rainbow", seed=7, scale=2.0)
    found = load(run, "eval/mean_reward")
    assert (found.env, found.recipe, found.seed) == ("CartPole-v1", "rainbow", 7)
    assert found.steps.tolist() == [200, 400] and found.values.tolist() == [400, 800]
    assert found.background[0].tolist() == [100, 200, 300, 400, 500]
    assert load(run / "checkpoints" / "last", "eval/mean_reward").values.tolist() == [400, 800]


def test_null_values_are_left_out(tmp_path):
    run = make_run(tmp_path / "a")
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"step": 600, "time": 1, "eval/mean_reward": null}\n')
    assert load(run, "eval/mean_reward").steps.tolist() == [200, 400]


def test_a_missing_metric_lists_those_present_and_suggests(tmp_path):
    run = make_run(tmp_path / "a")
    with pytest.raises(
        ValueError,
        match=r"no values of 'eval/mean_rewrad'\. Did you mean eval/mean_reward",
    ):
        load(run, "eval/mean_rewrad")
    with pytest.raises(ValueError, match=r"'x'\. It has: eval/mean_reward, rollout/ep_rew_mean\.$"):
        load(run, "x")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="Nothing was logged yet"):
        load(run, "eval/mean_reward")


def test_what_is_no_run_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no run directory"):
        load(tmp_path, "eval/mean_reward")
    with pytest.raises(ValueError, match="is no run directory"):
        load(tmp_path / "missing", "eval/mean_reward")


def test_an_unknown_picture_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'curve\.jpeg2'.*\.png, \.svg or \.pdf"):
        plot([make_run(tmp_path / "a")], tmp_path / "curve.jpeg2")


def test_the_picture_names_what_it_shows(tmp_path):
    """SVG with text as text would depend on the fonts; matplotlib writes every string as a comment above its outlines."""
    runs = [make_run(tmp_path / f"dqn{s}", seed=s, scale=1 + s / 10) for s in range(3)]
    runs += [make_run(tmp_path / "rainbow", recipe="rainbow", seed=9, scale=20.0)]
    runs += [make_run(tmp_path / "acrobot", env="Acrobot-v1", seed=4)]
    out = tmp_path / "new" / "curve.svg"
    plot(runs, out)
    svg = out.read_text()
    for text in ("CartPole-v1", "Acrobot-v1", "environment steps", "evaluation return", "8,000"):
        assert f"<!-- {text} -->" in svg
    for label in ("dqn (IQM of 3 runs, 95% interval)", "rainbow (seed 9)", "training", "dqn (seed 4)"):
        assert f"<!-- {label} -->" in svg


def test_runs_with_other_settings_are_not_taken_for_seeds(tmp_path):
    runs = [make_run(tmp_path / f"a{s}", seed=s) for s in range(2)]
    runs += [make_run(tmp_path / f"b{s}", seed=s, lr=0.01, scale=3.0) for s in range(2)]
    assert labels([load(run, "eval/mean_reward") for run in runs]) == 2 * ["dqn, lr 0.001"] + 2 * ["dqn, lr 0.01"]
    assert labels([load(run, "eval/mean_reward") for run in runs[:2]]) == ["dqn", "dqn"]
    lag = [
        replace(load(run, "eval/mean_reward"), settings={"runtime.lag": i, "runtime.keep": i})
        for i, run in enumerate(runs[:2])
    ]
    assert labels(lag) == ["dqn, lag 0", "dqn, lag 1"]
    plot(runs, tmp_path / "curve.svg")
    svg = (tmp_path / "curve.svg").read_text()
    assert "<!-- dqn, lr 0.01 (IQM of 2 runs, 95% interval) -->" in svg


def test_of_several_folders_those_that_are_no_runs_are_left_out(tmp_path):
    (tmp_path / "empty").mkdir()
    lines = plot([make_run(tmp_path / "a"), tmp_path / "empty"], tmp_path / "curve.svg")
    assert len(lines) == 1 and "empty is no run directory" in lines[0]
    with pytest.raises(ValueError, match="is no run directory"):
        plot([tmp_path / "empty", tmp_path / "empty"], tmp_path / "curve.svg")


def test_a_legend_of_many_runs_covers_no_curve_and_all_of_them_differ(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: (drawn.append(self), save(self, *args, **kwargs)))  # fmt: skip
    for count in (3, 9):
        runs = [make_run(tmp_path / f"{count}-{i}", recipe=f"recipe {i}") for i in range(count)]
        plot(runs, tmp_path / "curve.png")
    outside = []
    for figure in drawn:
        (axes,) = figure.axes
        legend = axes.get_legend().get_window_extent()
        outside.append(legend.x0 >= axes.get_window_extent().x1)
        looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines if line.get_marker() == "o"}
        assert len(looks) == len(axes.lines) / 2
    assert outside == [False, True]


def test_long_labels_are_broken_and_what_was_left_to_the_machine_is_no_difference(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    runs = []
    settings = {"batch_size": 64, "target_interval": 20, "n_step": 3, "weight_decay": 0.1, "grad_clip": 5.0, "momentum": 0.5}  # fmt: skip
    for i, more in enumerate(
        ({"precision": "auto"}, {"precision": "fp32", **settings}, {"precision": "fp32", "lr": 0.1})
    ):
        runs.append(make_run(tmp_path / f"{i}", recipe="munchausen"))
        config = yaml.safe_load((runs[-1] / "config.yaml").read_text())
        config["learner"] |= dict.fromkeys(settings, 0) | more
        (runs[-1] / "config.yaml").write_text(yaml.safe_dump(config))
    named = labels([load(run, "eval/mean_reward") for run in runs])
    assert all("precision" not in name and "weight_decay" in name for name in named)
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: (save(self, *args, **kwargs), drawn.append(self)))  # fmt: skip
    plot(runs, tmp_path / "curve.png")
    (axes,) = drawn[0].axes
    legend, panel, whole = axes.get_legend().get_window_extent(), axes.get_window_extent(), drawn[0].bbox
    assert legend.x0 >= panel.x1 and legend.x1 <= whole.x1 and panel.width > 0.5 * whole.width


def test_a_png_is_twice_900_by_500(tmp_path):
    plot([make_run(tmp_path / "a")], tmp_path / "curve.png", metric="rollout/ep_rew_mean")
    header = (tmp_path / "curve.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")) == (1800, 1000)
