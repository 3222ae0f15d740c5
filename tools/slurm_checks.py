"""What tools/doctor asks Slurm: versions, partitions, a job of the site's size, GPUs and memory of a node, and the plugin of MPI."""

from __future__ import annotations

import functools
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.common.errors import Violation
from pipeline.config.cluster import ClusterConfig
from pipeline.config.paths import SLURM_DIR
from pipeline.config.schema import RunConfig
from pipeline.launch import job, live, maintenance, slurm, submission

SECONDS = 10.0  # for an answer
#: Plugin of Slurm that usually starts an MPI library, by what its version begins with.
PLUGINS = {"Open MPI": "pmix", "CRAY": "cray_shasta", "ParaStation": "pspmix", "Intel": "pmi2", "MVAPICH": "pmi2", "MPICH": "pmi2"}
#: Beginnings of the states of nodes that take no jobs.
DOWN = ("drain", "down", "fail", "inval", "maint", "power", "unknown")
#: Limits of a shell that end a training job, which Slurm gives to jobs (PropagateResourceLimits).
LIMITS = ("CPU", "AS", "DATA", "FSIZE")
Row = dict[str, str]


def row(check: str, found: object, bad: object = "", fix: str = "") -> Row:
    """What a check has found, which is fine unless `bad` is "warning" or "failure"."""
    return {"check": check, "status": str(bad or "ok"), "found": " ".join(str(found).split()), "fix": fix if bad else ""}


def refused(check: str, violations: Sequence[Violation]) -> list[Row]:
    return [row(check, f"{each.key}={each.value}: {each.rule}", "failure", each.fix) for each in violations]


@functools.cache
def ask(*words: str) -> str:
    return slurm.command(words, timeout=SECONDS)


def settings() -> dict[str, str]:
    return dict(re.findall(r"^(\w+) *= (.*?) *$", ask("scontrol", "show", "config"), re.MULTILINE))


