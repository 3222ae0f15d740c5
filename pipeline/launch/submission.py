"""Submission to Slurm: jobs are tried, submitted, found in the queue and canceled, with an error that names the key."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.common.errors import UserError, Violation
from pipeline.common.ranks import slurm_seconds
from pipeline.launch import slurm

#: Timeout of sbatch, seconds.
TIMEOUT = 60
#: Between the fields of a line of squeue.
_SEPARATOR = "\x1f"
_NO_SLURM = Violation(
    "slurm",
    "sbatch",
    "the command sbatch is not installed on this machine",
    "run it on a login node of the cluster (tools/devcluster start launches a local cluster and prints SLURM_CONF)",
)
#: What Slurm says -> the key that it is about, and the option of sbatch.
_REJECTIONS = (
    (r"invalid partition|partition specified", "partition", "partition"),
    (r"account", "account", "account"),
    (r"qos", "qos", "qos"),
    (r"time limit|TIME_LIMIT", "time", "time"),
    (r"memory", "memory", "mem"),
    (r"gres|gpu", "gpus_per_node", "gpus-per-node"),
    (r"node count|too many nodes", "nodes", "nodes"),
    (r"option|feature", "sbatch", ""),
)


def _environment(text: str, environment: Mapping[str, str] | None) -> dict[str, str]:
    """The variables of sbatch, without those that would replace an option of the script, such as SBATCH_PARTITION."""
    variables = dict(os.environ if environment is None else environment)
    names = {"mem": "MEM_PER_NODE", "time": "TIMELIMIT", "chdir": "CHDIR", "requeue": "NO_REQUEUE"}
    for option in re.findall(r"^#SBATCH --([\w-]+)", text, re.MULTILINE):
        variables.pop(f"SBATCH_{names.get(option, option.upper().replace('-', '_'))}", None)
    return variables


def submit(text: str, environment: Mapping[str, str] | None = None, timeout: float = TIMEOUT) -> int:
    """Submit a batch script and return the job id.

    Args:
        environment: variables of sbatch, which the job inherits; default: those of this process.
        timeout: seconds.

    Raises:
        UserError: sbatch is not installed, timed out, or rejected the job; the message contains the output of sbatch.
    """
    return int(run(text, ["--parsable"], environment, timeout).strip().split(";")[0])  # "job id" or "job id;cluster"


def run(text: str, options: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = TIMEOUT) -> str:
    """Run sbatch with a script, and return what it prints; arguments and errors as those of submit."""
    command, variables = ["sbatch", *options], _environment(text, environment)
    try:
        result = subprocess.run(command, input=os.fsencode(text), capture_output=True, timeout=timeout, check=False, env=variables)
    except FileNotFoundError as error:
        raise UserError([_NO_SLURM]) from error
    except subprocess.TimeoutExpired as error:
        rule = f"sbatch did not respond within {timeout:.0f} s"
        raise UserError.of("slurm", "sbatch", rule, "check with squeue whether the job was submitted, and try again later") from error
    if result.returncode != 0:
        raise UserError([rejection(result.stderr.decode(errors="replace") or f"exit code {result.returncode}", text)])
    return result.stdout.decode(errors="replace")


def rejection(message: str, text: str) -> Violation:
    """Return the violation of a job that Slurm rejected: its key as far as the message tells, and the value from the script."""
    reason = " ".join(re.sub(r"sbatch: (error: )?|allocation failure: ", "", message).split())
    rule = f"Slurm rejected the job: {reason}"
    for pattern, key, option in _REJECTIONS:
        if re.search(pattern, reason, re.IGNORECASE):
            return Violation(
                f"cluster.{key}", _option(text, option), rule, f"set cluster.{key}; sinfo and sacctmgr show what the cluster has"
            )
    size = " ".join(re.findall(r"^#SBATCH (--(?:partition|nodes|ntasks-per-node|cpus-per-task|mem|gpus-per-node)=.*)$", text, re.MULTILINE))
    fix = "set cluster.partition, cluster.nodes, cluster.spares, cluster.tasks_per_node, cluster.cpus_per_task, cluster.memory "
    fix += "or cluster.gpus_per_node; "
    return Violation("cluster", size, rule, f"{fix}scontrol show partition and scontrol show node have the limits")


def _option(text: str, name: str) -> str | None:
    values = re.findall(rf"^#SBATCH --{name}=(.*)$", text, re.MULTILINE)
    return values[-1] if values else None


@dataclass(frozen=True)
class QueuedJob:
    """A job of this user that waits or runs.

    Attributes:
        number: job id.
        command: the script with its arguments, as far as sbatch knows them.
    """

    number: int
    name: str
    directory: str
    command: str


def queue() -> list[QueuedJob]:
    """Return the jobs of this user that wait or run.

    Raises:
        UserError: squeue is not installed or did not answer.
    """
    try:
        printed = slurm.command(["squeue", "--me", "--noheader", f"--format={_SEPARATOR.join(('%A', '%j', '%Z', '%o'))}"])
    except slurm.SlurmError as error:
        fix = "try again later, or where Slurm is: which jobs are submitted depends on those that still wait or run"
        raise UserError.of("slurm", "squeue", f"failed: {error}", fix) from error
    fields = [line.split(_SEPARATOR, 3) for line in printed.splitlines() if line.strip()]
    return [QueuedJob(int(number), name, directory, words) for number, name, directory, words in fields]


def is_pending(name: str, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a job of this user with this name has not started yet.

    Raises:
        UserError: squeue is not installed or did not answer.
    """
    try:
        words = ["squeue", "--me", "--noheader", "--format=%A", "--states=PENDING", f"--name={name}"]
        return bool(slurm.command(words, environment).split())
    except slurm.SlurmError as error:
        raise UserError.of("job", name, f"squeue failed: {error}", "try again later") from error


