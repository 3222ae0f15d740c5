"""The preflight of a job: steps of Slurm that test its nodes, and the search for those because of which a step fails. Loads no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline.common import ends, events
from pipeline.common.atomic_files import make_folder
from pipeline.common.errors import CheckFailed, UserError
from pipeline.common.ranks import expand_tasks
from pipeline.common.texts import count
from pipeline.config.command_line import quoted
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import site, slurm
from pipeline.preflight import file_system, judge, node_result
from pipeline.preflight.bisection import search

log = logging.getLogger("pipeline")

#: Full tests, each without the nodes that the ones before found bad.
ROUNDS = 4
#: Seconds beyond cluster.preflight_seconds in which srun starts the processes and ends, and in which it kills them.
START_SECONDS, KILL_SECONDS = 20.0, 15.0
#: What srun says of a task that it has killed or that has failed, which has a result itself.
_OF_TASK = re.compile(r": tasks? \d")
#: A search goes on for so many time limits of a step; then what it has found counts.
SEARCH_LIMITS = 10
#: Fixes of what fails on most nodes, by check.
_FIXES = {
    "file system": ("run_dir", "free space or inodes, or choose a run_dir on another file system"),
    "network": (
        "cluster.fabric",
        "load the plugin of NCCL (cluster.modules, cluster.environment.NCCL_NET), or correct cluster.fabric",
    ),
    "GPUs": ("cluster.gpus_per_node", "request the GPUs of the job (sbatch --gpus-per-node), or correct cluster.gpus_per_node"),
    "host names": ("cluster.host_suffix", "correct it, or ask the site about its name server"),
}


def wanted(config: RunConfig, nodes: Sequence[str]) -> bool:
    """Whether a job on these nodes begins with a preflight (cluster.preflight)."""
    setting = config.cluster.preflight
    trains = config.stage.name in TRAINING_STAGES and config.cluster.gpus_per_node > 0 and len(nodes) > 1
    return setting == "on" or (setting == "auto" and trains)


def run(config: RunConfig, nodes: Sequence[str], folder: Path, tasks_per_node: int | None = None) -> dict[str, str]:
    """Test nodes of this allocation, log a table, and record the event `preflight` in the run directory.

    A step runs on all nodes. If its all-reduces fail or hang, the nodes that are behind the others are bad; if there are none, steps on
    parts of the nodes find them. The rest is tested again.

    Args:
        config: of the job; the group cluster and run_dir are read.
        nodes: to be tested; this process may run srun on them.
        folder: for the results, on a file system that all nodes share; what is in it is deleted.
        tasks_per_node: ranks of a node; default: those of the job, or cluster.tasks_per_node.

    Returns:
        Bad node -> reason.

    Raises:
        UserError: what is wrong is no fault of a node: a full file system, a check that more than half of the nodes fail.
        CheckFailed: srun starts nothing, or the all-reduces fail without a node because of which they do.
    """
    started = time.monotonic()
    run_dir = Path(config.run_dir)
    site.prepare(config)
    try:
        _prepare(folder, config)
        steps = _Steps(config, folder, tasks_per_node or _tasks_of_job() or config.cluster.tasks_per_node)
        bad = _tested(steps, nodes, config)
    except (UserError, CheckFailed) as error:
        events.record(run_dir, "preflight", nodes=len(nodes), error=str(error))
        raise
    findings = judge.judge(steps.results, nodes, config.cluster)
    findings = [finding for finding in findings if finding.node in steps.results or finding.node not in bad]
    bad = judge.bad_nodes(findings) | bad
    log.info("preflight:\n%s", judge.table(findings, nodes, bad))
    seconds = time.monotonic() - started
    log.info("%s (%.0f s, %d steps)", judge.verdict(nodes, bad), seconds, steps.count)
    medians = {finding.check: finding.median for finding in findings if finding.median}
    events.record(run_dir, "preflight", nodes=len(nodes), bad=bad, seconds=round(seconds, 1), steps=steps.count, medians=medians)
    return bad


def _tasks_of_job() -> int | None:
    counts = os.environ.get("SLURM_TASKS_PER_NODE")
    return expand_tasks(counts)[0] if counts else None


def _tested(steps: _Steps, nodes: Sequence[str], config: RunConfig) -> dict[str, str]:
    """Test all nodes, and again without those that are bad, until the rest passes together; the bad ones."""
    good, bad = list(nodes), dict[str, str]()
    log.info("preflight: testing %s", count(len(good), "node"))
    for _ in range(ROUNDS):
        passed = steps.test([good])[0]
        newly_bad = _judged(steps, good, config)
        if not passed and not newly_bad:
            newly_bad = _searched(steps, good)
        if len(newly_bad) == len(good):
            said = f"; the last message: {steps.message}" if steps.message else ""
            raise CheckFailed(f"preflight: none of {len(good)} nodes passes; {good[0]}: {newly_bad[good[0]]}{said}")
        bad |= newly_bad
        good = [node for node in good if node not in bad]
        if passed:
            return bad
    fails = f"the all-reduces of {len(good)} nodes fail, and no node was found because of which they do"
    raise CheckFailed(f"preflight: {fails} {steps.message}".strip())


def _prepare(folder: Path, config: RunConfig) -> None:
    """Empty the folder, and refuse a file system that cannot take a run before anything is started on it."""
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    if problem := judge.file_system_problem(file_system.check(folder), config.cluster.free_gb):
        key, fix = _FIXES["file system"]
        raise UserError.of(key, config.run_dir, problem, fix)


def _judged(steps: _Steps, nodes: Sequence[str], config: RunConfig) -> dict[str, str]:
    """Nodes whose results, or whose silence where most answered, say that they are bad.

    Raises:
        UserError: more than half of the nodes fail a check.
    """
    present = [node for node in nodes if node in steps.results]
    findings = judge.judge(steps.results, nodes if len(present) > len(nodes) / 2 else present, config.cluster)
    for check, failing, reason in judge.common_problems(findings, nodes):
        key, fix = _FIXES.get(check, ("cluster.preflight", "look at the nodes, or set cluster.preflight=off to start all the same"))
        value = getattr(config.cluster, key.removeprefix("cluster."), config.run_dir)
        raise UserError.of(key, value, f"preflight: '{check}' fails on {failing} of {len(nodes)} nodes: {reason}", fix)
    return judge.bad_nodes(findings)


def _searched(steps: _Steps, nodes: Sequence[str]) -> dict[str, str]:
    """The nodes that steps on parts of the nodes find; each with what its own result says, if it has one."""
    log.warning("preflight: the all-reduces of %d nodes fail or hang; testing parts of them", len(nodes))
    steps.search_until = time.monotonic() + SEARCH_LIMITS * (steps.seconds + START_SECONDS)
    try:
        reasons = search(nodes, steps.test)
        return {node: f"{reason}{steps.said(node)}" for node, reason in reasons.items()}
    except TimeoutError:
        why = "and the search for the nodes because of which they do takes too long"
        raise CheckFailed(f"preflight: the all-reduces of {len(nodes)} nodes fail, {why}") from None


@dataclass(frozen=True)
class _Step:
    """A step that runs: its nodes, the folder of their results, what srun and its processes print, and srun."""

    nodes: Sequence[str]
    folder: Path
    output: IO[bytes]
    srun: subprocess.Popen


class _Steps:
    """Steps of srun.

    Attributes:
        results: node -> its newest result.
        count: steps so far.
        message: what srun said when a step failed, or the last line of its output.
        seconds: time limit of a step.
        search_until: time (monotonic) after which test() raises TimeoutError.
    """

    def __init__(self, config: RunConfig, folder: Path, tasks_per_node: int) -> None:
        self._config, self._folder, self._tasks = config, folder, tasks_per_node
        cluster = config.cluster
        self.seconds = cluster.preflight_seconds
        self._overrides = [
            f"run_dir={quoted(config.run_dir)}",
            f"cluster.name={quoted(cluster.name)}",
            f"cluster.host_suffix={quoted(cluster.host_suffix)}",
            f"cluster.preflight_seconds={cluster.preflight_seconds!r}",
            f"cluster.gpus_per_node={cluster.gpus_per_node}",
            f"cluster.free_gb={cluster.free_gb!r}",
            f"cluster.slow_factor={cluster.slow_factor!r}",
        ]
        self.results: dict[str, node_result.Result] = {}
        self._failures: dict[str, str] = {}
        self.count, self.message, self.search_until = 0, "", float("inf")

    def test(self, groups: list[list[str]]) -> list[bool]:
        """Run a step on each of these groups, all at once; whether the all-reduces of each succeeded.

        Raises:
            TimeoutError: the time of the search is over.
        """
        if time.monotonic() > self.search_until:
            raise TimeoutError
        with contextlib.ExitStack() as stack:
            running: list[_Step] = []
            for nodes in groups:
                self.count += 1
                self.results = {node: result for node, result in self.results.items() if node not in nodes}
                folder = self._folder / str(self.count)
                folder.mkdir()
                output = stack.enter_context(tempfile.TemporaryFile())
                running.append(_Step(nodes, folder, output, self._start(nodes, folder, output)))
            _wait(running, time.monotonic() + self.seconds + START_SECONDS)
            return [self._read(step.nodes, step.folder, step.output) for step in running]

    def _start(self, nodes: Sequence[str], folder: Path, output: IO[bytes]) -> subprocess.Popen:
        """Start srun. A process that fails does not end the others, which have results to write."""
        tasks = self._tasks
        command = [
            "srun",
            "--no-kill",
            "--overlap",
            "--mpi=none",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--distribution=block",
            "--quit-on-interrupt",
        ]
        command += [
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            f"--ntasks={len(nodes) * tasks}",
            f"--ntasks-per-node={tasks}",
        ]
        command += site.srun_options(self._config, tasks)
        command += site.rank_command(self._config, ["stage=preflight", *self._overrides], sys.executable)
        environment = {name: value for name, value in os.environ.items() if name != ends.VARIABLE}  # records of the ranks of training
        environment["SLURM_EXPORT_ENV"] = "ALL"  # as in slurm/site.sh
        command.append(f"stage.folder={quoted(str(folder.absolute()))}")
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)

    def _read(self, nodes: Sequence[str], folder: Path, output: IO[bytes]) -> bool:
        output.seek(0)
        text = output.read().decode(errors="replace")
        results = node_result.printed(text) | node_result.read(folder, nodes)
        self.results |= results
        complete = judge.is_complete(results, nodes)
        if not complete:
            said = [line for line in text.splitlines() if line.startswith("srun: error:") and not _OF_TASK.search(line)]
            lines = [line for line in text.splitlines() if line.strip() and node_result.MARK not in line and not _OF_TASK.search(line)]
            self.message = " ".join(said[:2] or lines[-1:])
            if len(nodes) == 1:
                self._failures[nodes[0]] = results.get(nodes[0], {}).get("error") or self.message
        return complete

    def said(self, node: str) -> str:
        """What a node, or srun, said when the node failed alone, in brackets; empty for nothing."""
        return f" ({self._failures[node]})" if self._failures.get(node) else ""


def _wait(steps: Sequence[_Step], deadline: float) -> None:
    """Wait until each srun has ended. After its time a signal ends a step; SIGKILL of srun itself would leave the processes behind."""
    for attempt in range(3):
        for step in steps:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.srun.wait(max(0.0, deadline - time.monotonic()))
        late = [step for step in steps if step.srun.poll() is None]
        deadline = time.monotonic() + KILL_SECONDS
        for step in late:
            if attempt:
                _kill(step)
            step.srun.terminate() if attempt < 2 else step.srun.kill()
    for step in late:
        log.warning("preflight: srun did not end a step; its processes may be left behind")
        step.srun.wait()


def _kill(step: _Step) -> None:
    """Let Slurm kill the processes of a step, which is known by its results; a suspended process ignores other signals."""
    known = node_result.read(step.folder, step.nodes)
    if known:
        job, number, _ = next(iter(known.values()))["step"].split(".")
        with contextlib.suppress(slurm.SlurmError):
            slurm.command(["scancel", "--signal=KILL", f"{job}.{number}"], timeout=KILL_SECONDS)
