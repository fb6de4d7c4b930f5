"""The command line without the training behind it: parsing, messages, exit codes. (Whole runs: test_api.py.)"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import qfleet
from qfleet import cli
from qfleet.cli import Command, main, parse, program
from qfleet.config import Config, ConfigError, override, paths

RESULT = SimpleNamespace(
    env="CartPole-v1", step=50_000, episodes=2, mean_return=499.5, std_return=0.5, returns=[499.0, 500.0], epsilon=0.0
)


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(qfleet.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root, **env}
    )


# --- train: argv -> arguments of qfleet.train --------------------------------------------------------------------


def test_train_passes_on_only_what_was_typed():
    assert parse(["train", "CartPole-v1"]) == Command("train", {"env": "CartPole-v1", "overrides": {}})


def test_train_separates_named_arguments_from_overrides_and_types_them():
    argv = "train pong --recipe rainbow --seed 3 --total-steps 1e6 --run-dir out --device cpu --replay.capacity 5000"
    argv += " --learner.lr=2.5e-4 --network.hidden 64,32 --runtime.stop-at -100 --num-envs 4"
    assert parse(argv.split()).args == {
        "env": "pong",
        "recipe": "rainbow",
        "seed": 3,
        "total_steps": 1_000_000,
        "run_dir": "out",
        "device": "cpu",
        "overrides": {
            "replay.capacity": 5000,
            "learner.lr": 2.5e-4,
            "network.hidden": (64, 32),
            "runtime.stop_at": -100.0,
            "env.num_envs": 4,
        },
    }


def test_every_setting_has_a_flag_and_its_default_survives_the_way_through_it():
    config = Config()
    for path, _, hint in paths():
        if path in ("env.id", "env.kwargs"):
            continue
        section, _, name = path.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        text = (
            ",".join(map(str, value))
            if isinstance(value, tuple)
            else str(value).lower()
            if hint is bool
            else str(value)
        )
        args = parse(["train", "x", f"{cli.flag_of(path)}={text}"]).args
        assert (args if path in cli.TOP_LEVEL else args["overrides"])[path] == value, path


@pytest.mark.parametrize(
    "spelling", ["--replay.min-steps", "--replay.min_steps", "--replay.min-steps=7", "--replay.min_steps=7"]
)
def test_dashes_and_underscores_are_the_same(spelling):
    argv = ["train", "x", spelling] + ([] if "=" in spelling else ["7"])
    assert parse(argv).args["overrides"] == {"replay.min_steps": 7}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("x --learner.double", True),
        ("--learner.double x", True),
        ("--learner.double true x", True),
        ("x --learner.double false", False),
        ("x --learner.double=off", False),
        ("x --learner.double NO", False),
        ("--learner.double --seed 4 x", True),
    ],
)
def test_booleans_alone_or_with_a_value(words, value):
    args = parse(["train", *words.split()]).args
    assert args["env"] == "x" and args["overrides"] == {"learner.double": value}


def test_env_kwargs_are_read_as_yaml():
    argv = "train x --env-kwargs size=5 slippery=false map=4x4 --env.kwargs scale=0.5 name="
    assert parse(argv.split()).args["overrides"] == {
        "env.kwargs": {"size": 5, "slippery": False, "map": "4x4", "scale": 0.5, "name": None}
    }


def test_the_parsed_overrides_are_what_the_config_takes():
    overrides = parse(["train", "x", "--learner.double", "--env-kwargs", "a=1", "--network.dist", "c51"]).args[
        "overrides"
    ]
    config = override(Config(), overrides)
    assert config.learner.double and config.env.kwargs == {"a": 1} and config.network.dist == "c51"


def test_config_and_resume_need_no_environment():
    assert parse(["train", "--config", "f.yaml"]).args == {"config": "f.yaml", "overrides": {}}
    assert parse(["train", "--resume", "d", "--total-steps", "9"]).args == {
        "resume": "d",
        "total_steps": 9,
        "overrides": {},
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("train", "which environment"),
        ("train x --replay.capcity 5", r"--replay\.capcity: unknown\. Did you mean --replay\.capacity\?"),
        ("train --replay.capcity=5 x", r"--replay\.capcity: unknown\. Did you mean --replay\.capacity\?"),
        ("train x --lr 1", r"--lr: unknown\. Did you mean --learner\.lr\?"),
        ("train x --total_step 1", r"--total_step: unknown\. Did you mean --total-steps\?"),
        ("train x --learner.lr fast", r"learner\.lr is 'fast', but it must be a number"),
        ("train x --seed 1.5", "seed is '1.5', but it must be a whole number"),
        ("train x --learner.double=maybe", "must be true or false"),
        ("train x --network.dist c15", "allowed: scalar, c51, qr, iqn. Did you mean c51"),
        (
            "train x --sync gossip",
            r"sync\.mode is 'gossip'; allowed: sync, async, window, ssp, localsgd, diloco, easgd, admm",
        ),
        ("train x --sync.codec int4", "allowed: fp32, bf16, int8, topk, powersgd. Did you mean int8"),
        ("train x --learner.lr", "expected one argument"),
        ("train x y", "unrecognized arguments: y"),
        ("train --env-kwargs a=1 x", "takes key=value pairs, not 'x'"),
        ("trian x", "there is no command 'trian'. Did you mean train"),
        ("eval", "required: RUN"),
        ("eval r --jsn", r"--jsn: unknown\. Did you mean --json"),
        ("eval r --episodes many", "invalid int value: 'many'"),
        ("plot", "required: RUN"),
        ("recipes x", "unrecognized arguments: x"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, capsys):
    with pytest.raises(ConfigError, match=message):
        parse(argv.split())
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("qfleet: error: ") and err.count("\n") == 1


@pytest.mark.parametrize("learners", ["1", "2"])
def test_batches_larger_than_the_replay_are_refused(learners, tmp_path, capsys):
    words = ["train", "CartPole-v1", "--learners", learners, "--learner.batch-size", "3000", "--replay.capacity", "4000" if learners == "2" else "2000"]  # fmt: skip
    assert main([*words, "--run-dir", str(tmp_path / "run")]) == 2
    assert "is more than replay.capacity has rows" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_the_other_commands():
    assert parse(["eval", "r"]) == Command(
        "eval", {"run": "r", "episodes": 20, "seed": None, "epsilon": None, "device": "auto", "json": False}
    )
    assert parse(["eval", "r", "--episodes", "3", "--seed", "7", "--json"]).args == {
        "run": "r",
        "episodes": 3,
        "seed": 7,
        "epsilon": None,
        "device": "auto",
        "json": True,
    }
    assert parse(["plot", "a", "b", "-o", "f.svg"]).args == {
        "runs": ["a", "b"],
        "out": "f.svg",
        "metric": "eval/mean_reward",
    }
    assert parse(["video", "r", "-o", "f.gif", "--fps", "60"]).args == {
        "run": "r",
        "out": "f.gif",
        "episodes": 1,
        "seed": 0,
        "fps": 60,
    }
    assert parse([]) == parse(["--help"]) == parse(["-h"]) == Command("help", {})
    assert parse(["doctor"]) == Command("doctor", {}) and parse(["recipes"]) == Command("recipes", {})


# --- what is printed, and exit codes -----------------------------------------------------------------------------


def test_overview_version_recipes_and_doctor(capsys):
    assert main(["--help"]) == 0
    assert "qfleet train CartPole-v1" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qfleet {qfleet.__version__}\n"
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(qfleet.recipes.NAMES)]] == list(qfleet.recipes.NAMES)
    assert main(["doctor"]) == 0
    assert "python" in capsys.readouterr().out


def test_train_help_lists_every_flag_with_its_help_and_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for path, field, _ in paths():
        if path != "env.id":
            assert f"{cli.flag_of(path)} " in text
            assert " ".join(field.metadata["help"].split()) in text
    assert "rows of experience kept, over all environments [100000]" in text
    assert (
        "--num-envs N" in text
        and "double DQN: the online network selects, the target network evaluates [false]" in text
    )
    assert "--network.dist {scalar,c51,qr,iqn}" in text and "widths of the fully connected layers [256,256]" in text


@pytest.mark.parametrize("command", ["eval", "plot", "video", "recipes", "doctor"])
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"usage: qfleet {command}" in capsys.readouterr().out


def test_eval_prints_a_sentence_or_json(monkeypatch, capsys):
    from qfleet.runtime.evaluation import Evaluation

    calls = []

    def evaluate(run, episodes, seed, epsilon, device):
        calls.append((run, episodes, seed, epsilon, device))
        return Evaluation(**{**vars(RESULT), "epsilon": epsilon or 0.0})

    monkeypatch.setattr(qfleet, "evaluate", evaluate, raising=False)
    assert main(["eval", "r", "--episodes", "2", "--seed", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == vars(RESULT)
    assert list(vars(RESULT)) == ["env", "step", "episodes", "mean_return", "std_return", "returns", "epsilon"]
    assert main(["eval", "r"]) == 0
    assert "CartPole-v1 at step 50,000: return 499.5 ± 0.5 over 2 greedy episodes." in capsys.readouterr().out
    assert main(["eval", "r", "--epsilon", "0.05", "--device", "cpu"]) == 0
    assert "over 2 episodes, 0.05 of the actions random." in capsys.readouterr().out
    assert calls == [("r", 2, 5, None, "auto"), ("r", 20, None, None, "auto"), ("r", 20, None, 0.05, "cpu")]


@pytest.mark.parametrize(("number", "code"), [(None, 0), (2, 130), (15, 143)])
def test_train_ends_with_the_result_and_the_next_commands(number, code, monkeypatch, capsys):
    def train(**args):
        assert args == {"env": "CartPole-v1", "overrides": {"learner.double": True}}
        run_dir = Path("runs/my run")
        return SimpleNamespace(
            dir=run_dir,
            evaluation=RESULT,
            rank=0,
            interrupted=number is not None,
            signal=number,
            seconds=12.34,
            last_evaluation=(60_000, 83.2),
        )

    monkeypatch.setattr(qfleet, "train", train, raising=False)
    assert main(["train", "CartPole-v1", "--learner.double"]) == code
    out = capsys.readouterr().out
    assert "after 12.3 s. CartPole-v1 at step 50,000: return 499.5" in out
    assert "the last one, at step 60,000, had 83.2" in out
    assert "Run directory: runs/my run\n" in out and "  qfleet eval 'runs/my run'\n" in out
    assert (
        "  qfleet plot 'runs/my run' -o curve.png\n" in out and "  qfleet video 'runs/my run' -o episode.mp4\n" in out
    )
    assert ("qfleet train --resume 'runs/my run'" in out) == (number is not None)


def test_the_next_commands_name_the_program_as_it_can_be_called(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [str(tmp_path / ".venv/bin/qfleet"), "train"])
    assert program() == ".venv/bin/qfleet"
    (tmp_path / "qfleet").write_text("#!/bin/sh\n")
    (tmp_path / "qfleet").chmod(0o755)
    assert program() == "qfleet"


def raising(error):
    def evaluate(*args):
        raise error

    return evaluate


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("two\n  lines"), 2, "two lines"),
        (
            OSError(28, "No space left on device", "runs/x/metrics.jsonl"),
            1,
            "No space left on device: runs/x/metrics.jsonl",
        ),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (OSError("only text"), 1, "only text"),
        (MemoryError("replay needs 90 GB"), 1, "replay needs 90 GB"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_expected_errors_are_one_line(error, code, line, monkeypatch, capsys):
    monkeypatch.setattr(qfleet, "evaluate", raising(error), raising=False)
    assert main(["eval", "r"]) == code
    assert capsys.readouterr().err == f"qfleet: error: {line}\n"


def test_a_diverged_run_is_one_line(monkeypatch, capsys):
    from qfleet.runtime.failing import TrainingError

    def train(**args):
        raise TrainingError("the loss is no longer a finite number")

    monkeypatch.setattr(qfleet, "train", train, raising=False)
    assert main(["train", "x"]) == 1
    assert capsys.readouterr().err == "qfleet: error: the loss is no longer a finite number\n"


def test_a_run_that_is_not_there_and_one_that_never_came_to_a_checkpoint(tmp_path, capsys):
    for words in (["eval", "nothere"], ["train", "--resume", "nothere"]):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("qfleet: error: there is no run at 'nothere'. Name a run directory")
    run = tmp_path / "run"
    words = ["train", "CartPole-v1", "--total-steps", "600", "--run-dir", str(run), "--device", "cpu"]
    assert main(words) == 0
    shutil.rmtree(run / "checkpoints")
    (run / "events.out.tfevents.0000000000.0000.elsewhere.1").touch()
    (run / "learners/1/checkpoints/step_000000600").mkdir(parents=True)
    assert "its place" not in capsys.readouterr().out
    assert main(["eval", str(run)]) == 2
    assert "holds no checkpoint: the run ended before its first one" in capsys.readouterr().err
    assert main(words) == 0
    assert (
        f"{run} held a run that ended before its first checkpoint: this one begins anew, in its place"
        in capsys.readouterr().out
    )
    for saved in (run / "checkpoints").glob("*_*"):  # killed while it was written
        saved.rename(saved.with_name(saved.name + ".tmp"))
        (run / "checkpoints" / f"{saved.name}.tmp/manifest.json").unlink()
    assert main(words) == 2
    assert f"Go on with `qfleet train --resume {run}`" in capsys.readouterr().err
    assert main(["train", "--resume", str(run)]) == 0
    assert "begins anew, in its place" in capsys.readouterr().out
    assert not list((run / "checkpoints").glob("*.tmp"))
    assert len(list(run.glob("events.out.*"))) == 1 and not (run / "learners").exists()


def test_a_value_error_of_ours_is_one_line_and_one_from_elsewhere_keeps_its_traceback(monkeypatch, tmp_path, capsys):
    assert main(["plot", str(tmp_path)]) == 2  # a plain ValueError of qfleet.plot
    assert "is no run directory" in capsys.readouterr().err
    monkeypatch.setattr(qfleet, "evaluate", raising(ValueError("a bug in a user's environment")), raising=False)
    with pytest.raises(ValueError, match="a bug"):
        main(["eval", "r"])
    monkeypatch.setattr(qfleet, "evaluate", raising(RuntimeError("unexpected")), raising=False)
    with pytest.raises(RuntimeError):
        main(["eval", "r"])


def test_an_environment_that_calls_sys_exit_does_not_pass_for_a_success(monkeypatch):
    monkeypatch.setattr(qfleet, "evaluate", raising(SystemExit()), raising=False)
    with pytest.raises(RuntimeError, match=r"the environment called sys.exit\(\)\. Let it raise an error"):
        main(["eval", "r"])


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("QFLEET_DEBUG", "1")
    monkeypatch.setattr(qfleet, "evaluate", raising(OSError(28, "No space left on device")), raising=False)
    with pytest.raises(OSError):
        main(["eval", "r"])


def test_a_reader_that_leaves_is_no_error_but_a_broken_worker_pipe_is(monkeypatch, capfd):
    code = "import sys; from qfleet.cli import main; sys.exit(main(['recipes']))"
    read, write = os.pipe()
    os.close(read)
    root = str(Path(qfleet.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
    monkeypatch.setattr(qfleet, "evaluate", raising(BrokenPipeError(32, "Broken pipe")), raising=False)
    assert main(["eval", "r"]) == 1
    assert capfd.readouterr().err == "qfleet: error: Broken pipe\n"


# --- start-up ----------------------------------------------------------------------------------------------------

HEAVY = ("torch", "ray", "gymnasium", "matplotlib", "rich", "numpy", "numba", "ale_py", "imageio")


@pytest.mark.parametrize(
    "code",
    [
        "import qfleet, qfleet.cli",
        "from qfleet.cli import main; main(['--help'])",
        "from qfleet.cli import main; main(['train', '--help'])",
        "from qfleet.cli import main; main(['recipes'])",
        "from qfleet.cli import main; main(['train', 'x', '--replay.capcity', '5'])",
    ],
)
def test_help_and_import_load_nothing_heavy(code):
    done = python(f"{code}\nimport sys; print('loaded', [m for m in {HEAVY} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_python_m_qfleet(tmp_path):
    done = python("import runpy, sys; sys.argv = ['qfleet', 'trian']; runpy.run_module('qfleet', run_name='__main__')")
    assert done.returncode == 2
    assert done.stderr == "qfleet: error: there is no command 'trian'. Did you mean train? See `qfleet --help`.\n"