def rows(config: RunConfig) -> Iterator[Row]:
    """Yield the rows, and raise SlurmError at the first question without an answer."""
    if shutil.which("sbatch") is None:
        yield row("Slurm", "is not installed here", "warning", "on a login node, load its module; on one machine nothing needs it")
        return
    text = f"{ask('sinfo', '--version').strip()}, cluster {settings()['ClusterName']}"
    old = tuple(map(int, re.findall(r"\d+", text)[:2])) < (20, 11)
    yield row("Slurm", text, old and "failure", "20.11 is required, for steps that start beside others (srun --overlap)")
    try:
        ask("sacct", "--noheader", "--allocations")
        yield row("accounting", "sacct answers")
    except slurm.SlurmError as error:
        yield row("accounting", f"{error}; runs record their node-hours themselves, and limits of QoS are those of queues")
    cluster, (known, qos) = config.cluster, live.asked()
    missing = {cluster.partition, *(queue.partition for queue in cluster.queues)} - {None, *known}
    differences = [] if missing else live.with_limits(cluster, known, qos)[1]
    text = f"{', '.join(map(str, missing))} is not among " if missing else ""
    text += "; ".join(differences) or ", ".join(f"{name} ({each.get('max_time') or 'no limit'})" for name, each in known.items())
    bad = "failure" if missing else differences and "warning"
    yield row("partitions", text, bad, f"correct queues and partition of cluster={cluster.name}")
    name = cluster.partition or next((queue.partition for queue in cluster.queues), None)
    limits = slurm.parse_facts(ask("scontrol", "show", "partition", "--oneliner", name)) if name in known else {}
    allowed = limits.get("AllowAccounts", "ALL").lower().split(",")
    if cluster.account and allowed != ["all"]:
        text = f"cluster.account={cluster.account}: the partition {name} takes {', '.join(allowed)}"
        yield row("account", text, cluster.account.lower() not in allowed and "failure", "correct it, or choose another partition")
    down, names = [], {cluster.partition, *(queue.partition for queue in cluster.queues)} - {None}
    states = [line.split("|") for line in ask("sinfo", "--noheader", "--format=%R|%a|%T|%D").splitlines()]
    states = [each for each in states if not names or each[0] in names]
    if not any(up == "up" and not state.startswith(DOWN) for _, up, state, _ in states):
        down = [f"{count} {state} in {name} ({up})" for name, up, state, count in states]
    text = f"no node is up: {', '.join(down)}" if down else "some are up"
    yield row("nodes", text, down and "failure", "wait, or choose another partition; sinfo -R has the reasons of the site")
    script = job.render(job.Job("doctor", "pretrain", (), Path.cwd(), "/dev/null"), live.corrected(cluster))
    found = [*submission.absent(), *job.not_given(cluster)] or list(submission.rejected([script]).values())
    if not down:
        yield from refused("sbatch", found) or [row("sbatch", "takes a training job (--test-only)")]
    text, fix = maintenance.notice(live.corrected(cluster)) or (f"none before the end of a job of {cluster.time}", "")
    yield row("maintenance", text, fix and "warning", fix)
    fields, wanted = live.node(cluster), cluster.gpus_per_node
    text, fix = f"{fields.get('NodeName')} has {fields.get('Gres')}", "correct it, or set it to 0 with cluster.sbatch=[--gres=NAME:NUMBER]"
    if fields:
        yield row("GRES", f"{text}, cluster.gpus_per_node={wanted}", wanted not in (0, live.gpus(fields)) and "failure", fix)
    numbers = {key: int(text) for key, text in {**settings(), **limits, **fields}.items() if text.isdecimal()}
    whole, of_core = numbers.get("RealMemory", 0), numbers.get("DefMemPerCPU", 0) * cluster.tasks_per_node * cluster.cpus_per_task
    given = cluster.memory or f"{numbers.get('DefMemPerNode') or of_core or whole} MB"
    settled = settings()
    killed = settled.get("ConstrainRAMSpace") == "yes" or "OverMemoryKill" in settled.get("JobAcctGatherParams", "")
    few = killed and not cluster.memory and int(given.split()[0]) < whole / 2
    text = f"a job gets {given} of {whole} MB a node{', and is killed above' if killed else ''}"
    yield row("memory", text, few and "warning", f"set cluster.memory={whole}M")
    propagated, but = (settled.get(f"PropagateResourceLimits{more}", "").split(",") for more in ("", "Except"))
    passed_on = [each for each in LIMITS if (propagated == ["ALL"] or each in propagated) and each not in but]
    inherited = LIMITS if "SLURM_JOB_ID" in os.environ else passed_on
    low = [each for each in inherited if resource.getrlimit(getattr(resource, f"RLIMIT_{each}"))[0] != resource.RLIM_INFINITY]
    text = f"{', '.join(low)}: limited here (ulimit -a), and in jobs" if low else "none"
    yield row("limits", text, low and "warning", "set cluster.sbatch=[--propagate=NONE]")
    yield mpi(cluster)


def mpi(cluster: ClusterConfig) -> Row:
    """The MPI of mpi4py, without MPI_Init, and the plugin that cluster.environment or slurm/sites/ names."""
    program = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        text = f"mpi4py is not imported within {SECONDS:.0f} s"
        return row("MPI", text, "warning", "try again: the file system of the packages may be slow (tools/pack)")
    if done.returncode:
        return row("MPI", done.stderr.strip().splitlines()[-1], "failure", "tools/install, or build mpi4py with the MPI of the site")
    library, listed = done.stdout.splitlines()[0], ask("sh", "-c", "srun --mpi=list 2>&1")
    names = re.findall(r"^\s+(\w+)$", listed, re.MULTILINE) + re.findall(r"\bpmix_v\d+", listed)
    sites = [SLURM_DIR / f"sites/{name}.sh" for name in (settings()["ClusterName"], "local")]
    sourced = ask("bash", "-c", f"PIPELINE_SLURM={SLURM_DIR}; . {next(filter(Path.exists, sites))}; echo $SLURM_MPI_TYPE")
    plugin = cluster.environment.get("SLURM_MPI_TYPE") or sourced.strip() or settings().get("MpiDefault", "none")
    usual = next((plugin for start, plugin in PLUGINS.items() if library.lower().startswith(start.lower())), plugin)
    bad = "failure" if plugin not in names else not plugin.startswith(usual) and "warning"
    fix = f"set cluster.environment.SLURM_MPI_TYPE={usual}" if usual in names else "build mpi4py with the MPI of the site"
    return row("MPI", f"{library}; SLURM_MPI_TYPE={plugin}, srun has {', '.join(names)}", bad, fix)
