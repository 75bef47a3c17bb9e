"""Collectives across nodes: within a node by its own communicator, between nodes by an engine that exists."""

from .communicator import HierarchicalCommunicator
from .topology import Topology

__all__ = ["HierarchicalCommunicator", "Topology"]
