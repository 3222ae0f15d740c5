"""preflight: nodes of a Slurm allocation -> which ones are bad, and why.

In the script of a job, or in the shell of salloc, one process starts steps on all nodes, and finds those because of which a step fails.
Under srun it is a rank of such a step; without Slurm it tests this machine.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pipeline.common.atomic_files import make_folder
from pipeline.common.errors import CheckFailed
from pipeline.common.ranks import Ranks, expand_hosts
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Preflight
from pipeline.launch import preflight_step
from pipeline.preflight import judge, node_result, place

#: Seconds in which the other nodes write their results after a failure.
GRACE_SECONDS = 2.0


def run(config: RunConfig, ranks: Ranks) -> None:
    """Test the nodes, print a table, and write a file for each node.

    Raises:
        UserError: see place.find() and preflight_step.run().
        CheckFailed: a node is bad, or the all-reduce over all nodes failed.
    """
    stage = config.stage
    assert isinstance(stage, Preflight)
    folder = Path(stage.folder or Path(config.run_dir, "preflight"))
    if ranks.launcher == "none" and "SLURM_JOB_NODELIST" in os.environ:
        nodes = expand_hosts(os.environ["SLURM_JOB_NODELIST"])
        if bad := preflight_step.run(config, nodes, folder):
            raise CheckFailed(judge.verdict(nodes, bad))
        return
    _run_rank(config, ranks, folder)


def _run_rank(config: RunConfig, ranks: Ranks, folder: Path) -> None:
    """Be one rank; rank 0 prints the table."""
    from pipeline.preflight import measure  # loads torch

    where = place.find(ranks)
    if ranks.rank == 0 and ranks.launcher != "srun":
        make_folder(folder)
    step = node_result.step_id()

    def judged() -> dict[str, str]:
        results = node_result.read(folder, where.nodes, step)
        findings = judge.judge(results, where.nodes, config.cluster)
        bad = judge.bad_nodes(findings)
        print(judge.table(findings, where.nodes, bad), flush=True)
        if not bad and not judge.is_complete(results, where.nodes):
            bad = dict.fromkeys(
                where.nodes, "the all-reduce over all nodes failed; sbatch slurm/preflight.sbatch finds out which nodes cause it"
            )
        print(judge.verdict(where.nodes, bad), flush=True)
        return bad

    def at_the_limit() -> None:
        if ranks.rank == 0:
            time.sleep(GRACE_SECONDS)
            judged()

    succeeded = measure.RankChecks(config.cluster, ranks, where, folder, at_the_limit).run()
    if not succeeded:
        time.sleep(GRACE_SECONDS)
    bad = judged() if ranks.rank == 0 else {}
    if bad or not succeeded:
        sys.exit(1)
