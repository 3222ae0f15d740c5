"""Runs the ranks of a stage inside of a Slurm job, and decides what follows their end. slurm/site.sh starts it on the first node.

    python -m pipeline.launch.supervisor stage=pretrain key=value ...

It loads no torch and uses no GPU. It starts the ranks with srun (rank_step), reads how they ended, and starts them again on the nodes that
remain, puts the job back into the queue, leaves the rest to the next job of the chain, or ends (recovery). The exit code of the job is
that of the ranks. Everything is recorded in RUN/events.jsonl.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.common import ends, events, locks, signals
from pipeline.common.errors import CONTINUE, STOPPED, CheckFailed, ToBeContinued, UserError
from pipeline.common.git_commit import commit
from pipeline.common.progress import set_up_logging
from pipeline.config import layout
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import allocation, chain, moldable, preflight_step, rank_step, recovery, site, slurm, snapshot
from pipeline.launch.allocation import Allocation
from pipeline.launch.deputy import Deputy
from pipeline.launch.placement import Placement
from pipeline.launch.recovery import Action, ActionKind, Situation
from pipeline.training import request_files

log = logging.getLogger("pipeline")

#: Seconds before the time limit at which the ranks are asked to write a checkpoint, beside Slurm's own signal (#SBATCH --signal), which
#: a rank that starts at that moment would miss; and seconds between two requests.
LEAD, REPEAT = 30.0, 20.0
#: Seconds that Slurm may need to end a job that was put back into the queue.
REQUEUED = 300


class Supervisor:
    """The life of one job.

    Args:
        config: what they compose; None if they do not, or for a sweep: then the ranks say why, and nothing is recovered.
    """

    def __init__(self, arguments: Sequence[str], config: RunConfig | None, granted: Allocation) -> None:
        self._arguments, self._config = list(arguments), config
        self._placement = Placement(arguments, config, granted)
        self._granted = self._placement.granted
        self._trains = config is not None and config.stage.name in TRAINING_STAGES
        self._run_dir = Path(config.run_dir) if config is not None and self._trains else None
        self._blamed: list[str] = []
        self._failures = 0
        self._launches = 0
        self._next: chain.Chain | None = None
        self._made_run_dir = False
        self._deputy: Deputy | None = None
        self._fields = slurm.facts(granted.job, patience=slurm.PATIENCE)
        self._limit = slurm.seconds_of(self._fields.get("EndTime", "")) or float("inf")
        self._can_requeue = config is not None and self._fields.get("Requeue", "1") == "1"
        self._asked = 0.0
        self._folder: Path | None = None
        self._told: Future[dict[str, str]] | None = None  # asked when the job is told to end
        self._end: Future[dict[str, str]] | None = None  # asked when the time seems to end
        self._claims = ExitStack()

    def run(self) -> int:
        """Run the ranks until the stage is finished or another job continues; returns the exit code of the job.

        Raises:
            UserError: the configuration is illegal for these nodes, run_dir is in use, or what the preflight finds is no fault of a node.
            CheckFailed: the preflight cannot start a step.
            ToBeContinued: a signal came while this job waited for the run directory.
        """
        try:
            with self._claims:
                return self._run()
        except Exception as error:
            if self._next is not None:
                self._next.close()
            if self._deputy is not None:
                self._deputy.close()
            if not isinstance(error, UserError | CheckFailed | ToBeContinued):  # a defect, or a run directory that was damaged meanwhile
                self._record_action(Action(ActionKind.END, 1, f"{type(error).__name__}: {error}".partition("\n")[0]))
            raise

    def _run(self) -> int:
        """See run()."""
        self._check()
        site.prepare(self._config)
        if self._run_dir is not None:
            self._made_run_dir = not self._run_dir.exists()
            self._claims.enter_context(locks.claimed(self._run_dir, "run_dir", file=locks.OF_JOB))  # else nothing is written or removed
            locks.refuse_held(self._run_dir, "run_dir")
            recovery.remove_leftovers(self._run_dir)
            if not self._granted.restarts:  # a request to this job holds while it waits in the queue again
                request_files.remove(self._run_dir / request_files.STOP)
            self._failures = recovery.failures_in_a_row(self._run_dir)
            self._placement.exclude(allocation.excluded(self._run_dir), "it failed in an earlier job")
            names = (("started", "StartTime"), ("limit", "EndTime"), ("queued", "SubmitTime" if self._granted.restarts else "EligibleTime"))
            times = {name: slurm.seconds_of(self._fields.get(field, "")) for name, field in names}
            self._record("job_start", nodes=self._granted.nodes, restarts=self._granted.restarts, commit=commit(), **times)
            if self._config is not None:
                snapshot.write_in_job(self._run_dir, self._arguments, self._config)
        if (action := self._preflight()) is not None:
            return self._leave(action)
        if self._trains and self._config is not None and self._config.cluster.continuation == "chain":
            fields = {**self._fields, "ExcNodeList": ",".join(self._excluded())}
            submit = partial(chain.submit, self._config, self._arguments, self._granted, fields)
            self._next = chain.Chain(self._granted.job, submit, lambda number: self._record("chain", next=number))
        no_kill = self._config is not None and (self._config.cluster.spares or self._config.cluster.min_nodes)
        if self._run_dir is not None and no_kill:
            self._deputy = Deputy(self._granted.job, self._run_dir)
        while True:
            action = self._launch()
            if action.kind is not ActionKind.RESTART:
                return self._leave(action)
            self._record_action(action)
            log.warning("starting the ranks again, %s", f"without {', '.join(action.exclude)}" if action.exclude else "on the same nodes")

    def _check(self) -> None:
        """Refuse what the ranks would refuse, before they are started and before anything is written."""
        tasks, config = os.environ.get("SLURM_NTASKS", ""), self._config
        if config is not None and tasks.isdecimal() and not moldable.follows_nodes(config):
            spares = config.cluster.spares * (self._granted.tasks_per_node or 0) if self._trains else 0
            check.check(config, layout.job_size(config, int(tasks) - spares))

    def _preflight(self) -> Action | None:
        """Test the nodes, and leave out those that fail (cluster.preflight); returns what the job does if too few are left."""
        if self._config is None or not preflight_step.wanted(self._config, self._granted.nodes):
            return None
        nodes = self._placement.good()
        if (folder := recovery.job_folder(self._run_dir, self._granted, "preflight")) is None:
            return None
        bad = preflight_step.run(self._config, nodes, folder, self._granted.tasks_per_node)
        shutil.rmtree(folder, ignore_errors=True)
        for node, reason in bad.items():
            self._exclude([node], f"preflight: {reason}")
        if len(nodes) - len(bad) >= self._placement.fewest(self._placement.most()):
            return None
        self._failures += 1
        self._record("ranks_end", code=1, reason="the preflight leaves too few nodes", progress=False, failed=True, lost=sorted(bad))
        return recovery.too_few_nodes(
            Situation(1, failures=self._failures, most_failures=self._config.cluster.max_retries, can_requeue=self._can_requeue), bad
        )

    def _launch(self) -> Action:
        """Run the ranks once and decide what follows.

        Raises:
            UserError: no layout is legal on the nodes.
        """
        nodes, shape = self._placement.shape()
        if self._deputy is not None:
            self._deputy.watch(self._placement.good(), self._granted.nodes[0])
        before = recovery.newest_step(self._run_dir)
        folder = self._folder = recovery.job_folder(self._run_dir, self._granted, f"ranks-{self._launches}")
        options = site.srun_options(self._config, self._granted.tasks_per_node)
        options += self._granted.step_options(nodes, again=self._launches > 0)
        self._launches += 1
        self._told = None
        self._record("ranks_start", nodes=nodes, step=before, layout=shape.layout)
        command = ["srun", "--kill-on-bad-exit=1", *options, *rank_step.SHELL, *site.rank_command(self._config, shape.overrides)]
        ended = rank_step.run(command, folder, self._look)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        step = recovery.newest_step(self._run_dir)
        progress = step > before
        stopped = recovery.was_stopped(self._run_dir, ended.started)
        fields = {} if ended.code == 0 else self._facts()
        preempted, requeued = slurm.is_preempted(fields), slurm.is_requeued(fields, self._granted.restarts)
        if slurm.is_out_of_time(fields) and not preempted:  # it came before the ranks could end
            ended = replace(ended, code=CONTINUE, first=None)
        failed = not (preempted or requeued or stopped) and not (ended.code in (0, *STOPPED) and ended.first is None)
        counts = failed or (ended.code == CONTINUE and not (progress or stopped))
        self._failures = (0 if progress else self._failures) + (1 if counts else 0)
        lost = self._placement.lost(nodes) if failed and (ended.first is None or ended.first.may_pass) else ()
        if failed and self._told is None and signal.SIGTERM in signals.received:  # it came after the answer
            fields = self._facts()
            preempted, requeued = slurm.is_preempted(fields), slurm.is_requeued(fields, self._granted.restarts)
        host = "" if ended.first is None or ended.first.follows else ended.first.host
        good = self._placement.good(without=(*lost, host))
        action = recovery.decide(
            Situation(
                code=ended.code,
                first=ended.first,
                lost=lost,
                progress=progress,
                failures=self._failures,
                most_failures=3 if self._config is None else self._config.cluster.max_retries,
                nodes=len(good),
                blamed_before=tuple(self._blamed),
                needed=len(nodes),
                fewest=self._placement.fewest(len(nodes)),
                seconds_left=self._limit - time.time(),
                preempted=preempted,
                canceled=signal.SIGTERM in signals.received,
                requeued=requeued,
                can_requeue=self._can_requeue,
                chain=self._next is not None and ended.code != 0 and self._next.waits(),
                stopped=stopped,
                phase=(phase := self._placement.next_phase(before, step)),
                has_phase=phase == self._placement.most(),
            )
        )
        if host:
            self._blamed.append(host)
        first = ended.first
        self._exclude(set(action.exclude) & set(lost), "it does not answer")
        self._exclude(set(action.exclude) - set(lost), action.reason if first is None else f"rank {first.rank}: {first.reason}")
        named = {} if first is None else {"rank": first.rank, "host": first.host, "reason": first.reason, "where": first.where}
        named |= {"follows": True} if first is not None and first.follows else {}
        named |= {"seconds": round(ended.ended - ended.started, 1), "lost": list(lost)}
        self._record("ranks_end", code=ended.code, step=step, progress=progress, failed=counts, **named)
        if failed:
            stage = self._arguments[0].partition("=")[2] if self._config is None else self._config.stage.name
            print("\n".join(recovery.explain(stage, ended, action, lost, self._run_dir, step)), file=sys.stderr, flush=True)
        return action

    def _facts(self) -> dict[str, str]:
        """The fields of the job after its ranks have ended: as asked when it was told to end, else now; waits for a silent controller."""
        fields = (self._told.result() if self._told else {}) or slurm.facts(self._granted.job, self._patience())
        self._renew_limit(fields)
        self._fields = fields or self._fields
        return fields

    def _patience(self) -> float:
        """Seconds to wait for a controller that does not answer."""
        return min(max(self._limit - time.time() - LEAD / 2, 0.0), slurm.PATIENCE)

    def _renew_limit(self, fields: Mapping[str, str]) -> None:
        """Read the end of the job again, which `scontrol update TimeLimit` changes."""
        limit = slurm.seconds_of(fields.get("EndTime", ""))
        if limit is not None and limit != self._limit and fields.get("JobState") == "RUNNING":
            log.info("the time limit of job %s is now %s", self._granted.job, fields["EndTime"])
            self._record("limit", limit=limit)
            self._limit, self._end = limit, None

    def _look(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on signals that reached this process, and ask for a checkpoint before the time limit."""
        told = signal.SIGTERM in signals.received or (self._folder is not None and ends.was_told(self._folder))
        if told and self._told is None:
            self._told = slurm.ask(self._granted.job)
        if self._next is not None:
            answered = signal.SIGTERM in signals.received and self._told is not None and self._told.done()
            if answered and self._told is not None and slurm.is_canceled(self._told.result(), self._granted.restarts):
                self._next.cancel()  # at once: a job that is canceled may be killed before its ranks have ended
            self._next.look()
        now = time.time()
        if self._trains and self._limit - now < 2 * LEAD and self._end is None:
            self._end = slurm.ask(self._granted.job)
        if self._end is not None and (answered := self._end.done()):
            self._renew_limit(self._end.result())
        late = self._end is not None and self._limit - now < (LEAD if answered else LEAD / 2)
        if (late or signal.SIGUSR1 in signals.received) and now - self._asked > REPEAT:
            self._asked = now
            process.send_signal(signal.SIGUSR1)

    def _leave(self, action: Action) -> int:
        """Do what ends this job, record it, and return the exit code."""
        if self._deputy is not None:
            self._deputy.close()
        if action.kind in (ActionKind.REQUEUE, ActionKind.CHAIN):
            action = replace(action, exclude=self._excluded())
        if action.kind is ActionKind.REQUEUE:
            return self._requeue(action)
        if self._next is not None and action.kind is ActionKind.CHAIN:
            number = self._next.hand_over(action.exclude)
            self._placement.resize(number)
            log.info("job %s continues: %s", number, action.reason)
        self._record_action(action)
        if self._next is not None and action.kind not in (ActionKind.CHAIN, ActionKind.REQUEUED):
            (self._next.finish if action.code == 0 else self._next.close)()
        if action.code == 2 and self._made_run_dir and self._run_dir is not None:
            recovery.remove_if_unused(self._run_dir)
        return action.code

    def _excluded(self) -> tuple[str, ...]:
        """The nodes that the run shall not get from the queue."""
        if self._run_dir is None:
            return tuple(slurm.hosts(self._fields.get("ExcNodeList", "")))
        return tuple(allocation.excluded_in_queue(self._run_dir, self._fields, self._placement.asked()[0]))

    def _requeue(self, action: Action) -> int:
        """Put the job back into the queue; it ends if Slurm refuses."""
        log.info("requeueing job %s: %s", self._granted.job, action.reason)
        self._record("requeue_asked", reason=action.reason)  # Slurm may end this process before it answers
        if refused := slurm.requeue(self._granted.job, self._patience()):
            log.error("job %s could not be requeued (%s): the same command continues", self._granted.job, refused)
            self._record_action(Action(ActionKind.END, action.code, f"{action.reason}; not requeued: {refused}"))
            return action.code
        self._record_action(action)
        if set(action.exclude) != set(slurm.hosts(self._fields.get("ExcNodeList", ""))):
            slurm.set_excluded(self._granted.job, action.exclude)
        self._placement.resize(self._granted.job)
        time.sleep(REQUEUED)  # Slurm ends this process
        return action.code

    def _record_action(self, action: Action) -> None:
        self._record("action", action=str(action.kind), reason=action.reason, code=action.code, exclude=list(action.exclude))

    def _exclude(self, nodes: Collection[str], reason: str) -> None:
        """Leave out nodes, in this job and in later ones of the run."""
        self._placement.exclude(nodes, reason)
        if nodes and self._run_dir is not None:
            allocation.exclude(self._run_dir, nodes, reason)

    def _record(self, event: str, **fields: object) -> None:
        if self._run_dir is not None:
            events.record(self._run_dir, event, **fields)


def _compose(arguments: Sequence[str]) -> RunConfig | None:
    """The configuration of the ranks; None if the arguments do not compose, which the ranks report, or are a sweep."""
    from pipeline.config import command_line, compose
    from pipeline.launch import hydra_launcher

    compose.register()
    hydra_launcher.register()
    try:
        command = command_line.parse(arguments)
        return None if command.violations or command.needs_hydra else compose.composed(command.overrides)
    except Exception:  # the ranks compose the same and print the error, which must not keep the supervisor from starting them
        return None


def main(arguments: Sequence[str]) -> int:
    """Run a stage in this Slurm job, and return the exit code of the job."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signals.record(number)
    set_up_logging(0, 1)
    if "SLURM_JOB_ID" not in os.environ:
        print("the batch scripts run in Slurm jobs: submit them with sbatch", file=sys.stderr)
        return 2
    granted = Allocation.of(os.environ)
    config = _compose(arguments)
    try:
        return Supervisor(arguments, config, granted).run()
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    except CheckFailed as failed:
        print(failed, file=sys.stderr, flush=True)
        return 1
    except ToBeContinued as stopped:
        return stopped.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
