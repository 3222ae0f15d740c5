"""data.verify=lazy at the end of a run: what is still to be verified is verified, or counted in a warning."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from pipeline.common import artifact
from pipeline.data.load.corpus import Corpus
from pipeline.data.load.shard_checksums import Shard
from pipeline.data.load.token_stream import TokenStream
from pipeline.training import shard_verification


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_run_that_ends_before_its_shards_are_verified_says_so(tokens, caplog, monkeypatch):
    shards = Corpus.of(tokens, artifact.read(tokens, key="data.tokens", stage="tokenize"), "train").shards
    busy, verify = threading.Event(), Shard.verify
    monkeypatch.setattr(Shard, "verify", lambda shard: (shard is shards[0] and busy.wait(), verify(shard)))
    stream = TokenStream(shards, lazy_checks=True)
    stream.read(np.cumsum([0, *(shard.entry["tokens"] for shard in shards[:2])]), 5)
    data = [SimpleNamespace(streams=[stream]), None]
    assert shard_verification.finish(data, 0.01) == 3
    assert "3 of 3 token shards that this run has read were not verified" in caplog.text
    caplog.clear()
    busy.set()
    assert shard_verification.finish(data) == 0
    assert not caplog.text
