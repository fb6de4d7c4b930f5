"""A Ray cluster for the tests of a module."""

import os
from collections.abc import Iterator

import pytest
from onray import SETTINGS

from qfleet.runtime.resources import FAIR


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A cluster of two nodes, on this machine: every run joins it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 4, "include_dashboard": False, "_system_config": FAIR}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    cluster.add_node(num_cpus=4, include_dashboard=False)
    SETTINGS["address"] = cluster.address
    yield
    del SETTINGS["address"]
    cluster.shutdown()
