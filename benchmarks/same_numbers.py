"""Does this code train to the very numbers of another commit's? Then what was measured of that one's learning holds for this one.

    git archive OLD qfleet | tar x -C FOLDER
    python benchmarks/same_numbers.py beam_rider FOLDER [FOLDER ...] [--set PATH=VALUE ...]

A short run of double DQN with each tree of code, this one twice, all at the same time: the same seed and settings, without evaluations.
It compares the trained parameters and the last losses, bit for bit, and ends with an error where a tree's differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

from common import ROOT, check, record, train_command

SETTINGS = (
    "seed=1", "total_steps=40000", "env.num_envs=64", "replay.capacity=100000", "replay.min_steps=5000", "acting.epsilon_steps=20000",
    "runtime.eval_every=0", "runtime.eval_episodes=1", "runtime.emulator_threads=4", "acting.device=cuda",
)  # fmt: skip


def start(tree: str, game: str, folder: str, settings: list[str]) -> subprocess.Popen[str]:
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = os.pathsep.join(os.path.abspath(each) for each in (tree, *before))  # the run is elsewhere
    command = train_command(game, "double", folder, settings)
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip


def found(folder: Path) -> dict[str, object]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    if not trained:
        raise SystemExit("nothing was learned: give more total_steps")
    parameters = hashlib.sha256((folder / "checkpoints" / "last" / "model.safetensors").read_bytes()).hexdigest()[:16]
    return {"parameters": parameters, "loss": trained[-1]["train/loss"], "updates": trained[-1]["train/n_updates"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game")
    parser.add_argument("trees", nargs="+", metavar="FOLDER")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE")
    args = parser.parse_args()
    settings = list(dict(item.split("=", 1) for item in [*SETTINGS, *args.set]).items())
    trees = [str(ROOT), str(ROOT), *args.trees]
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, str(i)) for i in range(len(trees))]
        for folder in folders:
            folder.mkdir()
        flags = [f"{path}={value}" for path, value in settings]
        runs = [start(tree, args.game, str(folder), flags) for tree, folder in zip(trees, folders, strict=True)]
        texts = [run.communicate()[0] for run in runs]
        for tree, run, text in zip(trees, runs, texts, strict=True):
            if run.returncode:
                raise SystemExit(f"{tree} failed:\n{text}")
        results = [found(folder / "run") for folder in folders]
    names = ["this code", "this code again", *(Path(tree).name for tree in args.trees)]
    for name, result in zip(names, results, strict=True):
        print(f"{args.game}  {name:16s} {result}", flush=True)
    record("same_numbers", {"game": args.game, "settings": flags, "trees": dict(zip(names, results, strict=True))})
    check([f"{name} has other numbers" for name, result in zip(names, results, strict=True) if result != results[0]])


if __name__ == "__main__":
    main()
