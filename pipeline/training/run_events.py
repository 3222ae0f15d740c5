"""Events of a training run in RUN/events.jsonl, beside those of the job that starts its ranks: run_start and run_end."""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.checkpoint import catalog
from pipeline.common import events, git_commit, metrics_file
from pipeline.common.atomic_files import make_folder
from pipeline.common.errors import INTERRUPTED, RunFailed, ToBeContinued, UserError
from pipeline.common.ranks import Ranks
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.data.load.samples import Dataset

log = logging.getLogger("pipeline")


def announce(run_dir: Path, ranks: Ranks) -> None:
    """Create a new run directory with a first event, as a supervisor does: a run is seen while its ranks wait for each other."""
    if ranks.rank == 0 and ranks.world_size > 1 and not run_dir.exists():
        make_folder(run_dir, "run_dir")
        events.record(run_dir, "ranks_start", nodes=[socket.gethostname()], step=0)


@contextmanager
def recorded(
    config: RunConfig,
    layout: Layout,
    hosts: Sequence[str],
    step: int,
    samples: Dataset,
    parent: dict[str, Any] | None,
    changed: Sequence[tuple[str, Any, Any]] = (),
    loading: float = 0.0,
) -> Iterator[None]:
    """Record the begin and the end of a block that trains. Only rank 0 calls it.

    Args:
        hosts: host name of each rank.
        step: number of steps made before.
        parent: Index.parent of its checkpoints.
        changed: settings that differ from those of the start before: key, old and new value.
        loading: seconds in which the weights were read, or initialized.
    """
    run_dir = Path(config.run_dir)
    origin = "scratch" if parent is None else f"step {parent['step']} of {parent['path']} ({parent['how']})"
    _report_other_origin(run_dir, origin)
    folder, metrics = run_dir.stat(), run_dir / metrics_file.FILE
    text = f"{layout.axes_text()}, {layout.zero_text(config.parallel.zero_stage)}, micro-batches of {config.training.micro_batch_size}"
    events.record(
        run_dir,
        "run_start",
        step=step,
        nodes=sorted(set(hosts)),
        ranks=len(hosts),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
        layout=text,
        origin=origin,
        version=git_commit.version(),
        corpora=epochs(samples),
        changed=[list(setting) for setting in changed],
        last_written=metrics.stat().st_mtime if metrics.is_file() else None,
        began=round(_process_start(), 3),
        loading=round(loading, 3),
        abandoned=round(metrics_file.seconds_after(run_dir, step), 3),
    )
    try:
        yield
    except ToBeContinued as stopped:
        _end(run_dir, folder, stopped.code, stopped.reason or "asked to stop by a signal")
        raise
    except RunFailed as failed:
        _end(run_dir, folder, 1, str(failed).partition("\n")[0], failed.where)
        raise
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = str(error.violations[0]) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        where = "" if isinstance(error, UserError) else f"{last.filename}:{last.lineno} ({last.name})"
        code = 2 if isinstance(error, UserError) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        _end(run_dir, folder, code, reason.partition("\n")[0], where)
        raise
    _end(run_dir, folder, 0, "finished")


def _process_start() -> float:
    """When this process began, seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (age if ticks else 0.0)  # some sandboxes tell no time


def _report_other_origin(run_dir: Path, origin: str) -> None:
    """Log if the start before began from something else, and wrote no checkpoint from which this one could continue."""
    before: dict[str, Any] = next((event for event in reversed(events.read(run_dir)) if event["event"] == "run_start"), {})
    if before.get("origin", origin) != origin:
        text = "%s: this run begins from %s; an earlier start, which left no checkpoint, began from %s"
        log.warning(text, run_dir, origin, before["origin"])


def _end(run_dir: Path, folder: os.stat_result, code: int, reason: str, where: str = "") -> None:
    """Record the end, with the step of the newest checkpoint, -1 for none; nothing if the run directory was removed or replaced."""
    if not (run_dir.is_dir() and os.path.samestat(run_dir.stat(), folder)):
        return
    complete = catalog.complete(run_dir)
    step = catalog.step_of(complete[-1]) if complete else -1
    events.record(run_dir, "run_end", step=step, code=code, reason=reason, where=where)


def epochs(samples: Dataset) -> dict[str, int]:
    """Return the samples of one epoch of each corpus; without a blend, in proportion to the tokens of the corpora of the shards."""
    if samples.schedule is not None:
        return {corpus.name: int(count) for corpus, count in zip(samples.corpora, samples.counts.tolist(), strict=True)}
    tokens: dict[str, int] = {}
    for shard in samples.corpora[0].shards:
        name = str(shard.entry.get("corpus", ""))
        tokens[name] = tokens.get(name, 0) + int(shard.entry.get("tokens", 0))
    count, total = int(np.sum(samples.counts)), sum(tokens.values())
    return {name: round(count * size / total) for name, size in tokens.items()} if total else {"": count}
