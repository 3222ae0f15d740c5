"""Runs that are longer than a time limit, as a chain of jobs (cluster.continuation=chain): each job submits the next one when it begins.

The next job waits in the queue meanwhile (--dependency=afterany), so it starts soon after this one has ended, however that happens. A run
that is finished, fails for good or is canceled cancels it. Jobs that wait for the success of this one wait for the next one instead.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline.config.paths import batch_scripts
from pipeline.config.schema import RunConfig
from pipeline.launch import allocation, job, moldable, slurm
from pipeline.launch.allocation import Allocation

log = logging.getLogger("pipeline")

#: Seconds between looks for jobs that wait for this one, after the first one; those of stage=submit are submitted right after it.
_MOVES = (20.0, 60.0, 600.0)
#: Seconds after which a submission that failed is tried again: Slurm may be busy, or the user may have as many jobs as allowed.
_AGAIN = 300.0
#: sbatch options that the next job takes from the variables of this one.
_FROM_VARIABLES = (
    *(("job-name", "SLURM_JOB_NAME"), ("partition", "SLURM_JOB_PARTITION"), ("account", "SLURM_JOB_ACCOUNT"), ("qos", "SLURM_JOB_QOS")),
    *(("cpus-per-task", "SLURM_CPUS_PER_TASK"), ("gpus-per-node", "SLURM_GPUS_PER_NODE")),
    *(("mem", "SLURM_MEM_PER_NODE"), ("mem-per-cpu", "SLURM_MEM_PER_CPU")),
)
#: And from its fields: option, name in `scontrol show job`. Slurm does not tell --signal and some others; cluster.sbatch can have them.
_FROM_FIELDS = (
    *(("time", "TimeLimit"), ("time-min", "TimeMin"), ("deadline", "Deadline"), ("output", "StdOut"), ("error", "StdErr")),
    *(("nodelist", "ReqNodeList"), ("exclude", "ExcNodeList"), ("constraint", "Features"), ("reservation", "Reservation")),
    *(("comment", "Comment"), ("nice", "Nice"), ("mail-user", "MailUser"), ("mail-type", "MailType"), ("licenses", "Licenses")),
    *(("network", "Network"), ("core-spec", "CoreSpec"), ("switches", "Switches"), ("tmp", "MinTmpDiskNode"), ("bb", "BurstBuffer")),
    *(("wckey", "WCKey"), ("power", "Power")),
)
#: Fields of GPUs and other resources, "gres:gpu:2", in newer versions "gres/gpu:2": option with what follows gres, or the number of GPUs.
_OF_RESOURCES = (
    *(("gres", "TresPerNode"), ("gpus", "TresPerJob"), ("gpus-per-task", "TresPerTask"), ("gpus-per-socket", "TresPerSocket")),
    *(("cpus-per-gpu", "CpusPerTres"), ("mem-per-gpu", "MemPerTres")),
)
#: Options by the values of OverSubscribe and Contiguous, and values of fields that are not set.
_FLAGS = {"NO": "--exclusive", "USER": "--exclusive=user", "MCS": "--exclusive=mcs", "YES": "--oversubscribe", "1": "--contiguous"}
_UNSET = ("(null)", "N/A", "*", "0", "")


def options(config: RunConfig, granted: Allocation, fields: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return the sbatch options of the next job: those of this one, and those of the cluster that no variable has.

    Args:
        fields: of this job, from slurm.facts.
    """
    given = {name: environment.get(variable, "") for name, variable in _FROM_VARIABLES}
    if "TresPerNode" in fields:  # has --gpus-per-node, too
        del given["gpus-per-node"]
    given |= {name: fields.get(field, "") for name, field in _FROM_FIELDS}
    for name, field in _OF_RESOURCES:
        value = re.sub(r"\bgres[:/]", "", fields.get(field, ""))
        given[name] = value if name == "gres" else "".join(re.findall(r"\bgpu[:=](?:.*[:=])?(\w+)", value)[:1])
    threads = fields.get("ReqB:S:C:T", "").rpartition(":")[2]
    words = [f"--{name}={value}" for name, value in (given | {"threads-per-core": threads}).items() if value not in _UNSET]
    words += [flag for field in ("OverSubscribe", "Contiguous") if (flag := _FLAGS.get(fields.get(field, "")))]
    if moldable.follows_nodes(config):
        words += moldable.size_options(config, len(granted.nodes), granted.tasks_per_node)
    else:
        words += [f"--nodes={len(granted.nodes)}"]
        words += [] if granted.tasks_per_node is None else [f"--ntasks-per-node={granted.tasks_per_node}"]
        words += ["--no-kill"] if config.cluster.spares else []
    words += ["--no-requeue"] if fields.get("Requeue") == "0" else []  # slurm/STAGE.sbatch has --requeue
    return [*words, "--open-mode=append", f"--dependency=afterany:{granted.job}", *config.cluster.sbatch]


