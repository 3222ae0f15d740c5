"""submit: settings of the other stages -> a chain of Slurm jobs, and run_dir/submission.json; the process does not wait for them."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.common import locks
from pipeline.common.atomic_files import make_folder, report_disk_full, write_json
from pipeline.common.errors import UserError, Violation
from pipeline.common.ranks import Ranks
from pipeline.config import compose, ring_kernels
from pipeline.config.schema import RunConfig
from pipeline.data.load import blend
from pipeline.launch import in_use, job, job_times, maintenance, moldable, queues, site, slurm, snapshot, stage_chain, submission
from pipeline.launch.stage_chain import Link

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Submit the chain and print its jobs; with dry_run=true, only print their scripts.

    Raises:
        UserError: a job is invalid or would meet another one, Slurm is not there or rejects a job, or the disk is full. No job is left.
    """
    run_dir, arguments = Path(config.run_dir), compose.task_arguments()
    violations, links = _checked(config, arguments, ranks.world_size)
    UserError.raise_for(violations)
    for link in links:
        if text := moldable.idle_text(link.config):
            log.warning("%s: %s", link.stage, text)
        if text := ring_kernels.notice(link.config):
            log.warning("%s: %s", link.stage, text)
        if not config.dry_run.enabled and (waits := maintenance.notice(link.cluster)):
            log.warning("%s: %s; %s", link.stage, *waits)
    if text := site.other_architecture(config.cluster):
        log.warning("%s", text)
    for text in job_times.proposals(links, run_dir):
        log.info("%s", text)
    for text in stage_chain.idle_gpus(links):
        log.warning("%s", text)
    if config.dry_run.enabled:
        print("\n".join(stage_chain.rendered(links, run_dir, snapshot=snapshot.path(run_dir))), end="")
        return
    make_folder(run_dir / snapshot.FOLDER)
    with locks.claimed(run_dir / snapshot.FOLDER, "run_dir"):  # two commands at the same time
        _submit(links, run_dir, arguments)


def _checked(config: RunConfig, arguments: Sequence[str], world_size: int) -> tuple[list[Violation], list[Link]]:
    """The jobs, and everything that is wrong as far as it is known without asking Slurm."""
    violations, links = [], []
    if not config.dry_run.enabled:
        violations += submission.absent()
    if world_size > 1:
        fix = "start a single process, without srun, torchrun or mpirun"
        violations.append(Violation("stage", "submit", "would submit the chain once per rank", fix))
    try:
        links = stage_chain.links(config, arguments)
        if not config.dry_run.enabled:
            violations += [v for link in links for v in job.not_given(link.cluster)]
        violations += [v for link in links for v in blend.violations(link.config)]
        violations += queues.too_many([link.cluster for link in links])
    except UserError as error:
        violations += error.violations
    return violations, links


def _submit(links: Sequence[Link], run_dir: Path, arguments: Sequence[str]) -> None:
    """Submit jobs that are valid, with their snapshot and their record."""
    stages = [link.stage for link in links]
    UserError.raise_for(in_use.violations(run_dir, stages, submission.queue()))
    refused = submission.rejected(stage_chain.rendered(links, run_dir))
    UserError.raise_for(stage_chain.merged({stages[number]: [why] for number, why in refused.items()}, stages))
    taken = snapshot.path(run_dir)
    conf_files = snapshot.files([Path(word.removeprefix("--config-dir=")) for word in arguments if word.startswith("--config-dir=")])
    configs = {link.stage: snapshot.resolved(link.config) for link in links}
    texts = stage_chain.rendered(links, run_dir, snapshot=taken)

    def text(number: int, job_ids: Sequence[int]) -> str:
        return stage_chain.rendered(links, run_dir, job_ids, snapshot=taken)[number]

    snapshot.write(taken, arguments, configs, dict(zip(stages, texts, strict=True)), conf_files)
    try:
        job_ids = submission.submit_all([partial(text, number) for number in range(len(links))])
    except BaseException:
        shutil.rmtree(taken, ignore_errors=True)
        raise
    entries = [
        {
            "job": number,
            "stage": link.stage,
            "name": in_use.job_name(link.stage, run_dir),
            "log": job.log_file(run_dir, f"slurm-{link.stage}", number),
        }
        for number, link in zip(job_ids, links, strict=True)
    ]
    _record(run_dir, {"time": round(time.time(), 3), "arguments": list(arguments), "snapshot": str(taken), "jobs": entries}, job_ids)
    width = max(map(len, stages))
    print("\n".join(f"job {entry['job']}  {entry['stage']:<{width}}  {entry['log']}" for entry in entries))
    print(f"snapshot: {taken}")


def _record(run_dir: Path, content: dict[str, object], job_ids: Sequence[int]) -> None:
    """Write the record; jobs of which none would be known are canceled."""
    try:
        with report_disk_full(run_dir):
            write_json(run_dir / in_use.CHAIN, content)
    except BaseException:
        slurm.cancel(*job_ids)
        raise
