"""A learner that is not the first of its team, started by a launcher: it goes through its rounds, and saves its part when all do."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from qfleet.config import Config
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.team import Team
from qfleet.runtime.train import catch_signals, crossed
from qfleet.runtime.watchdog import Watchdog, end
from qfleet.runtime.worker import Worker


class Follower:
    def __init__(self, config: Config, run_dir: Path, team: Team, resume: bool = False) -> None:
        self.team, self.worker = team, Worker(config, team)
        self._open = contextlib.ExitStack()
        self._open.callback(self.worker.close)
        try:
            self.worker.build()
            self.config = self.worker.config
            if seconds := config.runtime.watchdog:
                self._open.callback(Watchdog(self.worker.waiting, seconds, self._stuck).close)
            self.checkpoints = Checkpoints(run_dir / "learners" / str(team.rank), config.runtime.keep)
            self.checkpoints.dir.mkdir(parents=True, exist_ok=True)  # while it is empty, there is no checkpoint of all
            if resume:
                self.worker.load(self.checkpoints)
            else:
                self.worker.start()
        except BaseException:
            self._open.close()
            raise

    def _stuck(self) -> None:
        who = f"learner {self.team.rank}: {self.worker.awaited()}"
        self.worker.kill()
        end(who, self.config.runtime.watchdog)

    def run(self) -> None:
        previous = catch_signals(lambda number: self.team.stop())
        try:
            while not self.worker.over:
                before = self.worker.steps
                self.worker.round()
                if crossed(before, self.worker.steps, self.config.runtime.checkpoint_every):
                    self._save()
            self._save()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._open.close()

    def _save(self) -> None:
        self.worker.settle()
        self.worker.save(self.checkpoints, {})
