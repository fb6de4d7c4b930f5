"""qfleet trains DQN-family agents as fast as the hardware allows.

    import qfleet
    run = qfleet.train("CartPole-v1", recipe="rainbow", seed=1)
    run.evaluate().mean_return
    run.policy.act(obs)

Importing the package does not import torch; that happens on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Config", "Evaluation", "Policy", "Run", "evaluate", "load", "recipes", "train"]

if TYPE_CHECKING:
    from qfleet import recipes
    from qfleet.acting.policy import Policy
    from qfleet.api import Run, evaluate, load, train
    from qfleet.config import Config
    from qfleet.runtime.evaluation import Evaluation

_HOME = {
    "Config": "qfleet.config",
    "Evaluation": "qfleet.runtime.evaluation",
    "Policy": "qfleet.acting.policy",
    "Run": "qfleet.api",
    "evaluate": "qfleet.api",
    "load": "qfleet.api",
    "train": "qfleet.api",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name == "recipes":
        return importlib.import_module("qfleet.recipes")
    raise AttributeError(f"module 'qfleet' has no attribute {name!r}")
