"""Runs jobs in processes of their own, and leaves none behind."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edge.devices.child import run_child
from edge.profiling.job import Job
from edge.profiling.progress import OnStep


def run_in_child(job: Job, on_step: OnStep) -> dict[str, Any]:
    """The child's result. Raises its EdgeError, or EngineError if it died."""
    result: dict[str, Any] = run_child(
        "edge.profiling.child",
        asdict(job),
        lambda said: on_step(said["doing"], said["share"]),
        failure=f"the {job.engine} engine could not be measured",
    )
    return result
