"""The groups of a run's configuration. A field says its meaning, unit and legal range; nothing here computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from pipeline.config.cleaning import CleanConfig
from pipeline.config.data import DataConfig, DedupConfig, TokenizerConfig, WarmupConfig
from pipeline.knobs import knob

if TYPE_CHECKING:
    from pipeline.models.config import ModelConfig
else:
    ModelConfig = Any  # OmegaConf has no protocols


@dataclass
class TrainingConfig:
    """How long, on which batches, with which memory saving."""

    steps: int = knob(1000, "optimizer steps", at_least=1)
    global_batch_size: int = knob(64, "batch of one step over all ranks", unit="sequences", at_least=1)
    micro_batch_size: int = knob(4, "batch of one forward pass on one rank", unit="sequences", at_least=1)
    sequence_length: int = knob(256, "tokens a sequence", unit="tokens", at_least=2)
    sequence_warmup: list[WarmupConfig] = knob(
        [],
        "shorter sequences (tokens) in the first steps: each sample is cut into several, so that a step has as many tokens as ever",
        item=WarmupConfig,
    )
    batch_rampup: list[WarmupConfig] = knob([], "smaller global batches (sequences) in the first steps", item=WarmupConfig)
    seed: int = knob(0, "seed of the initial weights and of the sample order", at_least=0)
    document_mask: bool = knob(False, "attend only within a document")
    activation_checkpointing: str = knob(
        "none",
        "what the backward pass recomputes: nothing, all but matrix products and attention, or whole blocks",
        choices=("none", "selective", "full"),
    )
    attention: str = knob(
        "auto",
        "core of attention: PyTorch's kernels (sdpa), flex attention, or the plain formula; auto takes sdpa, but flex on a GPU where "
        "documents, windows or ALiBi would cost sdpa a (sequence, sequence) tensor",
        choices=("auto", "sdpa", "flex", "plain"),
    )
    compile: str = knob("auto", "compile the blocks; auto does on a GPU", choices=("auto", "on", "off"))
    validate_every: int = knob(0, "steps between validations; 0 validates at the end only", unit="steps", at_least=0)
    validation_batches: int = knob(8, "global batches a validation reads", at_least=1)
    token_budget: int | None = knob(None, "tokens the run is meant to see; the dry run tells the steps for it", at_least=1)


@dataclass
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = knob("adamw", "optimizer: AdamW (Loshchilov & Hutter 2019)", choices=("adamw",))
    lr: float = knob(3e-4, "peak learning rate", above=0)
    beta1: float = knob(0.9, "decay of the first moment", at_least=0, at_most=0.9999)
    beta2: float = knob(0.95, "decay of the second moment", at_least=0, at_most=0.99999)
    eps: float = knob(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = knob(0.1, "decoupled decay of matrices and embeddings", at_least=0)
    gradient_clipping: float = knob(1.0, "largest global gradient norm; 0 clips nothing", at_least=0)
    schedule: str = knob("cosine", "learning rate after the warm-up", choices=("cosine", "wsd", "linear"))
    warmup_steps: int = knob(100, "steps of linear warm-up", unit="steps", at_least=0)
    decay_steps: int = knob(0, "last steps in which wsd decays; 0 is a tenth of the run", unit="steps", at_least=0)
    min_lr_ratio: float = knob(0.1, "last learning rate over the peak", at_least=0, at_most=1)


@dataclass
class ParallelConfig:
    """The layout. Data parallel is what is left of the world size."""

    tensor: int = knob(1, "ranks that share every matrix product", unit="ranks", at_least=1)
    pipeline: int = knob(1, "ranks that share the layers", unit="ranks", at_least=1)
    context: int = knob(1, "ranks that share every sequence's tokens", unit="ranks", at_least=1)
    context_kind: str = knob(
        "ring",
        "what the ranks of a sequence exchange: ring passes keys and values on, ulysses swaps tokens for heads (all-to-all)",
        choices=("ring", "ulysses"),
    )
    expert: int = knob(1, "ranks that share the experts of a mixture; each sees samples of its own", unit="ranks", at_least=1)
    zero_stage: int = knob(
        1,
        "what DeepSpeed ZeRO shards over the data ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too",
        at_least=0,
        at_most=3,
    )
    schedule: str = knob("1f1b", "order of the micro-batches in the pipeline", choices=("1f1b", "interleaved", "zbv"))
    stages_per_rank: int | None = knob(
        None, "pipeline stages a rank holds; the schedule's own when unset: 1 for 1f1b, 2 for the others", at_least=1
    )
    sequence_parallel: bool = knob(True, "share norms and residuals over the tensor ranks along the sequence")


@dataclass
class PrecisionConfig:
    """Number formats. Master weights, optimizer state and gradient sums are fp32 in any case."""

    dtype: str = knob("bf16", "format of weights and activations in the matrix products", choices=("bf16", "fp32"))


@dataclass
class CheckpointConfig:
    """When a checkpoint is written, and where a run continues."""

    every: int = knob(500, "steps between checkpoints; 0 writes the last one only", unit="steps", at_least=0)
    keep: int = knob(2, "checkpoints kept, the newest", at_least=1)
    resume: str = knob("auto", "auto: the newest of run_dir if there is one; none: start anew; or a checkpoint's folder")


@dataclass
class ClusterConfig:
    """One site's Slurm: what a job asks for and what its nodes look like."""

    name: str = knob("local", "the site: what Slurm calls ClusterName; its jobs source slurm/sites/NAME.sh")
    account: str | None = knob(None, "Slurm account (project budget)")
    partition: str | None = knob(None, "Slurm partition")
    qos: str | None = knob(None, "Slurm quality of service")
    nodes: int = knob(1, "nodes a job", unit="nodes", at_least=1)
    tasks_per_node: int = knob(1, "ranks a node, one a GPU", unit="ranks", at_least=1)
    cpus_per_task: int = knob(1, "processor cores a rank", unit="cores", at_least=1)
    gpus_per_node: int = knob(0, "GPUs a node; 0 asks for none", unit="GPUs", at_least=0)
    memory: str | None = knob(None, "memory a node, as Slurm writes it (for example 480G)")
    time: str = knob("01:00:00", "wall-clock limit, as Slurm writes it")
    host_suffix: str = knob("", "appended to the first node's name for its fast network (i on JUWELS)")
    sbatch: list[str] = knob([], "further sbatch options, each as on the command line")


