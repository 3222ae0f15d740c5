"""tools/audit_reading: the runs of all ranks of a job against the engine's own on real ranks, and what readers of a large job read."""

import pytest

from pipeline.config.layout import Layout
from tests.helpers import ROOT, python
from tests.world import configured, tiny, trainer
from tools.audit.stored_layout import Job, store


@pytest.mark.parametrize(
    "words",
    [
        ("model=mixtral-tiny", "parallel.expert=2", "parallel.tensor=2", "parallel.zero_stage=1"),
        ("model=gpt-tiny", "parallel.pipeline=2", "parallel.zero_stage=2"),  # a tied embedding
    ],
)
def test_the_runs_of_every_rank_are_those_of_the_engine(world, words):
    overrides = tiny(*words, "model.ffn_hidden=64", "model.layers=4", "training.micro_batch_size=4")
    config = configured(*overrides)
    job = Job(config, Layout.of(config, 4))
    found = world.run(_held, overrides)
    assert [job.held(rank) for rank in range(4)] == found
    contents = store(job)
    assert sum(int(row["count"]) for row in contents.rows) == sum(held.count for rank in found for held in rank if not held.replica)


def _held(overrides):
    """What this rank holds."""
    _, built = trainer(*overrides)
    return [fragment.held() for fragment in built.engine.fragments()]


def test_a_reader_of_a_large_job_reads_little_more_than_it_needs():
    code, printed = python(ROOT / "tools" / "audit_reading", "--case=llama3-8b", "--readers=3")
    assert code == 0, printed
    values = printed.splitlines()[-1].rpartition("zero_stage=1")[2].split()
    assert float(values[3]) <= 8, "files"
    assert float(values[8]) <= 1.2, "most bytes read, relative to those needed"
    assert python(ROOT / "tools" / "audit_reading", "--case=nothing")[0] == 2
