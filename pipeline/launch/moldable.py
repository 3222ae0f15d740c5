"""Training jobs on as many nodes as Slurm grants: how many of them a job uses, and in which layout. Loads no torch.

The layout is that of cluster.layouts, of the configuration, or of the planner; config/layouts.py says what every layout keeps. Where none
is legal on all nodes, a job uses fewer, cluster.min_nodes at least. Without cluster.min_nodes it uses exactly the nodes that it has.
Before the submission: the size of the job of any stage, and whether a training job fits in the memory of its GPUs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.checkpoint import catalog
from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.common.texts import count
from pipeline.config import layout, layouts
from pipeline.config.cluster import ClusterConfig
from pipeline.config.command_line import key_of
from pipeline.config.layout import Layout
from pipeline.config.schema import DryRunConfig, RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import job, live
from pipeline.launch.legal_layouts import LegalLayouts, Planned, has_model

log = logging.getLogger("pipeline")


@dataclass(frozen=True)
class Shape:
    """What a job starts on the nodes that it has.

    Attributes:
        nodes: number of nodes that it uses, each with all of its ranks.
        overrides: arguments of `python -m pipeline`: those of the job, with the settings of the layout.
        layout: sizes of the axes for the log, such as "tensor 2 x data 4, ZeRO 2, micro-batches of 4"; empty for stages that do not train.
    """

    nodes: int
    overrides: tuple[str, ...]
    layout: str


def choose(
    config: RunConfig,
    overrides: Sequence[str],
    granted: int,
    *,
    tasks_per_node: int | None = None,
    step: int | None = None,
    planned: Planned | None = None,
) -> Shape:
    """Choose the largest number of nodes for which a layout is legal, and this layout.

    The result depends on the arguments alone; with `step` or `planned` left out, also on the run directory.

    Args:
        config: the configuration that the overrides compose.
        overrides: arguments of `python -m pipeline`.
        granted: number of good nodes that the job has.
        tasks_per_node: ranks on a node; default: cluster.tasks_per_node.
        step: steps that the run has made; default: those of its newest checkpoint.
        planned: the layouts of cluster.choose_layout=planner; default: the planner's, which are kept in the run directory.

    Raises:
        UserError: there are fewer nodes than cluster.min_nodes, or no layout is legal on them.
    """
    if config.stage.name not in TRAINING_STAGES:
        return Shape(granted, tuple(overrides), "")
    step = newest_step(config) if step is None else step
    wanted, least = layouts.nodes_of_phase(config, step), config.cluster.min_nodes
    most = min(granted, wanted or granted)
    fewest = most if least is None else min(least, wanted or least)
    if most < fewest:
        raise UserError.of("cluster.min_nodes", least, f"the job has {count(granted, 'good node')}", "ask for more nodes, or reduce it")
    legal = LegalLayouts(config, overrides, tasks_per_node or config.cluster.tasks_per_node, step, planned)
    for nodes in range(most, fewest - 1, -1):
        if chosen := legal.layout(nodes):
            layout, settings = chosen
            return Shape(nodes, (*_without(overrides, settings), *settings), _text(layout, nodes * legal.tasks_per_node))
    raise UserError(legal.reasons(fewest, most))


def fewest(config: RunConfig, overrides: Sequence[str], nodes: int, *, tasks_per_node: int | None = None) -> int:
    """Return the fewest nodes on which a job can start again that has lost some of them and has no spare ones.

    Args:
        nodes: nodes that its ranks had; the result for a job without cluster.min_nodes.
    """
    if config.cluster.min_nodes is None or config.stage.name not in TRAINING_STAGES:
        return nodes
    legal = LegalLayouts(config, overrides, tasks_per_node or config.cluster.tasks_per_node, newest_step(config), None)
    return next((count for count in range(config.cluster.min_nodes, nodes) if legal.layout(count)), nodes)


def follows_nodes(config: RunConfig) -> bool:
    """Return whether the layout of a job, or its nodes, are chosen when it starts."""
    if config.stage.name not in TRAINING_STAGES:
        return False
    cluster = config.cluster
    return (
        cluster.min_nodes is not None or bool(cluster.layouts) or cluster.choose_layout == "planner" or layouts.has_phases(config.training)
    )


def violations(config: RunConfig, overrides: Sequence[str], planned: Planned | None = None) -> list[Violation]:
    """Return why a job must not be submitted: a number of nodes that Slurm may grant has no legal layout, and neither has a smaller one.

    Args:
        config: of the job, whose values are in their ranges.
        overrides: arguments of `python -m pipeline`, for the planner.
        planned: as of choose. By default the planner is asked for the fewest and the most nodes only.
    """
    cluster, problems = config.cluster, []
    if config.stage.name not in TRAINING_STAGES:
        return []
    if cluster.min_nodes is not None and cluster.min_nodes > cluster.nodes:
        rule = f"must not exceed cluster.nodes={cluster.nodes}, the most nodes of the job"
        return [Violation("cluster.min_nodes", cluster.min_nodes, rule, "reduce it, or increase cluster.nodes")]
    for name in ("batch_rampup", "phases"):
        for number, nodes in enumerate(entry.nodes for entry in getattr(config.training, name)):
            if nodes is not None and nodes > cluster.nodes:
                key, rule = f"training.{name}.{number}.nodes", f"must not exceed cluster.nodes={cluster.nodes}"
                problems.append(Violation(key, nodes, rule, "set cluster.nodes to the most nodes of a phase"))
    if problems or not follows_nodes(config) or not has_model(config):
        return problems
    step: int | None = newest_step(config)
    while step is not None:
        problems += _range_violations(config, overrides, step, planned)
        step = layouts.phase_end(config, step)
    return problems


def idle(config: RunConfig, overrides: Sequence[str] = (), planned: Planned | None = None) -> dict[int, int]:
    """Return the numbers of nodes that leave some without work, since no layout is legal on all of them: granted -> idle nodes.

    Args:
        config: of a job that has no violations.
        planned: as of choose; without it, the layouts of the planner are not known, and the result is empty.
    """
    if not follows_nodes(config) or (config.cluster.choose_layout == "planner" and planned is None) or not has_model(config):
        return {}
    step = newest_step(config)
    legal, counts = LegalLayouts(config, overrides, config.cluster.tasks_per_node, step, planned), _counts(config, step)
    used = 0
    lost = {}
    for granted in counts:
        used = granted if legal.layout(granted) else used
        if used < granted:
            lost[granted] = granted - used
    return lost


def idle_text(config: RunConfig) -> str:
    """Return a line about the numbers of nodes that leave some without work, empty if none does."""
    lost = idle(config)
    shown = ", ".join(f"{granted} ({count})" for granted, count in list(lost.items())[:8]) + (", ..." if len(lost) > 8 else "")
    return f"no layout is legal on {len(lost)} of the numbers of nodes that Slurm may grant; nodes without work: {shown}" if lost else ""


def expected_training(config: RunConfig, overrides: Sequence[str] = (), nodes: int | None = None) -> tuple[RunConfig, int]:
    """Return the configuration and the number of ranks of a job that gets the nodes that it asks for.

    Args:
        nodes: nodes that it gets; default: cluster.nodes, or those of the first phase.
    """
    cluster = config.cluster
    size = (nodes or cluster.nodes) * cluster.tasks_per_node
    if config.stage.name not in TRAINING_STAGES or not follows_nodes(config) or knobs.range_violations(config):
        return config, size
    try:
        step = newest_step(config)
        shape = choose(config, overrides, nodes or layouts.nodes_of_phase(config, step) or cluster.nodes, step=step)
        settings = tuple(word for word in shape.overrides if word not in overrides)
        return layouts.with_overrides(config, settings), shape.nodes * cluster.tasks_per_node
    except UserError:  # check.check and `violations` name the reason
        return config, size


def simulated(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a dry run with the layout for its nodes, those that the job asks for by default."""
    size, tasks = config.dry_run.world_size, config.cluster.tasks_per_node
    config, ranks = expected_training(config, overrides, None if size is None else max(1, size // max(1, tasks)))
    return config if size is not None or not follows_nodes(config) else knobs.changed(config, {"dry_run.world_size": ranks})


def cluster_at(config: RunConfig, step: int | None = None) -> ClusterConfig:
    """Return the options of the cluster for a job that starts after `step` steps (default: of the newest checkpoint).

    cluster.nodes is the number of nodes of the phase, and cluster.min_nodes not above it.
    """
    nodes = layouts.nodes_of_phase(config, newest_step(config) if step is None else step) or config.cluster.nodes
    least = config.cluster.min_nodes
    return replace(config.cluster, nodes=nodes, min_nodes=None if least is None else min(least, nodes))


def size_options(config: RunConfig, nodes: int, tasks_per_node: int | None) -> list[str]:
    """Return the sbatch options for the nodes of the next job of a run.

    Args:
        tasks_per_node: ranks on a node; default: cluster.tasks_per_node.
    """
    cluster = cluster_at(config)
    if not layouts.has_phases(config.training):
        cluster = replace(cluster, nodes=max(cluster.nodes, nodes - cluster.spares))  # sbatch does not read conf/cluster/
    cluster = replace(cluster, tasks_per_node=tasks_per_node or cluster.tasks_per_node)
    return job.size_options(cluster, config.stage.name, cluster.nodes)


def newest_step(config: RunConfig) -> int:
    """Return the steps of the newest checkpoint of the run; 0 if there is none."""
    complete = catalog.complete(Path(config.run_dir))
    return catalog.step_of(complete[-1]) if complete else 0


def _counts(config: RunConfig, step: int) -> range:
    """The numbers of nodes that Slurm may grant."""
    cluster = cluster_at(config, step)
    return range(cluster.min_nodes or cluster.nodes, cluster.nodes + 1)


def _range_violations(config: RunConfig, overrides: Sequence[str], step: int, planned: Planned | None) -> list[Violation]:
    """The violations of a job that starts after a number of steps."""
    legal, counts = LegalLayouts(config, overrides, config.cluster.tasks_per_node, step, planned), _counts(config, step)
    without = []
    first = 0  # number of nodes with a legal layout
    for nodes in counts if planned is not None or config.cluster.choose_layout != "planner" else sorted({counts[0], counts[-1]}):
        if legal.layout(nodes):
            first = nodes
            break
        without.append(nodes)
    if not without:
        return []
    if len(counts) == 1:
        return legal.broken(counts[0])
    shown = ", ".join(map(str, without)) if len(without) < 8 else f"{without[0]} to {without[-1]}"
    why = legal.broken(without[0])[0]
    rule = f"has no legal layout on {shown} nodes x {legal.tasks_per_node} ranks, which Slurm may grant: {why.key}={why.value} {why.rule}"
    advice = f"set cluster.min_nodes={first}, or " if first else ""
    return [Violation("cluster.min_nodes", counts[0], rule, f"{advice}add a layout from {without[0]} nodes on to cluster.layouts")]


def _without(overrides: Sequence[str], settings: Sequence[str]) -> list[str]:
    """The overrides of keys that a layout does not set."""
    keys = set(map(key_of, settings))
    return [word for word in overrides if key_of(word) not in keys]


def _text(config: RunConfig, world_size: int) -> str:
    parallel = config.parallel
    data = world_size // parallel.model_ranks
    axes = Layout(parallel.pipeline, data, parallel.tensor, parallel.expert, parallel.context).axes_text()
    return f"{axes}, ZeRO {parallel.zero_stage}, micro-batches of {config.training.micro_batch_size}"


def job_options(config: RunConfig, settings: Sequence[str]) -> ClusterConfig:
    """Return the sbatch options of a job, in the first queue that fits; where Slurm is installed, with the limits that it tells.

    Args:
        settings: settings of this job alone (job.one_task).
    """
    cluster = live.corrected(job.one_task(cluster_at(config), config.stage.name, settings))
    return job.placed(cluster, config.stage.name, cluster.nodes)


def expected(config: RunConfig, overrides: Sequence[str], settings: Sequence[str]) -> tuple[RunConfig, int]:
    """Return the configuration with its layout, and the number of ranks, of a job that gets the nodes that it asks for.

    For a stage that is about another job, such as certify, it is the number of ranks of that job.

    Args:
        settings: as of `options`.
    """
    if config.stage.name in TRAINING_STAGES:
        return expected_training(config, overrides)
    size = job_options(config, settings)
    return config, layout.job_size(dataclasses.replace(config, dry_run=DryRunConfig()), size.nodes * size.tasks_per_node)


def memory_violations(config: RunConfig, overrides: Sequence[str]) -> Iterator[Violation]:
    """Yield why a training job would not fit on the most nodes that it asks for, or on the fewest, if the GPU of the cluster is known."""
    if config.stage.name in TRAINING_STAGES and config.cluster.hardware and config.cluster.check_memory:
        for nodes in {None, cluster_at(config).min_nodes}:
            if refused := memory_violation(*expected_training(config, overrides, nodes)):
                yield refused


def memory_violation(config: RunConfig, size: int) -> Violation | None:
    """Return why a job would not fit in the memory of its GPUs; None if it fits, or fine-tunes weights that do not exist yet.

    Args:
        size: number of its ranks.
    """
    from pipeline.planner import memory_check  # loads torch
    from pipeline.training import finetuning

    if config.stage.name == "finetune":
        try:
            config = finetuning.complete(config, size)
        except UserError as error:  # an earlier job of a chain may write the checkpoint; the job itself refuses everything else
            log.warning("%s: whether it fits in memory is not checked: %s", config.run_dir, error.violations[0])
            return None
    return memory_check.refused(config, size)
