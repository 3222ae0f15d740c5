"""What a GPU can do, as PyTorch describes it on NVIDIA's and AMD's: the capability of an AMD GPU is none of CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.layout import Layout
from pipeline.layers import attention_kernel, gpu
from pipeline.parallel import device, float8
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import async_tensor_enabled
from tests.world import configured

#: Name, what PyTorch returns as its capability, AMD's architecture; then fp8, fp8 of experts, symmetric memory, fused by default, kernel.
ROWS = [
    ("Tesla V100", (7, 0), "", False, False, False, False, "math"),
    ("NVIDIA A100", (8, 0), "", False, False, False, False, "flash_2"),
    ("NVIDIA L40S", (8, 9), "", True, False, False, False, "flash_2"),
    ("NVIDIA H100", (9, 0), "", True, True, True, True, "cudnn"),
    ("NVIDIA GH200", (9, 0), "", True, True, True, True, "cudnn"),
    ("NVIDIA B200", (10, 0), "", True, False, True, True, "cudnn"),
    ("AMD Instinct MI250X", (9, 0), "gfx90a:sramecc+:xnack-", False, False, False, False, "flash_2"),
    ("AMD Instinct MI300X", (9, 4), "gfx942:sramecc+:xnack-", False, False, True, False, "flash_2"),
    ("AMD Instinct MI355X", (9, 5), "gfx950:sramecc+:xnack-", False, False, True, False, "flash_2"),
]


@pytest.fixture(params=ROWS, ids=lambda row: row[0])
def row(request, monkeypatch):
    """A node of eight GPUs of a kind."""
    name, capability, architecture, *_ = request.param
    monkeypatch.setattr(torch.version, "hip", "7.0" if architecture else None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=architecture))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(attention_kernel, "has_flash_3", lambda: False)
    return request.param


def mesh_of(config):
    return Mesh(Layout.of(config, 8), 0, torch.device("cuda", 0), *7 * [None])


def test_what_a_gpu_can_do(row):
    _, _, architecture, fp8, experts, shared, _, kernel = row
    found = gpu.of(0)
    assert (found.fp8, found.fp8_experts, found.symmetric_memory) == (fp8, experts, shared)
    assert found.architecture == architecture.partition(":")[0]
    case = attention_kernel.case("cuda", 0, torch.bfloat16, 128, 128, False, False, True, True)
    assert attention_kernel.choose(case) == kernel


def test_what_is_refused_and_chosen(row):
    name, _, _, fp8, experts, shared, fused, _ = row
    cuda = torch.device("cuda", 0)
    assert [name in str(violation) for violation in float8._violations({}, "tensorwise", cuda)] == ([] if fp8 else [True])
    some = {"blocks.0.mlp.experts": SimpleNamespace(up=torch.empty(2, 64, 64))}
    assert [name in str(violation) for violation in float8._expert_violations(some, cuda)] == ([] if experts else [True])
    words = ("stage=pretrain", "model=llama-tiny", "parallel.tensor=8")
    config = configured(*words)
    assert async_tensor_enabled(config.training, config.parallel, mesh_of(config)) == fused
    config = configured(*words, "parallel.async_tensor=on")
    if shared:
        assert async_tensor_enabled(config.training, config.parallel, mesh_of(config))
    else:
        with pytest.raises(UserError, match=rf"parallel\.async_tensor=on: requires memory .*, this is {name}"):
            async_tensor_enabled(config.training, config.parallel, mesh_of(config))


def test_a_driver_that_is_too_old_is_named_beside_the_cuda_of_pytorch(monkeypatch, tmp_path):
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  565.57.01  Release Build  (dvs-builder)\n")
    monkeypatch.setattr(device, "DRIVER", version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"is built for CUDA 13\.0, which the driver 565\.57\.01 may be too old for"):
        device.check_gpus(configured("stage=pretrain", "model=llama-tiny", "cluster=isambard-ai", "cluster.account=a").cluster)
