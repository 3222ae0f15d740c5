"""Rules of the group cluster; those of the options of its jobs are in launch/job.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from pipeline.common import knobs, ranks
from pipeline.common.errors import UserError, Violation
from pipeline.config import hardware, layouts
from pipeline.config.cluster import ClusterConfig
from pipeline.config.command_line import key_of, nearest
from pipeline.config.rules import paths
from pipeline.config.schema import RunConfig, SubmitConfig
from pipeline.config.stages import INTERACTIVE_STAGES, STAGES


def violations(cluster: ClusterConfig) -> Iterator[Violation]:
    """Yield the violations of cluster.hardware, which names a file that describes a GPU, of cluster.fabric, and of the site."""
    yield from _queue_violations(cluster)
    yield from _site_violations(cluster)
    if cluster.hardware is not None:
        try:
            hardware.load(cluster.hardware)
        except UserError as error:
            yield from error.violations
    if cluster.maintenance is not None and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?", cluster.maintenance) is None:
        yield Violation("cluster.maintenance", cluster.maintenance, "must be a local time", "write YEAR-MONTH-DAYTHOURS:MINUTES")
    if cluster.fabric is not None and not cluster.fabric.strip():
        rule = "must be the name of a network in the log of NCCL"
        yield Violation("cluster.fabric", repr(cluster.fabric), rule, "set it to IB, AWS Libfabric or Socket, or leave it out")


def _queue_violations(cluster: ClusterConfig) -> Iterator[Violation]:
    """Yield the entries of cluster.queues whose limits contradict each other."""
    for number, queue in enumerate(cluster.queues):
        key = f"cluster.queues.{number}"
        if queue.max_nodes is not None and queue.max_nodes < queue.min_nodes:
            yield Violation(f"{key}.max_nodes", queue.max_nodes, f"must not be below min_nodes={queue.min_nodes}", "correct the entry")
        if queue.max_time is not None and not ranks.is_slurm_limit(queue.max_time):
            fix = 'write hours:minutes:seconds or days-hours, quoted in a YAML file: "24:00:00"'
            yield Violation(f"{key}.max_time", queue.max_time, "must be a time limit of Slurm", fix)
        if queue.max_running is not None and queue.max_submitted is not None and queue.max_running > queue.max_submitted:
            rule = f"must not exceed max_submitted={queue.max_submitted}, which counts running jobs, too"
            yield Violation(f"{key}.max_running", queue.max_running, rule, "correct the entry")


def _site_violations(cluster: ClusterConfig) -> Iterator[Violation]:
    """Yield what is wrong with the cores of a node, variables, and options of srun."""
    tasks, cores = cluster.tasks_per_node, cluster.cpus_per_task
    if cluster.cores is not None and tasks * cores > cluster.cores:
        rule = f"asks for {tasks * cores} cores a node for {tasks} tasks, and cluster.cores={cluster.cores}"
        yield Violation("cluster.cpus_per_task", cores, rule, f"set it to {max(1, cluster.cores // tasks)}, or correct cluster.cores")
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield Violation("cluster.environment", name, "is not the name of a variable", "use letters, digits and _")
    for option in cluster.srun:
        if not option.startswith("-"):
            yield Violation("cluster.srun", option, "must be an srun option in command-line form", "write --name=value")


def layout_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violations of the layouts by the number of nodes, and of the nodes of phases."""
    cluster = config.cluster
    if any(phase.nodes is not None for phase in config.training.phases):
        rule = "is not supported with the nodes of training.phases, each of which has one layout"
        fix = "remove it, and set parallel.* in the overrides of the phases"
        if cluster.layouts:
            yield Violation("cluster.layouts", cluster.layouts, rule, fix)
        if cluster.choose_layout == "planner":
            yield Violation("cluster.choose_layout", "planner", rule, fix)
    for number, overrides in cluster.layouts.items():
        if number < 1:
            yield Violation(f"cluster.layouts.{number}", overrides, "is for less than one node", "begin with a number of nodes")
        try:
            values = layouts.read(tuple(overrides))
        except UserError as error:
            yield from (replace(violation, key=f"cluster.layouts.{number}") for violation in error.violations)
        else:
            yield from (replace(violation, key=f"cluster.layouts.{number}") for violation in layouts.unchanged(config, values))
    if cluster.choose_layout == "planner":
        if cluster.layouts:
            rule = "is not read with cluster.choose_layout=planner"
            yield Violation("cluster.layouts", cluster.layouts, rule, "remove it, or set cluster.choose_layout=configured")
        if cluster.hardware is None:
            yield Violation("cluster.hardware", None, "is required by cluster.choose_layout=planner", "name a file of conf/hardware/")


#: Stages that may be jobs.
JOBS = tuple(stage for stage in STAGES if stage not in INTERACTIVE_STAGES)
EXAMPLE = "'submit.stages=[shard,train_tokenizer,tokenize,pretrain,convert]'"
#: Keys that the chain sets for all of its jobs.
_OWN = ("stage", "submit", "dry_run", "hydra")


def submit_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the rules that the settings of stage=submit violate: every other group is checked for each stage."""
    broken = knobs.range_violations(config.submit, "submit.")
    yield from broken
    yield from paths.violations(config)
    if not broken:
        yield from _stages(config.submit)
        yield from _overrides(config.submit)


def _stages(submit: SubmitConfig) -> Iterator[Violation]:
    """There are some, each once."""
    if not submit.stages:
        yield Violation("submit.stages", "[]", "is required", f"name the stages in their order, for example {EXAMPLE}")
    for stage in dict.fromkeys(submit.stages):
        if stage in INTERACTIVE_STAGES:
            yield Violation("submit.stages", stage, "is no batch job", "remove it from the list")
        elif stage not in JOBS:
            yield Violation("submit.stages", stage, f"must be one of {', '.join(JOBS)}", nearest("", stage, list(JOBS)))
        elif (count := submit.stages.count(stage)) > 1:
            yield Violation("submit.stages", stage, f"is named {count} times", "name it once; submit a second chain for other settings")


def _overrides(submit: SubmitConfig) -> Iterator[Violation]:
    """They are those of stages of the chain, in the form of the command line."""
    for stage, words in submit.overrides.items():
        key = f"submit.overrides.{stage}"
        if stage not in submit.stages:
            rule = f"is for a stage that is none of submit.stages=[{','.join(submit.stages)}]"
            yield Violation(
                key, ",".join(words), rule, nearest("submit.overrides.", stage, submit.stages) if submit.stages else "remove it"
            )
        for word in words:
            if word.startswith("-") or not re.match(r"[+~]*\w[\w./@:-]*=", word):
                yield Violation(key, repr(word), "is not of the form key=value", f"write '{key}=[key=value]'")
            elif key_of(word).partition(".")[0].partition("/")[0] in _OWN and not re.match(r"[+]*stage\.", word):
                yield Violation(key, word, "is set for the whole chain", "remove it here")
