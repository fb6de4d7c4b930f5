"""Two learners in the tasks of a Spark job: `pip install 'qfleet[spark]'`, Java 17, then

    python examples/spark.py [--run-dir runs/spark] [--total-steps 30000]

TorchDistributor starts a process in each of the job's tasks and says in its environment which one it is; qfleet reads that, as it
does under torchrun. On a cluster leave `master` out and name a run directory on a file system that all workers share. A run
that was cut short goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def train(run_dir: str, steps: int, resume: bool) -> str:
    """What every process of the job runs. Only what can be pickled may be returned: the first one's answer comes back."""
    import qfleet

    if resume:
        run = qfleet.train(resume=run_dir, total_steps=steps)
    else:
        run = qfleet.train(
            "CartPole-v1",
            run_dir=run_dir,
            total_steps=steps,
            device="cpu",
            overrides={"learner.batch_size": 64},  # of each learner
        )
    return f"{run.dir}: {run.evaluation.mean_return:.1f}" if run.evaluation is not None else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/spark"))
    parser.add_argument("--total-steps", type=int, default=30_000)
    args = parser.parse_args()
    try:
        from pyspark.ml.torch.distributor import TorchDistributor
        from pyspark.sql import SparkSession
    except ImportError as e:
        sys.exit(f"{e}: pip install 'qfleet[spark]'")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    job = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    folder = args.run_dir.absolute()
    print(job.run(train, str(folder), args.total_steps, (folder / "config.yaml").exists()))
    spark.stop()
