"""What Megatron-LM, torchtitan, DeepSpeed and Hugging Face's Trainer call the things that have a key here."""

from __future__ import annotations

#: name -> key with the same values; several names have a prefix in their framework, such as `parallelism.` in torchtitan
SAME = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "adam_epsilon": "optimizer.eps",
    "clip_grad": "optimizer.gradient_clipping",
    "context_parallel_degree": "parallel.context",
    "context_parallel_size": "parallel.context",
    "cp_comm_type": "parallel.context_kind",
    "expert_model_parallel_size": "parallel.expert",
    "expert_parallel_degree": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "learning_rate": "optimizer.lr",
    "local_batch_size": "training.micro_batch_size",
    "logging_steps": "tracking.log_every",
    "log_interval": "tracking.log_every",
    "lr_warmup_iters": "optimizer.warmup_steps",
    "max_grad_norm": "optimizer.gradient_clipping",
    "max_norm": "optimizer.gradient_clipping",
    "max_steps": "training.steps",
    "moe_aux_loss_coeff": "training.balance_loss",
    "moe_expert_capacity_factor": "model.capacity_factor",
    "moe_z_loss_coeff": "training.z_loss",
    "num_train_epochs": "training.epochs",
    "per_device_train_batch_size": "training.micro_batch_size",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "pipeline_parallel_degree": "parallel.pipeline",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "seq_len": "training.sequence_length",
    "seq_length": "training.sequence_length",
    "tensor_model_parallel_size": "parallel.tensor",
    "tensor_parallel_degree": "parallel.tensor",
    "train_batch_size": "training.global_batch_size",
    "train_iters": "training.steps",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
}
#: name -> what to set, where the values differ
OTHER = {
    "bf16": "set precision=bf16",
    "data_parallel_shard_degree": "set parallel.zero_stage, and parallel.zero_group for groups of ranks",
    "eval_interval": "set training.validate_every",
    "eval_steps": "set training.validate_every",
    "fp16": "set precision=fp16",
    "gradient_accumulation_steps": "set training.global_batch_size, which contains all micro-batches of a step",
    "gradient_checkpointing": "set training.activation_checkpointing to selective or full",
    "lr_decay_style": "set optimizer.schedule",
    "lr_scheduler_type": "set optimizer.schedule",
    "min_lr": "set optimizer.min_lr_ratio, the ratio to optimizer.lr",
    "num_layers_per_virtual_pipeline_stage": "set parallel.schedule=interleaved and parallel.stages_per_rank",
    "pipeline_parallel_schedule": "set parallel.schedule",
    "recompute": "set training.activation_checkpointing to selective or full",
    "recompute_activations": "set training.activation_checkpointing=selective",
    "recompute_granularity": "set training.activation_checkpointing to selective or full",
    "report_to": "set tracking.wandb",
    "rampup_batch_size": "set training.batch_rampup",
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


def advice(key: str, value: object) -> str | None:
    """Return what to write instead of a key or an option of another framework; None if its name is not one of theirs."""
    name = key.lstrip("-").rpartition(".")[2].replace("-", "_")
    if name in SAME:
        return f"write {SAME[name]}={value}"
    return OTHER.get(name)
