"""What Megatron-LM, torchtitan, DeepSpeed and Hugging Face's Trainer call the things that have a key here."""

from __future__ import annotations

import re

#: name -> key with the same values; several names have a prefix in their framework, such as `parallelism.` in torchtitan
SAME = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "adam_epsilon": "optimizer.eps",
    "checkpoint_interval": "checkpoint.every",
    "clip_grad": "optimizer.gradient_clipping",
    "context_parallel_degree": "parallel.context",
    "context_parallel_size": "parallel.context",
    "cp_comm_type": "parallel.context_kind",
    "dim": "model.hidden",
    "distributed_timeout_minutes": "training.timeout_minutes",
    "dump_folder": "run_dir",
    "eval_interval": "training.validate_every",
    "eval_iters": "training.validation_batches",
    "eval_steps": "training.validate_every",
    "expert_model_parallel_size": "parallel.expert",
    "expert_parallel_degree": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "ffn_hidden_size": "model.ffn_hidden",
    "hidden_size": "model.hidden",
    "init_method_std": "model.init_std",
    "initializer_range": "model.init_std",
    "intermediate_size": "model.ffn_hidden",
    "learning_rate": "optimizer.lr",
    "local_batch_size": "training.micro_batch_size",
    "log_freq": "tracking.log_every",
    "log_interval": "tracking.log_every",
    "logging_steps": "tracking.log_every",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lr_warmup_fraction": "optimizer.warmup_ratio",
    "lr_warmup_iters": "optimizer.warmup_steps",
    "max_grad_norm": "optimizer.gradient_clipping",
    "max_norm": "optimizer.gradient_clipping",
    "max_position_embeddings": "model.max_positions",
    "max_seq_len": "training.sequence_length",
    "max_seq_length": "training.sequence_length",
    "max_steps": "training.steps",
    "moe_aux_loss_coeff": "training.balance_loss",
    "moe_expert_capacity_factor": "model.capacity_factor",
    "moe_ffn_hidden_size": "model.expert_ffn_hidden",
    "moe_intermediate_size": "model.expert_ffn_hidden",
    "moe_router_topk": "model.top_k",
    "moe_z_loss_coeff": "training.z_loss",
    "n_heads": "model.heads",
    "n_kv_heads": "model.kv_heads",
    "n_layers": "model.layers",
    "n_routed_experts": "model.experts",
    "norm_epsilon": "model.norm_eps",
    "num_attention_heads": "model.heads",
    "num_epochs": "training.epochs",
    "num_experts": "model.experts",
    "num_experts_per_tok": "model.top_k",
    "num_hidden_layers": "model.layers",
    "num_key_value_heads": "model.kv_heads",
    "num_layers": "model.layers",
    "num_local_experts": "model.experts",
    "num_query_groups": "model.kv_heads",
    "num_train_epochs": "training.epochs",
    "output_dir": "run_dir",
    "per_device_train_batch_size": "training.micro_batch_size",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "pipeline_parallel_degree": "parallel.pipeline",
    "rms_norm_eps": "model.norm_eps",
    "rotary_base": "model.rope_theta",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "seq_len": "training.sequence_length",
    "seq_length": "training.sequence_length",
    "sequence_len": "training.sequence_length",
    "tensor_model_parallel_size": "parallel.tensor",
    "tensor_parallel_degree": "parallel.tensor",
    "train_batch_size": "training.global_batch_size",
    "train_iters": "training.steps",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "wandb_exp_name": "tracking.name",
    "wandb_project": "tracking.project",
}
#: name -> what to set, where the values differ
OTHER = {
    "attn_implementation": "set training.attention",
    "bf16": "set precision=bf16",
    "data_parallel_shard_degree": "set parallel.zero_stage, and parallel.zero_group for groups of ranks",
    "dataloader_num_workers": "set data.prefetch, the batches that threads load ahead",
    "enable_cpu_offload": "set parallel.offload=optimizer",
    "enable_profiling": "name steps in training.profile",
    "fp16": "set precision=fp16",
    "gradient_accumulation_steps": "set training.global_batch_size, which contains all micro-batches of a step",
    "gradient_checkpointing": "set training.activation_checkpointing to selective or full",
    "lr_decay_style": "set optimizer.schedule",
    "lr_scheduler_type": "set optimizer.schedule",
    "min_lr": "set optimizer.min_lr_ratio, the ratio to optimizer.lr",
    "num_layers_per_virtual_pipeline_stage": "set parallel.schedule=interleaved and parallel.stages_per_rank",
    "overlap_grad_reduce": "leave it out: collectives run beside computation anyway",
    "pipeline_parallel_schedule": "set parallel.schedule",
    "profile_freq": "name steps in training.profile",
    "profile_step_start": "name steps in training.profile",
    "rampup_batch_size": "set training.batch_rampup",
    "recompute": "set training.activation_checkpointing to selective or full",
    "recompute_activations": "set training.activation_checkpointing=selective",
    "recompute_granularity": "set training.activation_checkpointing to selective or full",
    "report_to": "set tracking.wandb",
    "tie_word_embeddings": "set model.tie_embeddings",
    "untie_embeddings_and_output_weights": "set model.tie_embeddings=false",
    "use_distributed_optimizer": "set parallel.zero_stage=1",
    "zero_optimization": "set parallel.zero_stage, or name the file by parallel.deepspeed",
}
#: What other tools have as a step of its own -> the stage that does it.
STAGES = {
    "quantize": "write stage=convert stage.quantize=int4 (or int8, q8_0)",
    "export": "write stage=convert",
    "import": "write stage=convert stage.input=FOLDER",
    "merge": "run tools/checkpoint merge",
    "train": "write stage=pretrain or stage=finetune",
    "sft": "write stage=finetune",
    "dpo": "write stage=finetune training.objective=dpo",
    "eval": "write stage=evaluate",
    "dedup": "write stage=shard, which deduplicates",
    "clean": "write stage=shard, which cleans",
}


def of(key: str) -> list[str]:
    """Return the names of a key in other frameworks, also those whose values differ."""
    others = [name for name, text in OTHER.items() if re.search(rf"\b{re.escape(key)}\b", text)]
    return sorted([*(name for name, ours in SAME.items() if ours == key), *others])


def advice(key: str, value: object) -> str | None:
    """Return what to write instead of a key or an option of another framework; None if its name is not one of theirs."""
    name = key.lstrip("-").rpartition(".")[2].replace("-", "_")
    if name in SAME:
        return f"write {SAME[name]}={value}"
    return OTHER.get(name)
