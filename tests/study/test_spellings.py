"""Rows as others write them: every row gets a finite prediction with its assumptions, or is refused with a reason."""

from __future__ import annotations

import math

import pytest

from pipeline.config import hardware as hardware_files
from tools.study.cells import Contradiction
from tools.study.frameworks import Sharding
from tools.study.gpus import GPUS, file_of
from tools.study.runs import read
from tools.study.tables import predict

pytestmark = pytest.mark.long

#: The columns of a table.
TEXTS = "source year table model_name zero_or_fsdp recompute sequence_parallel precision notes"
NUMBERS = "params_b kv_heads ffn_hidden gpu_mem_gb gpus_per_node tp pp dp ep cp interleave micro_batch"
EMPTY = dict.fromkeys(f"{TEXTS} {NUMBERS}".split(), "")
#: A small run with as few cells as a row may have.
SIZES = {"seq_len": "512", "global_batch": "64", "layers": "4", "hidden": "512", "heads": "8", "vocab": "4096"}
SMALL = {**EMPTY, **SIZES, "gpu": "H100 SXM", "gpus": "16"}


@pytest.fixture(scope="module")
def traces():
    return {}


@pytest.mark.parametrize(
    "gpu, memory, file",
    [
        ("A100-SXM4-80GB", "", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "", "a100-40"),
        ("A100 SXM", "40", "a100-40"),
        ("A100 custom (Leonardo)", "", "a100-64"),
        ("A100 PCIe 80GB", "", "a100-pcie"),
        ("H100 SXM5", "80", "h100"),
        ("H100 SXM5 64GB", "", "h100-64"),
        ("H100", "96", "h100-96"),
        ("H100 PCIe", "", "h100-pcie"),
        ("H800", "", "h100"),
        ("GH200 120GB", "", "gh200"),
        ("H200", "141", "h200"),
        ("V100-32GB", "", "v100-32"),
        ("Tesla V100-SXM2-16GB", "", "v100-16"),
        ("AMD MI250X (GCD)", "64", "mi250x"),
        ("MI300X", "192", "mi300x"),
        ("GB200", "186", "gb200"),
        ("B200", "180", "b200"),
    ],
)
def test_spellings_of_gpus(gpu, memory, file):
    row = {**SMALL, "gpu": gpu, "gpu_mem_gb": memory}
    assert file_of(row) == file
    hardware = read(row).hardware
    written = 120 if "120" in gpu else float(memory or 0)
    assert not written or hardware.memory_gb == pytest.approx(written * 1.0737, rel=0.05)


def test_every_hardware_file_belongs_to_a_spelling():
    assert set(GPUS.values()) <= set(hardware_files.names())


@pytest.mark.parametrize(
    "text, expected",
    [
        ("FSDP", Sharding(3, "fsdp")),
        ("FSDP2", Sharding(3, "fsdp")),
        ("fsdp-full", Sharding(3, "fsdp")),
        ("fully_shard", Sharding(3, "fsdp")),
        ("FSDP SHARD_GRAD_OP", Sharding(2, "fsdp")),
        ("HSDP", Sharding(3, "fsdp", 8)),
        ("FSDP HYBRID_SHARD", Sharding(3, "fsdp", 8)),
        ("ZeRO-3", Sharding(3, "deepspeed")),
        ("DeepSpeed ZeRO stage 2", Sharding(2, "deepspeed")),
        ("zero1", Sharding(1, "deepspeed")),
        ("zero_0", Sharding(0)),
        ("2", Sharding(2, "deepspeed")),
        ("distributed optimizer (ZeRO-1 style)", Sharding(1, "megatron")),
        ("dist-opt", Sharding(1, "megatron")),
        ("DDP", Sharding(0)),
        ("none (DDP)", Sharding(0)),
        ("NO_SHARD", Sharding(0)),
    ],
)
def test_spellings_of_sharding(text, expected):
    run = read({**SMALL, "zero_or_fsdp": text})
    assert run.sharding == expected
    assert not [note for note in run.assumptions if note.startswith("zero_or_fsdp")]


@pytest.mark.parametrize(
    "cells, expected",
    [
        ({"recompute": "every_layer"}, "full"),
        ({"recompute": "True"}, "full"),
        ({"recompute": "disabled"}, "none"),
        ({"recompute": "no"}, "none"),
        ({"recompute": "selective", "zero_or_fsdp": "distributed optimizer"}, "none"),
        ({"recompute": "selective op", "zero_or_fsdp": "FSDP2"}, "selective"),
    ],
)
def test_spellings_of_recomputation(cells, expected):
    assert read({**SMALL, **cells}).config.training.activation_checkpointing == expected


