"""The device of a rank, with a fake number of GPUs: none on a cluster with GPUs, fewer than ranks, and one that each rank sees alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from pipeline import __main__
from pipeline.common.errors import UserError
from pipeline.parallel import device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`gpus(*uuids)`: this process sees these GPUs."""

    def see(*uuids: str) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))

    return see


@pytest.mark.parametrize("words", ["pretrain", "finetune", "evaluate", "generate stage.prompts=x"])
def test_a_cluster_with_gpus_does_not_compute_on_a_cpu(words, gpus, monkeypatch, capsys, tmp_path):
    gpus()
    monkeypatch.setattr(sys, "argv", ["pipeline", *f"stage={words} cluster=juwels run_dir={tmp_path}/run".split()])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert "cluster.gpus_per_node=4: the nodes of cluster=juwels have GPUs, and this process on " in said
    assert "dry_run=true prints the sbatch command" in said
    assert "set cluster=local to use CPUs" in said
    assert not (tmp_path / "run").exists()


def test_two_ranks_do_not_share_a_gpu(gpus):
    gpus("a", "b")
    store = HashStore()
    for rank in (0, 1):
        device.claim(device.choose(rank), rank, store)
    with pytest.raises(UserError, match=r"rank=2: uses the same GPU as rank 0 \(H100 on .*, 2 visible\)\n.*one rank per GPU"):
        device.claim(device.choose(2), 2, store)


def test_ranks_that_each_see_one_gpu_and_ranks_on_cpus(gpus, monkeypatch):
    store = HashStore()
    for rank, uuid in enumerate("abc"):  # srun --gpus-per-task=1
        gpus(uuid)
        device.claim(device.choose(rank), rank, store)
    gpus("d")
    for rank, instance in enumerate(("MIG-1", "MIG-2")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", instance)
        device.claim(device.choose(rank), rank, store)
    gpus()
    for rank in range(4):
        assert device.choose(rank) == torch.device("cpu")
        device.claim(device.choose(rank), rank, store)
