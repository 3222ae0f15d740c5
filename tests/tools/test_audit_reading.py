"""tools/audit_reading: the runs of all ranks of a job against the buckets of every rank, and what readers of a large job read."""

import pytest

from pipeline.config.layout import Layout
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import parallelize
from pipeline.training.buckets import build_buckets
from tests.helpers import ROOT, python
from tests.world import configured, tiny
from tools.audit.stored_layout import Job, store


@pytest.mark.parametrize(
    "words",
    [
        ("model=mixtral-tiny", "parallel.expert=2", "parallel.tensor=2", "parallel.zero_stage=1"),
        ("model=gpt-tiny", "parallel.pipeline=2", "parallel.zero_stage=2"),  # a tied embedding
    ],
)
def test_the_runs_of_every_rank_are_those_of_its_buckets(words):
    config = configured(*tiny(*words, "model.ffn_hidden=64", "model.layers=4", "training.micro_batch_size=4"))
    job = Job(config, Layout.of(config, 8))
    held = [job.held(rank) for rank in range(8)]
    for rank in range(8):
        device = meshes.init_fake(rank, 8)
        try:
            mesh = meshes.build_mesh(job.layout, device)
            runs = []
            for bucket in build_buckets(parallelize(config, mesh), mesh, sequence_parallel=config.parallel.sequence_parallel):
                start = bucket.group.rank() * bucket.partition_elements
                for parameter, where in bucket.partition_slices().items():
                    piece = bucket.pieces[parameter]
                    runs.append((piece.name, piece.box, start + where.start - bucket.offsets[parameter], where.stop - where.start))
        finally:
            meshes.destroy_process_group()
        assert [(each.name, each.box, each.start, each.count) for each in held[rank]] == runs
    assert sum(int(row["count"]) for row in store(job).rows) == sum(each.count for rank in held for each in rank if not each.replica)


def test_a_reader_of_a_large_job_reads_little_more_than_it_needs():
    code, printed = python(ROOT / "tools" / "audit_reading", "--case=llama3-8b", "--readers=3")
    assert code == 0, printed
    values = printed.splitlines()[-1].rpartition("zero_stage=1")[2].split()
    assert float(values[3]) <= 8, "files"
    assert float(values[8]) <= 1.2, "most bytes read, relative to those needed"
    assert python(ROOT / "tools" / "audit_reading", "--case=nothing")[0] == 2
