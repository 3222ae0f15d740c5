"""tools/translate: argument lists in the manner of public ones give settings that compose, and name what has no counterpart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import loaded, one_in

#: (framework, GPUs, arguments, files of it by name, settings that must follow, names that have no counterpart)
GPT3 = """pretrain_gpt.py --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
 --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 32 32 4000000 --train-samples 150000000 --lr-decay-samples 130000000
 --lr-warmup-samples 200000 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --init-method-std 0.006
 --fp16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 3 --data-path tokens"""
LLAMA = """--use-mcore-models --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0
 --attention-dropout 0 --untie-embeddings-and-output-weights --micro-batch-size 1 --bf16 --use-distributed-optimizer --train-iters 50000
 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 --norm-epsilon 1e-5"""
LLAMA8 = f"""{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
 --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --rotary-base 500000 --vocab-size 128256"""
SMALL = "pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 8 --lr 6e-4"
TITAN = """[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
steps = 2500
[parallelism]
tensor_parallel_degree = 2
[checkpoint]
interval = 250
[activation_checkpoint]
mode = "full"
[comm]
trace_buf_size = 20000
"""
NEOX = """{"pipe-parallel-size": 4, "model-parallel-size": 2, "num-layers": 44, "hidden-size": 6144, "num-attention-heads": 64,
 "seq-length": 2048, "max-position-embeddings": 2048, "pos-emb": "rotary", "rotary-pct": 0.25, "no-weight-tying": true,
 "gpt-j-residual": true, "bias-gelu-fusion": true, "init_method": "small_init",
 "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
 "min-lr": 1e-5, "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
 "checkpoint-activations": true, "weight-decay": 0.01, "fp16": {"enabled": true}, "train-iters": 150000, "lr-decay-style": "cosine",
 "save-interval": 500, "vocab-size": 50432, "distributed-backend": "nccl"}"""
DEEPSPEED = json.dumps(
    {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.98], "weight_decay": 0.05}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9000, "warmup_num_steps": 300}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    }
)
QLORA = """
base_model: /models/Llama-3.1-8B
load_in_4bit: true
datasets: [{path: chats.jsonl, type: chat_template}]
adapter: qlora
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 4096
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
wandb_project:
warmup_ratio: 0.1
neftune_noise_alpha: 5
"""
BRIDGE = """
model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
train: {train_iters: 500000, global_batch_size: 256, micro_batch_size: 2, eval_interval: 1000}
optimizer: {optimizer: adam, lr: 0.00025, min_lr: 0.000025}
scheduler: {lr_decay_style: cosine, lr_warmup_iters: 1000}
dataset: {seq_length: 4096}
"""
CASES: dict[str, tuple[str, int, str, dict[str, str], dict[str, Any], set[str]]] = {
    "gpt-3 175B": (
        *("megatron", 1024, GPT3, {}),
        {
            "model": "gpt3-175b",
            "model.init_std": 0.006,
            "optimizer.warmup_steps": 130,
            "optimizer.min_lr_ratio": 0.1,
            "training.steps": 97656,
            "precision": "fp16",
            "parallel.zero_stage": 0,
            "parallel.stages_per_rank": 2,
            "optimizer.eps": 1e-8,
            "optimizer.beta2": 0.95,
            "optimizer.gradient_clipping": 1.0,
        },
        {"rampup_batch_size", "hidden_dropout", "attention_dropout", "lr_decay", "data_path", "vocab_size"},
    ),
    "gpt-2": (
        *("megatron", 8, f"{SMALL} --train-iters 100 --nnodes 1", {}),
        {"model": "gpt2", "model.tie_embeddings": None, "training.global_batch_size": 64, "optimizer.weight_decay": 0.01},
        {"hidden_dropout", "attention_dropout", "vocab_size"},
    ),
    "llama 3 8B": (
        *("megatron", 64, f"{LLAMA8} --global-batch-size 128", {}),
        {"model": "llama3-8b", "optimizer.warmup_steps": 2000, "parallel.zero_stage": 1, "precision": "bf16"},
        {"use_mcore_models"},
    ),
    "llama 3.1 8B": (
        *("megatron", 64, f"{LLAMA8} --global-batch-size 128 --use-rope-scaling --qk-layernorm", {}),
        {"model": "llama3.1-8b", "model.max_positions": 8192, "model.rope_factor": None, "model.query_key_norm": True},
        {"use_mcore_models"},
    ),
    "llama 2 70B": (
        "megatron",
        512,
        f"""{LLAMA} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention
        --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --tensor-model-parallel-size 8 --sequence-parallel
        --pipeline-model-parallel-size 4 --global-batch-size 1024 --vocab-size 32000
        --recompute-granularity full --recompute-method block""",
        {},
        {"model": "llama2-70b", "parallel.tensor": 8, "training.activation_checkpointing": "full"},
        {"recompute_method", "use_mcore_models"},
    ),
    "default widths": (
        *("megatron", 8, f"{LLAMA} --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048", {}),
        {"model.ffn_hidden": 5440, "model.kv_heads": 16, "model.heads": 16, "training.global_batch_size": 8},
        {"vocab_size", "use_mcore_models"},
    ),
    "mixtral 8x7B": (
        "megatron",
        64,
        f"""{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
        --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
        --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 8 --global-batch-size 256 --moe-token-dispatcher-type alltoall
        --vocab-size 32000 --init-method-std 0.01""",
        {},
        {"model": "mixtral-8x7b", "model.init_std": 0.01, "parallel.expert": 8, "training.balance_loss": 0.01},
        {"moe_token_dispatcher_type", "use_mcore_models"},
    ),
    "bert large": (
        "megatron",
        32,
        """pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512
        --micro-batch-size 4 --global-batch-size 256 --train-iters 2000000 --lr 1e-4 --lr-decay-iters 990000 --min-lr 1e-5 --fp16
        --lr-warmup-fraction .01 --eval-iters 10 --save out --vocab-file vocab.txt""",
        {},
        {"optimizer.warmup_ratio": 0.01, "optimizer.warmup_steps": 0, "training.validation_batches": 10, "run_dir": "out"},
        {"block", "lr_decay", "vocab_file", "vocab_size", "hidden_dropout", "attention_dropout"},
    ),
    "t5 base": (
        "megatron",
        8,
        """pretrain_t5.py --encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64
        --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 --micro-batch-size 16 --global-batch-size 128
        --train-iters 1000 --lr 1e-4 --bf16""",
        {},
        {"model": "t5-base", "training.sequence_length": 512},
        {"block", "decoder_seq_length", "vocab_size", "hidden_dropout", "attention_dropout"},
    ),
    "torchtitan file": (
        *("torchtitan", 64, "llama3.toml --training.steps=5000", {"llama3.toml": TITAN}),
        {
            "model": "llama3-8b",
            "training.steps": 5000,
            "training.global_batch_size": 32,
            "parallel.zero_stage": 3,
            "optimizer.schedule": "linear",
            "optimizer.min_lr_ratio": 0.0,
            "optimizer.warmup_steps": 200,
            "checkpoint.every": 250,
        },
        {"comm.trace_buf_size"},
    ),
    "torchtitan options": (
        "torchtitan",
        8,
        """--model.name qwen3 --model.flavor 0.6B --training.global_batch_size 64 --parallelism.pipeline_parallel_degree 2
        --parallelism.data_parallel_shard_degree 1 --activation_checkpoint.mode none --lr_scheduler.decay_type cosine""",
        {},
        {"model": "qwen3-0.6b", "training.micro_batch_size": 1, "parallel.zero_stage": 0, "optimizer.schedule": "cosine"},
        set(),
    ),
    "neox 20B": (
        *("neox", 96, "20B.yml", {"20B.yml": NEOX}),
        {
            "model": "gpt-neox-20b",
            "training.global_batch_size": 1536,
            "optimizer.warmup_ratio": 0.01,
            "optimizer.warmup_steps": 0,
            "optimizer.beta2": 0.95,
            "optimizer.min_lr_ratio": 0.1,
            "training.activation_checkpointing": "full",
        },
        {"distributed_backend"},
    ),
    "deepspeed": (
        *("deepspeed", 64, "ds.json", {"ds.json": DEEPSPEED}),
        {
            "training.global_batch_size": 512,
            "parallel.zero_stage": 3,
            "optimizer.gradient_clipping": 0.5,
            "precision": "bf16",
            "training.steps": 9000,
            "optimizer.warmup_steps": 300,
            "optimizer.schedule": "linear",
            "optimizer.min_lr_ratio": 0.0,
            "optimizer.beta2": 0.98,
            "optimizer.weight_decay": 0.05,
        },
        {"model", "zero_optimization.offload_optimizer.device", "zero_optimization.overlap_comm"},
    ),
    "trainer, from weights": (
        "trainer",
        8,
        """run.py --model_name_or_path /models/Qwen2.5-7B --per_device_train_batch_size 2 --gradient_accumulation_steps 4
        --learning_rate 1e-5 --num_train_epochs 2 --lr_scheduler_type cosine --warmup_ratio 0.03
        --bf16 True --save_strategy steps --report_to none""",
        {},
        {
            "training.global_batch_size": 64,
            "training.epochs": 2,
            "optimizer.min_lr_ratio": 0.0,
            "optimizer.warmup_ratio": 0.03,
            "optimizer.beta2": 0.999,
            "optimizer.weight_decay": 0.0,
            "checkpoint.initialize_from": "runs/base",
        },
        {"model", "data", "save_strategy"},
    ),
    "trainer, from nothing": (
        *("trainer", 4, "--config_name gpt2 --max_steps 5000 --per_device_train_batch_size 8 --block_size 1024", {}),
        {"training.steps": 5000, "training.global_batch_size": 32, "precision": "fp32", "optimizer.lr": 5e-5, "training.epochs": None},
        {"config_name", "block_size", "model"},
    ),
    "trl dpo": (
        "trl",
        8,
        """dpo.py --model_name_or_path /models/base --dataset_name pairs --beta 0.2 --max_length 2048 --per_device_train_batch_size 1
        --gradient_accumulation_steps 8 --loss_type ipo --max_steps 300 --gradient_checkpointing""",
        {},
        {
            "training.objective": "dpo",
            "training.preference_loss": "ipo",
            "training.dpo_beta": 0.2,
            "optimizer.lr": 1e-6,
            "training.steps": 300,
            "training.epochs": None,
            "training.global_batch_size": 64,
            "lora.rank": None,
        },
        {"model", "data", "dataset_name"},
    ),
    "trl sft with lora": (
        *("trl", 2, "sft.py --model_name_or_path /models/base --use_peft --lora_r 32 --load_in_4bit --packing", {}),
        {"lora.rank": 32, "lora.alpha": 32, "lora.quantize": "nf4", "optimizer.lr": 2e-5, "training.global_batch_size": 16},
        {"model", "data", "packing"},
    ),
    "axolotl qlora": (
        *("axolotl", 4, "qlora.yml", {"qlora.yml": QLORA}),
        {
            "lora.rank": 32,
            "lora.alpha": 64,
            "lora.quantize": "nf4",
            "training.epochs": 2,
            "training.global_batch_size": 32,
            "optimizer.schedule": "cosine",
            "optimizer.warmup_ratio": 0.1,
            "precision": "bf16",
        },
        {"model", "data", "datasets", "lora_target_linear", "neftune_noise_alpha"},
    ),
    "nemo recipe": (
        "nemo",
        16,
        """--factory llama3_8b trainer.num_nodes=2 trainer.devices=8 trainer.max_steps=1000 data.global_batch_size=512
        data.micro_batch_size=1 data.seq_length=8192 trainer.strategy.tensor_model_parallel_size=2 optim.config.lr=3e-4
        optim.lr_scheduler.min_lr=3e-5 trainer.val_check_interval=100 log.ckpt.save_top_k=3""",
        {},
        {"model": "llama3-8b", "training.steps": 1000, "optimizer.min_lr_ratio": 0.1, "training.validate_every": 100},
        {"log.ckpt.save_top_k"},
    ),
    "megatron bridge": (
        *("megatron-bridge", 16, "override.yaml", {"override.yaml": BRIDGE}),
        {"parallel.pipeline": 2, "training.sequence_length": 4096, "optimizer.warmup_steps": 1000, "optimizer.min_lr_ratio": 0.1},
        {"model"},
    ),
}


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_an_argument_list(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_tool: Callable[..., tuple[int, str]]) -> None:
    """The settings follow, what has no counterpart is named and nothing else, and the command composes (the tool checks it)."""
    framework, ranks, arguments, files, settings, lacks = CASES[name]
    monkeypatch.chdir(tmp_path)
    for file, text in files.items():
        Path(file).write_text(text)
    translation, made = loaded("translate").Translation, []
    monkeypatch.setattr(loaded("translate"), "Translation", lambda *words: made.append(translation(*words)) or made[0])
    code, printed = call_tool("translate", "--ranks", ranks, "--from", framework, *arguments.split())
    assert code == 0, printed
    assert {key: made[0].settings.get(key) for key in settings} == settings
    assert set(made[0].lacks) == lacks
    for key, value in settings.items():
        assert value is None or f"{key}={str(value).lower() if isinstance(value, bool) else value}" in printed
    for word in lacks:
        assert f"\n  {word} " in printed


def test_a_global_batch_needs_the_number_of_gpus(call_tool: Callable[..., tuple[int, str]]) -> None:
    """Nothing is assumed; torchrun's options say it as well."""
    tool, words = loaded("translate"), [*SMALL.split(), "--train-iters", "10"]
    code, printed = call_tool("translate", "--from", "megatron", *words)
    assert code == 2
    assert "--ranks" in printed
    made = tool.Translation("megatron", tool.read([*words, "--nnodes", "2", "--nproc_per_node", "4"]), None)
    assert made.settings["training.global_batch_size"] == 64


def test_what_is_refused_here(call_tool: Callable[..., tuple[int, str]]) -> None:
    """The command is printed, with the rule that it violates."""
    words = ("--ranks", "8", "--from", "megatron", *SMALL.split(), "--context-parallel-size", "3")
    code, printed = call_tool("translate", *words)
    assert code == 2
    assert "python -m pipeline stage=pretrain" in printed
    assert "parallel.context=3: " in printed or "world size" in printed


def test_what_could_be_taken_for_something_else() -> None:
    """Steps of a validation, a file for DeepSpeed's engine, and GPT-NeoX's GELU, which is exact unless it is fused with the biases."""
    tool = loaded("translate")
    made = tool.Translation("torchtitan", tool.read(["--model.name", "llama3", "--model.flavor", "8B", "--validation.steps", "1200"]), 8)
    assert (made.settings["training.steps"], "validation.steps" in made.lacks) == (10000, True)
    made = tool.Translation("trainer", tool.read(["--deepspeed", "ds.json", "--model_name_or_path", "base"]), 8)
    assert "set parallel.deepspeed=ds.json" in made.lacks["deepspeed"]
    words = ["hidden_size=512", "num_layers=6", "num_attention_heads=8", "pos_emb=rotary", "train_micro_batch_size_per_gpu=4"]
    made = tool.Translation("neox", tool.read(words), 8)
    assert (made.settings["model.parallel_residual"], made.settings.get("model.activation", "gelu")) == (False, "gelu")
    made = tool.Translation("neox", tool.read([*words, "bias_gelu_fusion=true"]), 8)
    assert made.settings["model.activation"] == "gelu_tanh"
    made = tool.Translation("megatron", tool.read(GPT3.split()), 1024)
    assert "more training.steps" in made.lacks["rampup_batch_size"], "the samples give steps of full batches"
