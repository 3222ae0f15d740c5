"""Slurm jobs: their text as a pure function, and their submission.

How a stage runs inside a job is written once, in slurm/STAGE.sbatch; what a site wants of a job is data, conf/cluster/.
A rendered job is the site's options followed by the stage's script.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.schema import ClusterConfig
from pipeline.errors import UserError, Violation

#: Seconds that Slurm's controller may take to answer.
TIMEOUT = 60


@dataclass(frozen=True)
class Job:
    """One batch job: a stage with its overrides.

    Attributes:
        name: what squeue shows.
        stage: slurm/STAGE.sbatch runs it.
        overrides: the command line of `python -m pipeline`, without `stage=`.
        directory: repository root, where the job runs.
        output: file of the job's standard output and error, %j standing for its number; its folder must exist when the job starts.
        after: jobs that must have ended well before this one starts; when one fails, this one is removed.
    """

    name: str
    stage: str
    overrides: tuple[str, ...]
    directory: Path
    output: str
    after: tuple[int, ...] = ()


def render(job: Job, cluster: ClusterConfig) -> str:
    """The text that sbatch reads."""
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {_directive(option)}" for option in _options(job, cluster)]
    lines += [
        "set -euo pipefail",
        " \\\n  ".join(["exec bash " + shlex.quote(f"slurm/{job.stage}.sbatch"), *map(shlex.quote, job.overrides)]),
    ]
    return "\n".join(lines) + "\n"


def _options(job: Job, cluster: ClusterConfig) -> Iterator[str]:
    """The options of a job."""
    yield f"--job-name={job.name}"
    yield f"--chdir={job.directory}"
    yield f"--output={job.output}"
    if job.after:
        yield f"--dependency=afterok:{':'.join(map(str, job.after))}"
        yield "--kill-on-invalid-dep=yes"
    yield f"--nodes={cluster.nodes}"
    yield f"--ntasks-per-node={cluster.tasks_per_node}"
    yield from site_options(cluster)


def site_options(cluster: ClusterConfig) -> Iterator[str]:
    """The options that a site wants of every job, whatever its size."""
    for name in ("account", "partition", "qos"):
        if value := getattr(cluster, name):
            yield f"--{name}={value}"
    yield f"--cpus-per-task={cluster.cpus_per_task}"
    if cluster.gpus_per_node:
        yield f"--gpus-per-node={cluster.gpus_per_node}"
    if cluster.memory:
        yield f"--mem={cluster.memory}"
    yield f"--time={cluster.time}"
    yield from cluster.sbatch


def _directive(option: str) -> str:
    """An option as sbatch reads it back from a line: quoted where it holds spaces, a # or quotes."""
    if re.fullmatch(r"[\w@%+=:,./-]*", option):
        return option
    name, equals, value = option.partition("=")
    return name + equals + '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def sbatch_line(cluster: ClusterConfig, stage: str, world_size: int, overrides: Iterable[str]) -> str:
    """The command that starts a stage on so many ranks, to be typed at the repository root.

    Args:
        overrides: the command line of `python -m pipeline`; what names the stage or asks for a dry run is left out.
    """
    nodes = -(-world_size // cluster.tasks_per_node)
    size = [f"--nodes={nodes}", f"--ntasks-per-node={cluster.tasks_per_node}"]
    if nodes * cluster.tasks_per_node != world_size:  # the last node is not full
        size.append(f"--ntasks={world_size}")
    kept = [o for o in overrides if not re.match(r"\+*(stage=|dry_run[.=])", o)]
    return shlex.join(["sbatch", *size, *site_options(cluster), f"slurm/{stage}.sbatch", *kept])


def violations(cluster: ClusterConfig, stage: str, directory: Path) -> list[Violation]:
    """What would keep a job of this stage from being rendered or understood."""
    found = []
    scripts = directory / "slurm"
    if not (scripts / "site.sh").is_file():
        found.append(Violation("working directory", directory, "holds no slurm/site.sh", "start it at the repository root"))
    elif not (scripts / f"{stage}.sbatch").is_file():
        known = ", ".join(sorted(p.stem for p in scripts.glob("*.sbatch")))
        found.append(Violation("stage", stage, f"has no slurm/{stage}.sbatch", f"choose one of {known}, or write that file"))
    texts = {name: getattr(cluster, name) for name in ("account", "partition", "qos", "memory")}
    texts |= {f"sbatch[{i}]": option for i, option in enumerate(cluster.sbatch)}
    for name, text in texts.items():
        if text is not None and not text.isprintable():
            found.append(Violation(f"cluster.{name}", repr(text), "must be one printable line", f"mend cluster.{name}"))
    found += [
        Violation("cluster.sbatch", option, "must be an option as on sbatch's command line", "write --name=value")
        for option in cluster.sbatch
        if not option.startswith("-")
    ]
    # A bare number is minutes to Slurm; it is also what YAML makes of 24:00:00 without quotes: 86400, two months.
    if not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2}|UNLIMITED", cluster.time):
        rule = "must be days-hours, hours:minutes:seconds or minutes:seconds"
        found.append(
            Violation("cluster.time", cluster.time, rule, 'write it in one of these forms, in a YAML file with quotes: "24:00:00"')
        )
    return found


def submit(text: str) -> int:
    """Hand a job to Slurm and return its number.

    Raises:
        UserError: there is no Slurm, it did not answer, or it refused the job; its own words are in the message.
    """
    command = ["sbatch", "--parsable"]
    fix = "run it on a login node of the cluster (tools/devcluster start brings up one on this machine and prints SLURM_CONF)"
    try:
        answer = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except FileNotFoundError as error:
        raise UserError.of("hydra/launcher", "slurm", "the command sbatch is not on this machine", fix) from error
    except subprocess.TimeoutExpired as error:
        rule = f"sbatch gave no answer in {TIMEOUT} s"
        raise UserError.of("hydra/launcher", "slurm", rule, "look with squeue whether the job is there, and try again later") from error
    if answer.returncode != 0:
        words = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        raise UserError.of(
            "hydra/launcher", "slurm", f"Slurm refused the job: {words}", f"change the cluster's settings (cluster.*), or {fix}"
        )
    return int(answer.stdout.strip().split(";")[0])  # "number" or "number;cluster"


def cancel(jobs: Iterable[int]) -> bool:
    """Take jobs back, ended or not; whether Slurm did so."""
    command = ["scancel", *map(str, jobs)]
    try:
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