@pytest.mark.parametrize(
    "cells, gb_s, node",
    [
        ({"notes": "8x HDR200"}, 25.0, 8),
        ({"notes": "4 x NDR InfiniBand", "gpus_per_node": "4"}, 50.0, 4),
        ({"table": "1600 Gbps node-node interconnect"}, 25.0, 8),
        ({"notes": "400 Gb/s per GPU, NVLink 900 GB/s"}, 50.0, 8),
        ({"notes": "volumina"}, 50.0, 8),  # not LUMI
        ({"source": "JUWELS Booster"}, 25.0, 4),
        ({"source": "LUMI-G", "gpu": "MI250X"}, 12.5, 8),
    ],
)
def test_networks_that_a_row_names(cells, gb_s, node):
    hardware = read({**SMALL, **cells}).hardware
    assert (hardware.network_gb_s, hardware.gpus_per_node) == (gb_s, node)


@pytest.mark.parametrize(
    "cells",
    [
        {},
        {"year": "2021-04", "precision": "fp16", "zero_or_fsdp": "ZeRO-2"},
        {"year": "2022", "recompute": "selective", "tp": "2", "pp": "2", "interleave": "0"},
        {"year": "2024", "tp": "2", "pp": "2", "zero_or_fsdp": "distributed optimizer", "precision": "mxfp8"},
        {"precision": "float8", "zero_or_fsdp": "FSDP2", "notes": "torchtitan, torch.compile", "source": "somebody"},
        {"precision": "fp8", "gpu": "A100"},
        {"precision": "fp32 master weights, bf16 products"},
        {"zero_or_fsdp": "HSDP", "gpus": "12", "global_batch": "24"},
        {"gpu": "MI250X", "zero_or_fsdp": "ZeRO++", "recompute": "yes"},
        {"gpu": "GH200", "gpus_per_node": "1"},
        {"kv_heads": "2", "ffn_hidden": "1408"},
        {"kv_heads": "1", "tp": "2"},
        {"heads": "9", "tp": ""},  # hidden is not a multiple
        {"model_name": "OLMoE 7B", "ffn_hidden": "256", "ep": "8"},
        {"model_name": "BERT"},
        {"model_name": "Llama 3.2 1B", "layers": "", "hidden": "n/a", "heads": ""},
        {"params_b": "0.1", "layers": "", "hidden": "", "heads": ""},
        {"gpus": "", "dp": "8", "global_batch": "", "micro_batch": "2"},
        {"seq_len": "4,096", "global_batch": "1_024"},
        {"gpus": "1", "global_batch": "1"},
    ],
)
def test_odd_rows_get_a_finite_prediction(cells, traces):
    run = read({**SMALL, **cells})
    result = predict(run, traces)
    assert 0 < result.step_time < math.inf
    assert 0 < result.memory.total < math.inf
    assert result.flops / result.step_time < run.layout.world_size * max(run.hardware.tflops, run.hardware.tflops_fp8) * 1e12
    assert run.assumptions


@pytest.mark.parametrize(
    "cells, reason",
    [
        ({"gpu": "TPU v4"}, "gpu=TPU v4 is not one of"),
        ({"gpu": ""}, "gpu is empty"),
        ({"gpus": "nan"}, "gpus is empty"),
        ({"gpus": "inf"}, "not a positive number"),
        ({"gpus": "-16"}, "not a positive number"),
        ({"layers": "4.5"}, "not a positive whole number"),
        ({"layers": "eighty"}, "is not a number"),
        ({"micro_batch": "1e400"}, "not a positive number"),
        ({"model_name": "Mamba-2 8B"}, "not one stack of transformer blocks"),
        ({"model_name": "T5-11B"}, "not one stack of transformer blocks"),
        ({"precision": "fp32"}, "precision=fp32 is not supported"),
        ({"layers": "", "hidden": "", "params_b": ""}, "hidden and params_b are empty"),
        ({"heads": "8", "tp": "16"}, "do not divide by tp=16"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_a_reason(cells, reason):
    with pytest.raises(Contradiction, match=reason):
        read({**SMALL, **cells})
