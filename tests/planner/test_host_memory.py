"""A run whose state exceeds the memory of the machine, or of its Slurm job, is refused before anything is allocated."""

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.planner import host_memory
from tests.world import configured

SIZES = ("model=llama-tiny", "training.global_batch_size=64", "training.micro_batch_size=4")


@pytest.mark.parametrize("size", ["hidden=1000000000", "ffn_hidden=100000000", "vocab_size=100000000000", "head_width=1000000000"])
def test_sizes_that_no_machine_holds(size):
    with pytest.raises(UserError, match=r"llama with [\d,]+ parameters: weights, .* need [\d,.]+ GB at least; [\d,.]+ GB of this"):
        host_memory.check(configured(*SIZES, f"model.{size}"), Ranks())


def test_the_bytes_are_those_of_the_state(monkeypatch):
    """bf16 weights, fp32 gradients, and fp32 master weights, two moments and an average, which ZeRO 1 shards over the ranks of a node."""
    parameters = 4_769_472
    plain = (SIZES, 12), ((*SIZES, "training.ema=0.999"), 16)
    cases = ((settings, ranks, (6 * ranks + sharded) * parameters) for settings, sharded in plain for ranks in (1, 4))
    for settings, ranks, needed in cases:
        config = configured(*settings, "parallel.zero_stage=1", "precision=bf16")
        for spare in (1.01, 0.99):
            monkeypatch.setattr(host_memory, "available_bytes", lambda _, free=spare * needed: free)
            if spare > 1:
                host_memory.check(config, Ranks(0, ranks, 0, ranks))
            else:
                with pytest.raises(UserError, match=r"parameters: weights, gradients and optimizer state need 0\.[12] GB"):
                    host_memory.check(config, Ranks(0, ranks, 0, ranks))


def test_offloaded_state_is_in_the_memory_of_the_node(monkeypatch):
    """Of four GPUs on a node: bf16 weights and fp32 gradients on the device; 12 bytes, and fp32 and bf16 buffers, on the host."""
    parameters = 4_769_472
    config = configured(*SIZES, "parallel.zero_stage=1", "precision=bf16", "parallel.offload=optimizer")
    monkeypatch.setattr(host_memory.device, "choose", lambda _: torch.device("cuda"))
    for spare, device, host in ((1.01, 6, 18), (0.99, 6, 18.5), (0.99, 6.5, 18)):
        free = {"cuda": spare * device * parameters, "cpu": spare * host * parameters}
        monkeypatch.setattr(host_memory, "available_bytes", lambda place, free=free: free[place.type])
        if spare > 1:
            host_memory.check(config, Ranks(0, 4, 0, 4))
        else:
            where = "of this GPU" if device == 6 else "of this node, for its 4 ranks"
            with pytest.raises(UserError, match=where):
                host_memory.check(config, Ranks(0, 4, 0, 4))


def test_a_slurm_job_has_the_memory_that_it_asked_for(monkeypatch):
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    assert host_memory.available_bytes(torch.device("cpu")) == 100 * 2**20
