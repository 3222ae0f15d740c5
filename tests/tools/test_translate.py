"""tools/translate: argument lists of other trainers, as their users write them; the commands are legal, and what is missing is named."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.rules import check
from tests.helpers import load_tool
from tests.world import configured

translate = load_tool("translate")

LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02 --group-query-attention --num-query-groups 8"""
COMMON = "--bf16 --micro-batch-size 1 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --train-iters 5000"
SCRIPT = """#!/bin/bash
# A job of four nodes.
GPUS_PER_NODE=8
TP=2; PP=${PIPELINE:-4}
DATA_PATH=$1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --master_addr $MASTER_ADDR   # of the first node
)
GPT_ARGS="
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257
    --micro-batch-size 8 --global-batch-size 128 --train-iters 500000
    --lr 0.00015 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --lr-warmup-fraction .01
    --fp16
"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $GPT_ARGS --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size $PP --data-path $DATA_PATH --save runs/gpt --load runs/gpt --eval-iters 10
"""
TOML = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[checkpoint]
enable = false
interval = 500
[activation_checkpoint]
mode = "selective"
[metrics]
log_freq = 10
"""
YAML = """
base_model: NousResearch/Llama-2-7b-hf
adapter: qlora
load_in_4bit: true
datasets: [{path: alpaca, type: alpaca}]
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
gradient_checkpointing: true
logging_steps: 1
output_dir: ./out
"""
ZERO = {"parallel.zero_stage": 0}
#: Framework, what is written, GPUs of the job -> settings that the command has, beginnings of its notes, and what has no counterpart.
CASES: dict[str, tuple[str, str, int, dict[str, Any], list[str], list[str]]] = {
    "script": (
        *("megatron", SCRIPT, 32),
        {"model": "gpt2-medium", "parallel.tensor": 2, "parallel.pipeline": 4, "optimizer.warmup_ratio": 0.01, "precision": "fp16", **ZERO},
        *(["hidden-dropout 0.1", "attention-dropout 0.1", "the rate falls until 320000", "data_path=$1: set it by hand"], []),
    ),
    "llama3-8b": (
        "megatron",
        f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192 --rotary-base 500000 "
        f"--max-position-embeddings 8192 --vocab-size 128256 {LLAMA} {COMMON} --global-batch-size 128 --use-distributed-optimizer "
        "--tensor-model-parallel-size 1 --context-parallel-size 2 --fp8-format hybrid --fp8-amax-history-len 1024 --overlap-grad-reduce",
        16,
        {"model": "llama3-8b", "precision": "fp8", "parallel.context": 2, "parallel.zero_stage": 1, "optimizer.min_lr_ratio": 0.1},
        [],
        [],
    ),
    "llama3-70b": (
        "megatron",
        f"--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --seq-length 8192 --rotary-base 500000 "
        f"--max-position-embeddings 8192 --vocab-size 128256 {LLAMA} {COMMON} --global-batch-size 128 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 --sequence-parallel --recompute-granularity selective",
        64,
        {"model": "llama3-70b", "parallel.schedule": "interleaved", "parallel.stages_per_rank": 4, **ZERO},
        [],
        [],
    ),
    "mixtral": (
        "megatron",
        f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 4096 --rotary-base 1000000 "
        f"--max-position-embeddings 32768 --vocab-size 32000 {LLAMA} {COMMON} --global-batch-size 256 --num-experts 8 --moe-router-topk 2 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --expert-model-parallel-size 8",
        64,
        {"model": "mixtral-8x7b", "parallel.expert": 8, "training.balance_loss": 0.01},
        [],
        [],
    ),
    "batches": (
        "megatron",
        f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 4096 "
        f"--max-position-embeddings 8192 {LLAMA} {COMMON.replace('--train-iters 5000', '')} --rotary-base 500000 --global-batch-size 64 "
        "--rampup-batch-size 32 16 9600 --train-samples 640000 --lr-warmup-samples 6400 --use-torch-fsdp2",
        8,
        {
            "training.batch_rampup": "[{until_step: 150, value: 32}, {until_step: 250, value: 48}]",
            "training.steps": 10000,
            "optimizer.warmup_steps": 100,
            "parallel.zero_stage": 3,
        },
        [],
        [],
    ),
    "latent attention": (
        "megatron",
        f"--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --max-position-embeddings 4096 --foo 3 "
        f"--multi-latent-attention {COMMON}",
        1,
        {"optimizer.schedule": "cosine", **ZERO},
        ["hidden-dropout"],
        ["Megatron-LM multi_latent_attention True, which is not supported", "foo=3"],
    ),
    "torchtitan": (
        *("torchtitan", TOML, 8),
        {"model": "llama3-8b", "training.global_batch_size": 4, "parallel.zero_stage": 3, "training.activation_checkpointing": "selective"},
        *(["data: ", "training.global_batch_size=4: 1 sequences x accumulation x 4 data ranks"], []),
    ),
    "torchtitan's arguments": (
        *(
            "torchtitan",
            "--model.name llama3 --model.flavor 9000B --training.steps=5 --training.global_batch_size 32 --optimizer.name Sophia",
            8,
        ),
        *({"training.steps": 5, "training.global_batch_size": 32}, ["the model (llama3-9000b)"], ["optimizer.name=Sophia"]),
    ),
    "full fine-tuning": (
        "trainer",
        "--model_name_or_path m --learning_rate 2e-5 --num_train_epochs 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 "
        "--warmup_ratio 0.03 --weight_decay 0. --bf16 True --save_steps 200 --lr_scheduler_type cosine --packing",
        4,
        {
            "training.global_batch_size": 64,
            "training.epochs": 2,
            "optimizer.warmup_ratio": 0.03,
            "precision": "bf16",
            "checkpoint.every": 200,
        },
        ["import the model first: python -m pipeline stage=convert stage.input=m"],
        [],
    ),
    "axolotl": (
        *("trainer", YAML, 2),
        {"lora.rank": 32, "lora.quantize": "nf4", "lora.dropout": 0.05, "training.global_batch_size": 16, "training.sequence_length": 4096},
        *(["import the model first", "examples: "], ["optimizer=paged_adamw_32bit"]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_command_is_translated(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words that follow a file replace its values."""
    framework, text, gpus, settings, notes, unknown = CASES[name]
    words = shlex.split(text)
    if not text.startswith("--"):
        suffix = {"torchtitan": ".toml", "megatron": ".sh", "trainer": ".yaml"}[framework]
        path = tmp_path / f"job{suffix}"
        path.write_text(text)
        words = [str(path)]
    assert translate.main(["--from", framework, "--gpus", str(gpus), *words]) == 0
    command, *said = capsys.readouterr().out.splitlines()
    python, *words = shlex.split(command)[2:]
    assert (python, words[0]) == ("pipeline", "stage=finetune" if framework == "trainer" else "stage=pretrain")
    found = dict(word.split("=", 1) for word in words)
    assert {key: found.get(key) for key in settings} == {key: str(value) for key, value in settings.items()}
    (missing,) = [line.partition(": ")[2] for line in said if line.startswith("# no counterpart")] or [""]
    for note in notes:
        assert any(line.startswith(f"# {note}") for line in said), said
    assert all(part in missing for part in unknown), missing
    assert bool(missing) == bool(unknown), missing
    if framework != "trainer":  # whose model is in a checkpoint
        assert check.violations(configured(*words, "optimizer.warmup_steps=0", f"cluster.nodes={gpus}"), gpus) == []


def test_words_replace_the_values_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(TOML)
    translate.main(["--from", "torchtitan", str(tmp_path / "job.toml"), "--training.steps", "7"])
    assert "training.steps=7 " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["--from", "megatron"], ["--from", "nemo", "--x"], ["--from", "megatron", "none.sh"], ["--gpus", "x"]]
)
def test_what_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert translate.main(words) == 2
    assert capsys.readouterr().err.startswith("translate: ")
