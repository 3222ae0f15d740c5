"""The cores that a rank is bound to, with a fake GPU and what Linux knows of its PCI device."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from pipeline.parallel import cpu_affinity

GPU = torch.device("cuda", 1)


@pytest.fixture
def bound(monkeypatch, tmp_path):
    """`bound(given, near, threads)`: the cores of the process afterwards."""

    def bind(given: set[int], near: str, threads: int = 1) -> set[int]:
        cores = [given]
        properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties if device == GPU else None)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores[-1])
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: cores.append(chosen))
        file = tmp_path / "0000:17:00.0" / "local_cpulist"
        file.parent.mkdir(exist_ok=True)
        file.write_text(near + "\n")
        cpu_affinity.bind(GPU, tmp_path)
        return cores[-1]

    return bind


def test_a_rank_is_bound_to_its_cores_beside_its_gpu(bound):
    assert bound(set(range(16)), "8-11,24-27", threads=4) == {8, 9, 10, 11}


def test_the_binding_of_the_launcher_is_kept(bound, caplog):
    assert bound({9, 10}, "8-15") == {9, 10}
    with caplog.at_level(logging.WARNING, "pipeline"):
        assert bound({0, 1, 2, 8}, "8-15", threads=2) == {0, 1, 2, 8}
    assert "1 of the 4 cores of this rank are beside its GPU (0000:17:00.0)" in caplog.text
    assert "bind it to cores 8-15 (cluster.srun=[--cpu-bind=...])" in caplog.text


def test_without_what_linux_knows_nothing_is_bound(bound, tmp_path, monkeypatch):
    assert bound({0, 1}, "") == {0, 1}
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    cpu_affinity.bind(GPU, tmp_path / "missing")
    cpu_affinity.bind(torch.device("cpu"))