def absent() -> list[Violation]:
    """Return why no job can be submitted here: a command is missing, or a variable of Slurm is empty; empty if nothing is known."""
    violations = []
    if shutil.which("sbatch") is None:
        violations.append(_NO_SLURM)
    for name, value in os.environ.items():
        if value == "" and re.match(r"(SLURM|SBATCH|SQUEUE|SCANCEL)_", name):
            rule = "is empty, and a command of Slurm would read it as a value"
            violations.append(Violation(name, "''", rule, f"unset {name}, or give it a value"))
    return violations


def rejected(texts: Sequence[str]) -> dict[int, Violation]:
    """Ask Slurm whether it would accept jobs (sbatch --test-only), once for those with the same options.

    Returns:
        The number of a job in `texts` -> why it would be rejected.
    """
    answers: dict[str, Violation | None] = {}
    rejections, limits = {}, _time_limits()
    for number, text in enumerate(texts):
        options = _options(text)
        if options not in answers:
            answers[options] = _answer(text) or _too_long(text, limits)
        if (answer := answers[options]) is not None:
            rejections[number] = answer
    return rejections


def _answer(text: str) -> Violation | None:
    """Why a job would be rejected."""
    script = re.sub(r"^#SBATCH (--dependency=after\w+:JOB_OF_.*|--kill-on-invalid-dep=.*)\n", "", text, flags=re.MULTILINE)
    try:
        run(script, ["--test-only"])
    except UserError as error:
        violation = error.violations[0]
        return None if "not available" in violation.rule and _nodes_are_out(_option(text, "partition")) else violation
    return None


def _nodes_are_out(partition: str | None) -> bool:
    """Whether nodes are drained or down, without which --test-only refuses a job that Slurm would let wait for them."""
    words = ["sinfo", "--noheader", "--states=drain,down,fail,maint,reboot", "--format=%D"]
    try:
        return bool(slurm.command([*words, *([f"--partition={partition}"] if partition else [])]).strip())
    except slurm.SlurmError:
        return False


def _time_limits() -> dict[str, str]:
    """The time limit of every partition; that of the default partition also under an empty name. Empty if sinfo fails."""
    try:
        printed = slurm.command(["sinfo", "--noheader", "--format=%P|%l"])
    except slurm.SlurmError:
        return {}
    limits = dict(line.rsplit("|", 1) for line in printed.split())
    default = [limit for name, limit in limits.items() if name.endswith("*")]
    named = {name.rstrip("*"): limit for name, limit in limits.items()}
    return named | {"": default[0]} if default else named


def _too_long(text: str, limits: Mapping[str, str]) -> Violation | None:
    """Why a job would wait for ever: unless Slurm has EnforcePartLimits, it accepts a time above the limit of the partition."""
    partition, time = _option(text, "partition") or "", _option(text, "time")
    longest = [limits[name] for name in partition.split(",") if name in limits]
    if time is None or not longest or slurm_seconds(time) <= max(map(slurm_seconds, longest)):
        return None
    rule = f"exceeds the time limit of the partition {partition or '(default)'}, {' and '.join(longest)}: the job would wait for ever"
    return Violation("cluster.time", time, rule, "reduce cluster.time, or choose another cluster.partition")


def _options(text: str) -> str:
    """The options of a script on which the answer of Slurm depends."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    return "\n".join(line for line in lines if not re.match(r"#SBATCH --(job-name|output|dependency|kill-on-invalid-dep)\b", line))


def submit_all(
    texts: Sequence[Callable[[Sequence[int]], str]], environment: Mapping[str, str] | None = None, limit: str | None = None
) -> list[int]:
    """Submit jobs in order and return their ids. If one is rejected, or the command is interrupted, cancel the jobs submitted before.

    Args:
        texts: of each job, a function from the ids of the jobs before it to its script.
        environment: as in submit.
        limit: pattern of rejections after which the jobs submitted before remain, and the others are left out.

    Raises:
        UserError: as submit.
    """
    job_ids: list[int] = []
    try:
        for text in texts:
            job_ids.append(submit(text(job_ids), environment))
    except BaseException as error:
        if job_ids and limit and isinstance(error, UserError) and re.search(limit, str(error)):
            return job_ids
        if job_ids and not slurm.cancel(*job_ids):
            submitted = " ".join(map(str, job_ids))
            rule = "were submitted before the error and could not be canceled"
            remain = Violation("jobs", submitted, rule, f"run scancel {submitted}")
            raise UserError([*(error.violations if isinstance(error, UserError) else ()), remain]) from error
        raise
    return job_ids
