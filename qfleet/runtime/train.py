"""One run on one machine: make the parts, go round by round, look after everything that happens between rounds."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from qfleet import envs, networks, rng
from qfleet.acting import placement
from qfleet.acting.actor import Actor, HostActor
from qfleet.acting.collector import Collector
from qfleet.acting.device import DeviceActor
from qfleet.acting.policy import Policy
from qfleet.captured import Best, CapturedLearner
from qfleet.config import Config, ConfigError, dump_yaml, override
from qfleet.learner import Flat, Learned, Learner
from qfleet.replay import Limiter, Replay
from qfleet.runtime import evaluation
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.evaluation import Evaluation
from qfleet.runtime.evaluator import Evaluator, Stuck
from qfleet.runtime.metrics import Metrics, Window
from qfleet.runtime.progress import Progress
from qfleet.runtime.schedule import Pipelined, Schedule, Serial, Streams
from qfleet.runtime.setup import device_of, lock, pick_device, prepare, resolve, summary, versions
from qfleet.runtime.watchdog import Watchdog
from qfleet.types import Spec, State, Step

EXPLODED = 1e12  # a mean loss above this, or no number at all, ends the run
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BEHIND_GPU = 10  # niceness of environments: the thread that feeds the GPU, and evaluations, go first
EVALUATION_SHARE = 4  # an evaluation beside the training has this part of the cores: its threads spin while they wait
PLATEAU = 3  # evaluations without a new best before lr_schedule=plateau halves the learning rate


class TrainingError(RuntimeError):
    """The run cannot go on: the loss exploded."""


class Trainer:
    """The parts of a run and the loop over them. `resume` goes on from the newest checkpoint in run_dir."""

    def __init__(self, config: Config, run_dir: Path, progress: Progress, resume: bool = False) -> None:
        self.run_dir, self.progress = run_dir, progress
        self._threads = config.runtime.emulator_threads or os.cpu_count() or 1
        name = pick_device(config.device)
        seed = rng.derive(config.seed, "environments")
        self.groups = envs.make_groups(
            config.env,
            seed=seed,
            groups=config.runtime.groups,
            threads=self._threads,
            wait=False,  # they are made while the GPU wakes up and kernels are compiled
            nice=BEHIND_GPU if name != "cpu" else 0,
        )
        self.envs = self.groups[0]  # speaks for all where they are alike
        self._open = contextlib.ExitStack()  # what must be closed, in reverse order, whatever happens
        self._open.callback(torch.set_num_threads, torch.get_num_threads())
        for group in self.groups:
            self._open.callback(group.close)
        self._new = False  # we made the folder, and hold its lock
        try:
            device = device_of(name)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self._make(config, device, resume)
        except BaseException as e:
            self._open.close()
            if self._new:  # a run that never began leaves nothing behind
                shutil.rmtree(run_dir, ignore_errors=True)
            if isinstance(e, torch.OutOfMemoryError):
                raise ConfigError(out_of_memory(config, e)) from None
            raise

    def _make(self, config: Config, device: torch.device, resume: bool) -> None:
        """Everything but the environments, which may be processes that must not outlive a failure here."""
        run_dir, progress = self.run_dir, self.progress
        wanted_compile = config.learner.compile == "on"
        replay_device = device_of(pick_device(config.replay.device, device))
        self.config = config = resolve(config, self.envs, device, replay_device)
        if config.acting.device == "auto":
            self.config = config = override(config, {"acting.device": self._place(config, device)})
        spec = self.envs.spec
        Replay.check_memory(config, spec, replay_device)
        absent = not run_dir.exists()
        if not resume:
            prepare(run_dir)
        self._open.enter_context(lock(run_dir))
        self._new = absent
        for line in summary(config, self.envs, str(replay_device)):
            progress.message(line)
        if wanted_compile and config.learner.compile == "off":
            progress.message("  note          no C++ compiler here (g++ or clang++): learner.compile is off")
        on_device = config.runtime.schedule == "streams" or replay_device.type == "cuda"
        self.replay = Replay(config, spec, replay_device, seed=config.seed, on_host=not on_device)
        self.limiter = Limiter(config)
        self._make_parts(config, spec, device)
        self.checkpoints = Checkpoints(run_dir, config.runtime.keep)
        # What the rounds leave behind.
        self.stored_steps = 0
        self.best: float | None = None
        self.evaluations_since_best = 0
        self.lr_scale = 1.0
        self.window = Window(self._clock)
        self._before = 0.0  # seconds of earlier incarnations
        self.evaluator = self._make_evaluator(beside=device.type == "cuda")
        self._evaluation_due = False  # a signal cut it short: it comes first in the resumed run
        self.stop_reason = ""
        self.signal: int | None = None
        if isinstance(self.learner, CapturedLearner):
            self.learner.prepare(self.replay)
        position = self._load() if resume else None
        self._evaluations_begun = self.collector.steps // (config.runtime.eval_every or 1)
        if not resume:
            self._publish()
            self.schedule.wait()
            self.collector.start()
            dump_yaml(config, run_dir / "config.yaml", versions(config))
        self.evaluator.ready()
        self.schedule.wait()  # what was queued outside of its streams
        self._began = time.perf_counter()
        self.metrics = Metrics(run_dir, position)
        self._open.callback(self.metrics.close)
        self.window.begin()

    def _place(self, config: Config, device: torch.device) -> str:
        """Where actions are computed, measured with the network and the number of environments in use."""
        if device.type == "cpu":
            return "cpu"
        spec = self.envs.spec

        def policy_on(name: str) -> Policy:
            return Policy(networks.build(config, spec).to(name).eval(), config, spec, name)

        return placement.choose(policy_on, self.envs.num_envs, str(device))

    def _make_parts(self, config: Config, spec: Spec, device: torch.device) -> None:
        """Learner, schedule, and who acts."""
        acting_device = device_of(pick_device(config.acting.device))
        self.learner: Learner
        self.schedule: Schedule
        schedule, threads = config.runtime.schedule, config.learner.threads
        if schedule == "streams":
            self.schedule = Streams(device, threads)
        elif schedule == "pipelined":
            self.schedule = Pipelined(threads)
        else:
            self.schedule = Serial(device, config.runtime.lag, threads)
        captured = schedule == "streams" or device.type == self.replay.device.type == "cuda"
        self.learner = (CapturedLearner if captured else Learner)(config, spec, device)
        self._open.callback(self.schedule.close)
        copied = captured or schedule == "pipelined" or acting_device != device
        net = networks.build(config, spec).to(acting_device).eval() if copied else self.learner.net
        self._acting_copy = Flat(net, acting_device) if copied else None
        self.policy = Policy(net, config, spec, acting_device)
        sizes = [group.num_envs for group in self.groups]
        self._best: Best | None = None
        actor: Actor
        if isinstance(self.learner, CapturedLearner) and acting_device == device:
            self._best = Best(self.learner, net, sizes)
            on_device = DeviceActor(config, spec, self.groups, device, net.noise_size, self._best)
            self._open.callback(on_device.close)
            actor = on_device
        else:
            actor = HostActor(config, spec, self.policy, sizes, self.replay.device)
        self.collector = Collector(config, self.groups, actor)

    # --- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until total_steps, an early stop or a signal; each of these leaves a checkpoint."""
        previous = self._catch_signals()
        if seconds := self.config.runtime.watchdog:
            self._open.callback(Watchdog(self._waiting, seconds, self._environments_stuck).close)
        if self.collector.steps >= self.config.total_steps:
            self.stop_reason = "total_steps"  # a finished run, resumed
        try:
            if self._evaluation_due:
                self._evaluate(self.collector.steps, last=bool(self.stop_reason))
            while not self.stop_reason:
                before = self.collector.steps
                self._publish()
                learned = self.schedule.round(self.collector.collect, self._store, self._learn)
                self._between_rounds(before, self.collector.steps, learned)
            self._save()
        except Stuck as e:  # the thread it hangs in cannot be joined
            self._stuck(str(e))
        except torch.OutOfMemoryError as e:
            raise TrainingError(f"{out_of_memory(self.config, e)} {self._last_checkpoint()}") from None
        except OSError as e:
            if e.errno not in DISK_FULL:
                raise
            hint = f"Make room and go on with `qfleet train --resume {self.run_dir}`."
            raise OSError(e.errno, f"{e.strerror}. The run stopped. {self._last_checkpoint()} {hint}") from None
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.close()

    def close(self) -> None:
        self._open.close()

    def _waiting(self) -> float | None:
        """Since when this thread has been waiting for environments, of the training or of an evaluation."""
        waiting = self.collector.waiting
        return self.evaluator.waiting if waiting is None else waiting[1]

    def _environments_stuck(self) -> None:
        """Called by the watchdog, while the training thread waits for environments that do not answer."""
        waiting = self.collector.waiting
        if waiting is None:
            self._stuck("the evaluation's environments")
        else:
            self._stuck(self.groups[waiting[0]].awaited(), training=True)

    def _stuck(self, who: str, training: bool = False) -> None:
        """Save and end the process. `training`: without the environments of the training, which do not answer."""
        message = f"{who} did not answer for {self.config.runtime.watchdog:g} s, and the run cannot go on."
        try:
            self.schedule.wait()
            self._save(stuck=training)
            message += f" Everything else is saved: go on with `qfleet train --resume {self.run_dir}`."
        except Exception as e:  # whatever fails here, the process must end, and say why
            message += f" Saving failed: {e}. {self._last_checkpoint()}"
        finally:
            self.progress.close()
            for each in self.groups:
                each.kill()
            print(f"qfleet: error: {message} (--runtime.watchdog sets the time.)", file=sys.stderr, flush=True)
            os._exit(1)

    def _store(self, rows: Step) -> None:
        self.replay.extend(rows)
        self.stored_steps = self.collector.steps

    def _learn(self) -> Learned | None:
        due = self.limiter.updates_due(self.stored_steps, self.learner.updates)
        if due == 0 or not self.replay.ready:
            return None
        done = min(1.0, self.stored_steps / self.config.total_steps)
        self.learner.lr = self.config.learner.lr * self.lr_scale * lr_factor(self.config.learner.lr_schedule, done)
        return self.learner.learn(self.replay, due, self._beta())

    def _beta(self) -> float:
        c = self.config.replay
        done = min(1.0, self.stored_steps / (c.beta_steps or self.config.total_steps))
        return c.beta + (1.0 - c.beta) * done

    @torch.no_grad()
    def _publish(self) -> None:
        """The learner's parameters reach the acting copy, if there is one."""
        if self._acting_copy is not None:
            with self.schedule.publishing():
                self._acting_copy.copy_(self.learner.flat)
                if self._best is not None:
                    self._best.publish()

    # --- between rounds ------------------------------------------------------------------------------------------

    def _between_rounds(self, before: int, step: int, learned: Learned | None) -> None:
        c = self.config.runtime
        if isinstance(self.learner, CapturedLearner) and (note := self.learner.note()):
            self.progress.message(f"  note          {note}")
        finished = step >= self.config.total_steps
        self._account(learned)
        if finished:
            self._account(self.learner.flush())
        if crossed(before, step, c.log_every) or finished:
            self._log(step)
        if finished:
            self.stop_reason = "total_steps"
        self._evaluate(step, last=finished)
        if self.signal is not None:
            self.stop_reason = "signal"
        if crossed(before, step, c.checkpoint_every):
            self._save()

    def _account(self, learned: Learned | None) -> None:
        if learned is not None:
            self.window.add(learned)
            if not learned.loss_sum < EXPLODED * learned.updates:
                self._diverged(self.collector.steps)

    def _log(self, step: int) -> None:
        values = self.episode_values()
        values["train/lr"] = self.learner.lr
        values["train/n_updates"] = self.learner.updates
        values |= self.window.close(self.config.learner.batch_size)
        values["pipeline/lag"] = self.config.runtime.lag
        self.metrics.write(step, values)
        self.progress.update(step, values)

    def episode_values(self) -> dict[str, float]:
        values = self.collector.episodes.means()
        values["rollout/exploration_rate"] = self.collector.epsilon_mean()
        values["rollout/episodes"] = self.collector.episodes.count
        if self.envs.frame_skip > 1:
            values["rollout/frames"] = self.collector.steps * self.envs.frame_skip
        return values

    def _clock(self) -> dict[str, float]:
        """Counts and seconds so far. `learn` is time of the device where the learner's work is only queued."""
        actor = self.collector.actor
        return {
            "wall": time.perf_counter(),
            "steps": self.collector.steps,
            "updates": self.learner.updates,
            "env": self.collector.env_seconds,
            "act": self.collector.act_seconds - actor.wait_seconds,
            "learn": self.schedule.learn_seconds,
            "transfer": actor.transfer_seconds,
            "wait": self.schedule.wait_seconds + self.learner.wait_seconds + actor.wait_seconds,
            "bytes": actor.transfer_bytes,
        }

    def _make_evaluator(self, beside: bool) -> Evaluator:
        config, spec, device = self.config, self.envs.spec, self.learner.device
        net = networks.build(config, spec).to(device).eval()
        seed, episodes = rng.derive(config.seed, "evaluation environments"), config.runtime.eval_episodes
        threads = max(1, self._threads // EVALUATION_SHARE) if beside else self._threads
        evaluator = Evaluator(
            Policy(net, config, spec, device),
            lambda: evaluation.make_envs(config.env, episodes, seed, threads),
            episodes,
            beside=beside,
            stop=lambda: self.signal is not None,
            patience=config.runtime.watchdog,
        )
        self._open.callback(evaluator.close)
        return evaluator

    def _evaluate(self, step: int, last: bool) -> None:
        """See what became of an evaluation begun earlier; begin one if it is time. The last one is waited for."""
        began = time.perf_counter()
        self._take_evaluation(wait=last)
        number = step // (self.config.runtime.eval_every or step + 1)
        due = self._evaluation_due or (number > self._evaluations_begun and not self.stop_reason)
        if last or (due and not self.evaluator.busy):
            self._evaluations_begun, self._evaluation_due = number, False
            with self.schedule.publishing():
                self.evaluator.start(self.learner.flat, rng.derive(self.config.seed, f"evaluation {step}"), step)
            self._take_evaluation(wait=last)
        self.window.leave_out(time.perf_counter() - began)  # evaluation is not training time

    def _take_evaluation(self, wait: bool) -> None:
        if self.evaluator.busy:
            if result := self.evaluator.result(wait):
                self._judge(result)
            elif not self.evaluator.busy:  # a signal stopped it
                self._evaluation_due = True

    def _judge(self, result: Evaluation) -> None:
        """What follows from an evaluation."""
        c = self.config.runtime
        better = self.best is None or result.mean_return > self.best
        if better or result.mean_return == self.best:  # of equals, the newest is kept
            self.best = result.mean_return
            self.checkpoints.save_best(result.step, asdict(self.envs.spec), self.evaluator.policy.net.state_dict())
        if better:
            self.evaluations_since_best = 0
        else:
            self.evaluations_since_best += 1
            if self.config.learner.lr_schedule == "plateau" and self.evaluations_since_best % PLATEAU == 0:
                self.lr_scale *= 0.5
                self.progress.message(f"no new best in {PLATEAU} evaluations: learning rate × {self.lr_scale:g}")
        values = {
            "eval/mean_reward": result.mean_return,
            "eval/std_reward": result.std_return,
            "eval/best_mean_reward": self.best or 0.0,
        }
        self.metrics.write(result.step, values)
        self.progress.update(self.collector.steps, values)
        if c.stop_at is not None and result.mean_return >= c.stop_at:
            self.stop_reason = "stop_at"
        elif c.patience and self.evaluations_since_best >= c.patience:
            self.stop_reason = "patience"

    def _last_checkpoint(self) -> str:
        saved = sorted(p for p in self.checkpoints.dir.glob("step_*") if p.suffix != ".tmp")
        return f"The last good checkpoint is {saved[-1]}." if saved else "There is no checkpoint yet."

    def _diverged(self, step: int) -> None:
        raise TrainingError(
            f"the loss exploded (it is no number, or above {EXPLODED:g}) at step {step:,}. {self._last_checkpoint()} Lower --learner.lr or set --learner.grad-clip; check that observations and rewards are finite numbers."
        )

    # --- stopping and resuming -----------------------------------------------------------------------------------

    def _catch_signals(self) -> dict[int, Any]:
        """First SIGINT or SIGTERM: finish the round, checkpoint, leave. The second: leave at once."""
        if threading.current_thread() is not threading.main_thread():
            return {}

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                os._exit(128 + number)
            self.signal = number

        return {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _save(self, stuck: bool = False) -> None:
        self.schedule.wait()
        self._account(self.learner.flush())
        if not self.learner.flat.data.abs().max() < EXPLODED:
            self._diverged(self.collector.steps)
        self.checkpoints.save(self.collector.steps, self._state(stuck), self.replay)

    def _state(self, stuck: bool = False) -> State:
        return {
            "spec": asdict(self.envs.spec),
            "learner": self.learner.state(),
            "collector": self.collector.state(stuck),
            "stored_steps": self.stored_steps,
            "best": self.best,
            "evaluations_since_best": self.evaluations_since_best,
            "lr_scale": self.lr_scale,
            "evaluation_due": self._evaluation_due or self.evaluator.busy,
            "window": self.window.state(),
            "metrics_bytes": self.metrics.position(),
            "seconds": self.seconds,
        }

    def _load(self) -> int:
        """-> the length metrics.jsonl had at the checkpoint."""
        state = self.checkpoints.load(self.replay)
        self.learner.load_state(tensors(state["learner"]))
        self._publish()  # where environments begin anew, their first actions are due at once
        self.schedule.wait()
        self.collector.load_state(state["collector"])
        self.stored_steps = state["stored_steps"]
        self.best, self.evaluations_since_best = state["best"], state["evaluations_since_best"]
        self.lr_scale, self._evaluation_due = state["lr_scale"], state["evaluation_due"]
        self.window.load_state(state["window"])
        self._before = state["seconds"]
        return int(state["metrics_bytes"])

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, over all its incarnations."""
        return self._before + time.perf_counter() - self._began


# --- small things ----------------------------------------------------------------------------------------------------


def crossed(before: int, after: int, every: int) -> bool:
    """Did the count pass a multiple of `every` (0: never)?"""
    return every > 0 and before // every < after // every


def out_of_memory(config: Config, error: torch.OutOfMemoryError) -> str:
    return (
        f"the GPU has too little memory: {str(error).splitlines()[0].removeprefix('CUDA out of memory. ')} Lower --replay.capacity ({config.replay.capacity:,}), "
        f"--learner.batch-size ({config.learner.batch_size}) or --env.num-envs ({config.env.num_envs}), or keep the replay in main memory with --replay.device cpu."
    )


def lr_factor(schedule: str, done: float) -> float:
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0


def tensors(state: Any) -> Any:
    """NumPy leaves of a loaded state as tensors."""
    if isinstance(state, dict):
        return {k: tensors(v) for k, v in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state
