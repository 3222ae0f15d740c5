"""Rules of the group cluster; those of the options of its jobs are in launch/job.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline.common.errors import UserError, Violation
from pipeline.config import hardware, layouts
from pipeline.config.schema import ClusterConfig, RunConfig


def violations(cluster: ClusterConfig) -> Iterator[Violation]:
    """Yield the violations of cluster.hardware, which names a file that describes a GPU, and of cluster.fabric."""
    if cluster.hardware is not None:
        try:
            hardware.load(cluster.hardware)
        except UserError as error:
            yield from error.violations
    if cluster.fabric is not None and not cluster.fabric.strip():
        rule = "must be the name of a network in the log of NCCL"
        yield Violation("cluster.fabric", repr(cluster.fabric), rule, "set it to IB, AWS Libfabric or Socket, or leave it out")


def layout_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violations of the layouts by the number of nodes, and of the nodes of phases."""
    cluster = config.cluster
    for number, overrides in cluster.layouts.items():
        if number < 1:
            yield Violation(f"cluster.layouts.{number}", overrides, "is for less than one node", "begin with a number of nodes")
        try:
            values = layouts.read(tuple(overrides))
        except UserError as error:
            yield from (replace(violation, key=f"cluster.layouts.{number}") for violation in error.violations)
        else:
            yield from (replace(found, key=f"cluster.layouts.{number}") for found in layouts.unchanged(config, values))
    if cluster.choose_layout == "planner":
        if cluster.layouts:
            rule = "is not read with cluster.choose_layout=planner"
            yield Violation("cluster.layouts", cluster.layouts, rule, "remove it, or set cluster.choose_layout=configured")
        if cluster.hardware is None:
            yield Violation("cluster.hardware", None, "is required by cluster.choose_layout=planner", "name a file of conf/hardware/")
