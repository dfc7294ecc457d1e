"""The fault tests use the cluster tests' models and shared clusters."""

from tests.cluster.conftest import client, cluster, counting, counting_cluster, tiny

__all__ = ["client", "cluster", "counting", "counting_cluster", "tiny"]
