"""The command line: parse, call the Python API, print.

`parse` is pure: argv in, the name of a command and the arguments for its function out. The flags of `train` are the
config tree itself; only those typed are passed on, because the defaults depend on the recipe and the environment.
Nothing here imports torch, gymnasium, matplotlib or rich before a command needs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import select
import shlex
import shutil
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

import qfleet
from qfleet import machine
from qfleet.config import ConfigError, convert, paths, setting, suggest

if typing.TYPE_CHECKING:
    from qfleet.runtime.evaluation import Evaluation

OVERVIEW = """\
qfleet trains DQN-family agents as fast as the hardware allows.

usage: qfleet COMMAND [...]

  train ENV        train an agent; ENV is a gymnasium id, module:Id, or an Atari game such as pong
  train --resume   go on exactly where the last checkpoint of a run stopped
  eval RUN         play episodes with a trained agent
  plot RUN...      learning curves; several seeds of a recipe become one band
  video RUN        record an episode
  recipes          the algorithms there are, and what each is good for
  doctor           what this machine has, and how to add what is missing

examples:
  qfleet train CartPole-v1
  qfleet train pong --recipe rainbow --seed 3 --replay.capacity 200000
  qfleet train CartPole-v1 --learners 2 --learner.batch-size 64
  qfleet train --resume runs/CartPole-v1/dqn-s1-20260101-120000
  qfleet plot runs/CartPole-v1/* -o curve.png

`qfleet COMMAND --help` lists every flag. QFLEET_DEBUG=1 shows tracebacks.
"""

TOP_LEVEL = ("recipe", "seed", "total_steps", "run_dir", "device")  # arguments of qfleet.train with their own name
ALIASES = {"env.num_envs": "--num-envs", "env.kwargs": "--env-kwargs", "sync.mode": "--sync"}
BOOLEANS = {"true", "false", "yes", "no", "on", "off", "1", "0"}
SECTIONS = {
    "env": "environment",
    "network": "network",
    "replay": "replay",
    "learner": "learner",
    "acting": "acting and exploration",
    "runtime": "schedule, evaluation and checkpoints",
    "sync": "several learners",
}


@dataclass(frozen=True)
class Command:
    """What was asked for: a command and the keyword arguments of the function behind it."""

    name: str
    args: dict[str, Any]


# --- parsing -----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse with our way of reporting errors: one line, by main."""

    def __init__(self, command: str, description: str, usage: str | None = None) -> None:
        super().__init__(
            prog=f"qfleet {command}",
            description=description,
            usage=usage,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


def parse(argv: Sequence[str]) -> Command:
    """The command that argv (without the program's name) asks for; ConfigError says what is wrong with it."""
    if not argv or argv[0] in ("-h", "--help"):
        return Command("help", {})
    if argv[0] in ("-V", "--version"):
        return Command("version", {})
    name, rest = argv[0], argv[1:]
    if name not in PARSERS:
        raise ConfigError(f"there is no command {name!r}.{suggest(name, PARSERS, count=1)} See `qfleet --help`.")
    parser = PARSERS[name]()
    args = vars(parser.parse_args(tidy(rest, parser)))
    return Command(name, _train_args(args) if name == "train" else args)


def tidy(argv: Iterable[str], parser: Parser) -> list[str]:
    """Flags in the spelling argparse knows (- for _, booleans with their value); an unknown one is refused here.

    A boolean takes the next word only if that is one, so that `--learner.double CartPole-v1` means what it says.
    """
    known = parser._option_string_actions
    booleans = {flag_of(path) for path, _, hint in paths() if hint is bool}
    words, out = list(argv), []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            out.append(word)
            continue
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag not in known:
            names = [path for path, _, _ in paths()]
            meant = flag_of(setting(name[2:].replace("-", "_"), names))  # --lr, --learning-rate: --learner.lr
            raise ConfigError(f"{name}: unknown.{suggest(meant, known, count=1)} See `{parser.prog} --help`.")
        if (
            not equals and words and re.fullmatch(r"-\.?\d.*", words[0])
        ):  # a negative number, which argparse takes for a flag
            equals, value = "=", words.pop(0)
        if flag in booleans and not equals:
            equals, value = "=", words.pop(0) if words and words[0].lower() in BOOLEANS else "true"
        out.append(flag + equals + value)
    return out


def flag_of(path: str) -> str:
    return "--" + path.replace("_", "-")


def train_parser() -> Parser:
    parser = Parser(
        "train",
        "Train an agent. Defaults in brackets are the general ones: the recipe and the environment change some of "
        "them, a YAML file overrides those, and a flag overrides everything. The run's config.yaml shows the result. "
        "A true|false flag alone means true.",
        usage="qfleet train ENV [--recipe NAME] [--config F.yaml] [--seed N] [--total-steps N] [--section.field VALUE ...]\n"
        "       qfleet train --resume DIR",
    )
    parser.add_argument("env", nargs="?", metavar="ENV", help="gymnasium id, module:Id, or an Atari game such as pong")
    parser.add_argument(
        "--config", metavar="F.yaml", help="settings from a YAML file, such as another run's config.yaml"
    )
    parser.add_argument("--resume", metavar="DIR", help="go on where the last checkpoint of this run stopped")
    groups = {section: parser.add_argument_group(title) for section, title in SECTIONS.items()}
    for path, field, hint in paths():
        if path == "env.id":
            continue  # positional
        flags = [alias for p, alias in ALIASES.items() if p == path] + [flag_of(path)]
        many: dict[str, Any] = {"nargs": "+", "action": "extend"} if typing.get_origin(hint) is dict else {}
        target = groups.get(path.partition(".")[0], parser)
        target.add_argument(*flags, dest=path, metavar=_metavar(hint), help=_help(field), **many)
    return parser


def _metavar(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "{" + ",".join(typing.get_args(hint)) + "}"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is tuple:
        return "N,N"
    return {int: "N", float: "X", bool: "true|false", str: "NAME"}.get(hint, "K=V")


def _help(field: dataclasses.Field[Any]) -> str:
    text, default = str(field.metadata["help"]), field.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    shown = default not in (dataclasses.MISSING, None, "", "custom")
    return (f"{text} [{str(default).lower()}]" if shown else text).replace("%", "%%")


def _train_args(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments for qfleet.train: typed values, and `overrides` for the settings inside sections."""
    hints = {path: hint for path, _, hint in paths()}
    out: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    for name, value in args.items():
        if name in hints:
            value = _pairs(value) if name == "env.kwargs" else convert(name, value, hints[name])
        if name in hints and name not in TOP_LEVEL:
            overrides[name] = value
        else:
            out[name] = value
    if not args.keys() & {"env", "config", "resume"}:
        raise ConfigError("which environment? For example: qfleet train CartPole-v1")
    return out | {"overrides": overrides}


def _pairs(words: Sequence[str]) -> dict[str, Any]:
    """['size=5', 'slippery=false'] -> {'size': 5, 'slippery': False}; values are read as YAML."""
    out = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--env-kwargs takes key=value pairs, not {word!r}. (Put ENV before it.)")
        try:
            out[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            out[key] = value
    return out


def eval_parser() -> Parser:
    parser = Parser("eval", "Play episodes with the best weights of a run, or with those of a checkpoint in it.")
    parser.add_argument("run", metavar="RUN", help="run directory, or a checkpoint in it")
    parser.add_argument("--episodes", type=int, default=20, metavar="N", help="episodes to play [20]")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="seed of the episodes [from the run]")
    parser.add_argument("--epsilon", type=float, default=None, metavar="P", help="part of random actions [as the run's evaluations: 0.01 in Atari, else 0, greedy]")  # fmt: skip
    parser.add_argument(
        "--device", default="auto", metavar="D", help="cpu, cuda, or auto: the one that answers sooner [auto]"
    )
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON object")
    return parser


def plot_parser() -> Parser:
    parser = Parser(
        "plot",
        "Learning curves. Runs that differ in their seed alone become one band (IQM, 95% interval).",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument(
        "-o", "--out", default="curve.png", metavar="F.png", help="picture: .png, .svg or .pdf [curve.png]"
    )
    parser.add_argument("--metric", default="eval/mean_reward", metavar="M", help="what to draw [eval/mean_reward]")
    return parser


def video_parser() -> Parser:
    parser = Parser("video", "Record episodes, played as evaluations are.")
    parser.add_argument("run", metavar="RUN", help="run directory, or a checkpoint in it")
    parser.add_argument("-o", "--out", default="episode.mp4", metavar="F.mp4", help="video: .mp4 or .gif [episode.mp4]")
    parser.add_argument("--episodes", type=int, default=1, metavar="N", help="episodes to record [1]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first episode [0]")
    parser.add_argument("--fps", type=int, default=30, metavar="N", help="frames per second [30]")
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "train": train_parser,
    "eval": eval_parser,
    "plot": plot_parser,
    "video": video_parser,
    "recipes": lambda: Parser("recipes", "The algorithms there are, and what each is good for."),
    "doctor": lambda: Parser("doctor", "What this machine has for training, and how to add what is missing."),
}

# --- commands ----------------------------------------------------------------------------------------------------


def train(**args: Any) -> int:
    from qfleet.runtime.failing import TrainingError
    from qfleet.runtime.team import TeamError, command
    from qfleet.sync.wire import Unreachable

    try:
        run = qfleet.train(**args)
    except (TrainingError, TeamError, Unreachable) as e:
        if os.environ.get("QFLEET_DEBUG"):
            raise
        if e.__cause__ is not None:  # where the code of a learner failed, which may be the user's
            print(e.__cause__, file=sys.stderr)
        return fail(e, 1)
    if run.rank:  # the first learner speaks for all
        return 0
    folder, qf = shlex.quote(str(run.dir)), program()
    result = sentence(run.evaluation) if run.evaluation is not None else "A checkpoint was saved."
    print(f"\n{'Interrupted' if run.interrupted else 'Trained'} after {run.seconds:.1f} s. {result}")
    last = run.last_evaluation
    if run.evaluation is not None and last is not None and last[0] != run.evaluation.step:
        print(f"These are the weights of the best evaluation; the last one, at step {last[0]:,}, had {last[1]:,.1f}.")
    print(f"Run directory: {run.dir}\n\nNext:")
    if run.interrupted:
        print(f"  {qf if command() == 'qfleet' else command()} train --resume {folder}")
    print(f"  {qf} eval {folder}")
    print(f"  {qf} plot {folder} -o curve.png")
    needs = "" if find_spec("imageio_ffmpeg") else f"  (first: {machine.install('video')})"
    print(f"  {qf} video {folder} -o episode.mp4{needs}")
    return 0 if run.signal is None else 128 + run.signal


def program() -> str:
    """How this program can be called from here: `qfleet` where the shell finds it, else the path it was called by."""
    called = Path(sys.argv[0])
    if shutil.which("qfleet") or called.name != "qfleet":
        return "qfleet"
    return shlex.quote(os.path.relpath(called))


def evaluate(run: str, episodes: int, seed: int | None, epsilon: float | None, device: str, json: bool) -> int:
    result = qfleet.evaluate(run, episodes, seed, epsilon, device)
    if json:
        from json import dumps

        print(dumps(dataclasses.asdict(result)))
    else:
        print(sentence(result))
        print(f"lowest {min(result.returns):,.1f}, highest {max(result.returns):,.1f}")
    return 0


def sentence(e: Evaluation) -> str:
    return f"{e.env} at step {e.step:,}: return {e.mean_return:,.1f} ± {e.std_return:,.1f} over {e.episodes} {'greedy episodes' if not e.epsilon else f'episodes, {e.epsilon:.3g} of the actions random'}."


def plot(runs: list[str], out: str, metric: str) -> int:
    from qfleet.plot import plot as draw

    for line in draw([Path(run) for run in runs], Path(out), metric):
        print(line)
    print(f"wrote {out}")
    return 0


def video(run: str, out: str, episodes: int, seed: int, fps: int) -> int:
    from qfleet.video import record

    returns = record(run, Path(out), episodes=episodes, seed=seed, fps=fps)
    print(f"wrote {out} (return {', '.join(f'{r:,.1f}' for r in returns)})")
    return 0


def recipes() -> int:
    for name, text in qfleet.recipes.describe():
        print(f"{name:<12} {text}")
    print("\nuse one: qfleet train CartPole-v1 --recipe rainbow")
    return 0


def doctor() -> int:
    from qfleet.doctor import report

    lines = report()
    for name, value, note in lines:
        print(f"{name:<14} {value:<{min(30, max(len(v) for _, v, _ in lines))}}  {note}".rstrip())
    return 0


def overview() -> int:
    print(OVERVIEW, end="")
    return 0


def version() -> int:
    print(f"qfleet {qfleet.__version__}")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "help": overview,
    "version": version,
    "train": train,
    "eval": evaluate,
    "plot": plot,
    "video": video,
    "recipes": recipes,
    "doctor": doctor,
}

# --- the entry point ---------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for input that cannot work, 1 for a run that failed, 128 + n after signal n."""
    try:
        try:
            command = parse(sys.argv[1:] if argv is None else argv)
        except SystemExit as e:  # argparse, after --help
            return int(e.code or 0)
        code = COMMANDS[command.name](**command.args)
        sys.stdout.flush()
        return code
    except SystemExit as e:  # no command of ours exits
        from qfleet.runtime.failing import exited

        raise exited(e) from e
    except KeyboardInterrupt as e:
        e.args = ("interrupted",)
        return fail(e, 128 + signal.SIGINT)
    except BrokenPipeError as e:
        return 128 + signal.SIGPIPE if _reader_left() else fail(e, 1)
    except (ValueError, OSError, MemoryError) as e:
        if os.environ.get("QFLEET_DEBUG") or not _for_people(e):
            raise
        return fail(e, 2 if isinstance(e, ValueError) else 1)


def fail(error: BaseException | str, code: int) -> int:
    """One line on stderr."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    if notes := getattr(error, "__notes__", None):
        text = " ".join([text if text.endswith(".") else f"{text}.", *notes])
    print(f"qfleet: error: {' '.join(text.split())}", file=sys.stderr)
    return code


def _for_people(error: Exception) -> bool:
    """Was the error raised by qfleet or the system? A ValueError from a user's environment keeps its traceback."""
    if not isinstance(error, ValueError) or isinstance(error, ConfigError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == "qfleet"


def _reader_left() -> bool:
    """Is our stdout the broken pipe (`| head`), or that of a worker? If ours, Python's flush at exit must go nowhere."""
    stdout = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True
