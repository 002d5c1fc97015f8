"""Data of a model that a policy must have beforehand: measured once, kept in the cache folder, counted in plans."""

from __future__ import annotations

from typing import TypeAlias

from edge.backends.expected import QueryMoments, moments_bytes
from edge.backends.importance import RowImportance, importance_bytes
from edge.kv.policy import Needs
from edge.model.layers import Network

Learned: TypeAlias = QueryMoments | RowImportance


def learned_bytes(network: Network, needs: Needs) -> int:
    if needs.expects:
        return moments_bytes(network)
    return importance_bytes(network) if needs.ranks else 0