@dataclass
class TrackingConfig:
    """metrics.jsonl is always written; Weights & Biases on rank 0 beside it."""

    wandb: str = knob("offline", "Weights & Biases mode", choices=("offline", "online", "disabled"))
    project: str = knob("tannschen", "Weights & Biases project")
    name: str | None = knob(None, "name of the run; its folder's name when unset")
    log_every: int = knob(10, "steps between two log lines", unit="steps", at_least=1)


@dataclass
class DryRunConfig:
    """`dry_run=true`: say what one rank of a job would hold, on a login node, and start nothing."""

    enabled: bool = knob(False, "print the rank's share instead of running (short form: dry_run=true)")
    world_size: int | None = knob(None, "ranks of the job to imagine; nodes x tasks of the cluster when unset", at_least=1)
    rank: int = knob(0, "which of them to be", at_least=0)


@dataclass
class StageConfig:
    """What to do. Stages with knobs of their own extend this in config/stages.py."""

    name: str = MISSING


@dataclass
class RunConfig:
    """Everything one run is made of."""

    run_dir: str = knob("runs/default", "folder of the run: config.yaml, manifest.json, metrics.jsonl, checkpoints/")
    stage: StageConfig = field(default_factory=StageConfig)
    model: ModelConfig = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    clean: CleanConfig = field(default_factory=CleanConfig)
    dedup: DedupConfig = field(default_factory=DedupConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)