def submit(config: RunConfig, arguments: Sequence[str], granted: Allocation, fields: Mapping[str, str]) -> str | None:
    """Submit the next job of the chain, unless it waits already, and return its id; None if Slurm refuses it, which is logged.

    Args:
        arguments: of `python -m pipeline`; the first one is the stage.
        fields: of this job, from slurm.facts, with the nodes that the next one shall not get.
    """
    # submitted before Slurm put this one into the queue again
    before = allocation.next_job(Path(config.run_dir), granted.job) if granted.restarts else None
    if before is not None and slurm.facts(before).get("JobState") == "PENDING":
        return before
    script = f"{batch_scripts(Path.cwd()) or 'slurm'}/{config.stage.name}.sbatch"
    kept = [argument for argument in arguments if not argument.startswith("stage=")]
    command = ["sbatch", "--parsable", *options(config, granted, fields, os.environ), script, *kept]
    try:
        number = slurm.command(command, job.outside(os.environ)).strip().partition(";")[0]
    except slurm.SlurmError as error:
        log.error("the next job of the chain was not submitted; tried again in %.0f s: %s", _AGAIN, error)
        return None
    log.info("job %s is the next one of the chain", number)
    return number


class Chain:
    """The next job of a chain, which waits in the queue while this one runs.

    It is submitted in a thread: the ranks do not wait for Slurm, and what it refuses is tried again. Jobs that wait for the success of this
    one wait for the next one from the beginning: when the node of this job is lost, nobody can move them any more, and Slurm would cancel
    them.

    Args:
        current: id of this job.
        submit: submits the next job and returns its id; None if that failed.
        record: gets the id, or None for the first attempt that failed.
    """

    def __init__(self, current: str, submit: Callable[[], str | None], record: Callable[[str | None], None]) -> None:
        self._current, self._submit, self._record = current, submit, record
        self._number: str | None = None
        self._canceled, self._last, self._lock = False, threading.Event(), threading.Lock()
        self._moves, self._move_at = iter(_MOVES), 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for attempt in itertools.count():
            number = self._submit()
            with self._lock:
                canceled, self._number = self._canceled, number
            if canceled and number is not None:
                slurm.cancel(number)
            if number is not None or not attempt:
                self._record(number)
            if number is not None or self._last.wait(_AGAIN):
                return

    def waits(self) -> bool:
        """Whether the next job is in the queue, or is now; waits for a submission that goes on. False for a chain that was canceled."""
        self._join()
        if self._number is None and not self._canceled and (number := self._submit()) is not None:
            self._number = number
            self._record(number)
        return self._number is not None and not self._canceled

    def look(self) -> None:
        """Move the jobs that wait for this one and have been submitted since; called again and again."""
        if self._number is not None and not self._canceled and time.time() >= self._move_at:
            self._move_at = time.time() + next(self._moves, _MOVES[-1])
            self._move(self._current, self._number)

    def hand_over(self, exclude: Sequence[str]) -> str:
        """Let the next job, which waits, continue the run, and return its id; `exclude` has all nodes that it shall not get."""
        assert self._number is not None
        self._move(self._current, self._number)
        slurm.set_excluded(self._number, exclude)
        return self._number

    def finish(self) -> None:
        """End the chain, as the run is finished: the jobs that wait for the success of the next one wait for this job again."""
        self._join()
        if self._number is not None and not self._canceled and self._move(self._number, self._current):
            slurm.cancel(self._number)

    def cancel(self) -> None:
        """End the chain at once, a job that is being submitted when Slurm has answered; Slurm cancels what waits for its success."""
        with self._lock:
            before, self._canceled = self._canceled, True
            number = self._number
        self._last.set()
        if number is not None and not before:
            slurm.cancel(number)

    def close(self) -> None:
        """Cancel, and wait for a submission that goes on: no job may be left that nobody knows."""
        self.cancel()
        self._join()

    def _join(self) -> None:
        """Wait for a submission that goes on, and make no further one."""
        self._last.set()
        self._thread.join()

    def _move(self, job: str, successor: str) -> bool:
        """Let jobs that wait for one job wait for another one; returns whether that succeeded."""
        try:
            slurm.move_dependents(job, successor)
        except slurm.SlurmError as error:
            log.warning("the jobs that wait for job %s were not changed: %s", job, error)
            return False
        return True
