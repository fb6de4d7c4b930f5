"""Two learners in the tasks of a Spark job: `pip install 'qfleet[spark]'`, Java 17, then

    python examples/spark.py [RUN_DIR [STEPS]]

TorchDistributor starts a process in each of the job's tasks and says in its environment which one it is; qfleet reads that, as it
does under torchrun. On a cluster leave `master` out and name a run directory on a file system that all workers share.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def train(run_dir: str, steps: int) -> str:
    """What every process of the job runs. Only what can be pickled may be returned: the first one's answer comes back."""
    import qfleet

    run = qfleet.train(
        "CartPole-v1",
        run_dir=run_dir,
        total_steps=steps,
        device="cpu",
        overrides={"learner.batch_size": 64},  # of each learner
    )
    return f"{run.dir}: {run.evaluation.mean_return:.1f}" if run.evaluation is not None else ""


if __name__ == "__main__":
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    folder = str(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/spark").absolute())
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30_000
    print(TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train, folder, steps))
    spark.stop()
