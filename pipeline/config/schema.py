"""The configuration groups of a run. Each field has its meaning, unit and legal range."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from pipeline.common.knobs import knob
from pipeline.config.cleaning import CleanConfig
from pipeline.config.cluster import ClusterConfig
from pipeline.config.data import DataConfig, DedupConfig, TokenizerConfig
from pipeline.config.lora import LoraConfig, is_adapter
from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainingConfig

if TYPE_CHECKING:
    from pipeline.models.config import ModelConfig
else:
    ModelConfig = Any  # OmegaConf has no protocols

#: Losses of training.preference_loss without a reference model.
REFERENCE_FREE = ("simpo", "orpo")


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Master weights, optimizer state and accumulated gradients are always fp32."""

    dtype: str = knob("bf16", "dtype of weights and activations in matrix products", choices=("bf16", "fp16", "fp32"))
    fp8: str = knob(
        "none",
        "multiply 8-bit numbers in the linear layers of the blocks (bf16 elsewhere): one scale per tensor (the fastest), or per row; by "
        "torchao, on GPUs from Ada and Hopper on, emulated on a CPU",
        choices=("none", "tensorwise", "rowwise"),
    )
    fp8_experts: bool = knob(
        False,
        "fp8: routed experts multiply 8-bit numbers, too, with a scale per row whatever precision.fp8 is; on Hopper, emulated on a CPU",
    )
    fp8_exclude_layers: int = knob(1, "fp8: number of first and of last layers whose products stay bf16", unit="layers", at_least=0)
    reduce_dtype: str = knob(
        "fp32",
        "dtype in which gradients are summed over data ranks, after those of a rank's micro-batches in fp32; bf16 halves the bytes of the "
        "largest collective of data parallelism, and rounds the sum of every two ranks",
        choices=("fp32", "bf16"),
    )
    initial_loss_scale: float = knob(
        65536.0, "fp16: first factor of the loss, such that small gradients are not rounded to zero", at_least=1, at_most=1e30
    )
    loss_scale_window: int = knob(
        1000,
        "fp16: the loss scale is doubled after this many steps with a finite gradient, and halved after one without",
        unit="steps",
        at_least=1,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int = knob(500, "steps between checkpoints; 0 saves only at the end, by time, and when the job is about to end", at_least=0)
    every_minutes: float = knob(30.0, "time between checkpoints; 0 saves only by steps", unit="minutes", at_least=0)
    keep: int = knob(2, "number of newest checkpoints to keep", at_least=1)
    keep_every: int = knob(0, "also keep every checkpoint whose step is a multiple of this, for ever; 0: none", unit="steps", at_least=0)
    files: str = knob(
        "rank", "data files of a checkpoint: one for each rank, or one for each node, which are fewer and larger", choices=("rank", "node")
    )
    resume: str = knob("auto", "auto: newest checkpoint of run_dir, if any; none: refuse a run_dir with checkpoints")
    fork: str | None = knob(
        None,
        "run directory or checkpoint (RUN/step-300) that a new run continues: its weights, optimizer state, step and samples, with "
        "another schedule, length or later data",
    )
    initialize_from: str | None = knob(
        None,
        "run directory or checkpoint whose weights a new run starts from, without its optimizer state and its progress; in pretraining "
        "model= may be larger than its model",
    )
    expert_noise: float = knob(0.0, "noise on experts that begin as copies, over the standard deviation of their weights", at_least=0)
    expert_reinitialized: float = knob(
        0.0, "share of the intermediate dims of experts that begin as copies that is drawn anew (Drop-Upcycling)", at_least=0, at_most=1
    )
    new_blocks: str = knob("interleaved", "where new blocks stand: evenly among the others, or behind", choices=("interleaved", "last"))
    async_save: str = knob(
        "auto",
        "write checkpoints beside training: the weights are copied to host memory during the next step, and a writer process of each node "
        "hashes and writes them (auto; training waits if the memory does not suffice), or while training waits (off)",
        choices=("auto", "off"),
    )
    max_failures: int = knob(
        3, "stop the run after so many checkpoints in a row that could not be written (disk full, quota); each is tried once", at_least=1
    )
    failing_minutes: float = knob(
        10.0,
        "a full disk: least time from the first to the last of these failures",
        unit="minutes",
        at_least=0,
    )
    skip_damaged: bool = knob(False, "with resume=auto, continue from the newest checkpoint that is whole, set aside newer ones")


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of checkpoints, by Slurm jobs that a training run submits while it continues."""

    every: int = knob(
        0, "steps between checkpoints that are written and evaluated by a Slurm job of their own; 0: none", unit="steps", at_least=0
    )
    validation: bool = knob(True, "evaluate the validation split and its corpora")
    tasks: list[str] = knob([], "also evaluate these tasks of lm-eval, as stage.tasks of stage=evaluate")
    task_folder: str | None = knob(None, "folder with the task files (.yaml) of lm-eval")
    few_shot: int | None = knob(None, "examples before each question of a task; default: as the task file says", at_least=0)
    limit: int | None = knob(None, "number of documents of each task, the first ones; default: all", at_least=1)
    nodes: int = knob(1, "nodes of an evaluation job", unit="nodes", at_least=1)
    tasks_per_node: int = knob(1, "ranks per node of an evaluation job", unit="ranks", at_least=1)
    time: str = knob("01:00:00", "wall-clock limit of an evaluation job in Slurm format")
    sbatch: list[str] = knob([], "additional sbatch options of the evaluation jobs, each in command-line form")
    overrides: list[str] = knob(
        [], 'settings in which the evaluation jobs differ from the run, such as "parallel.tensor=1", each in quotes'
    )


@dataclass(frozen=True)
class SubmitConfig:
    """The jobs of stage=submit."""

    stages: list[str] = knob([], "stages to submit, one Slurm job each: a job starts when the one before it has succeeded")
    overrides: dict[str, list[str]] = knob(
        {}, "settings in which the job of one stage differs from the others, such as submit.overrides.evaluate=[parallel.tensor=1]"
    )


@dataclass(frozen=True)
class TrackingConfig:
    """Experiment tracking: metrics.jsonl is always written; rank 0 optionally logs to Weights & Biases."""

    wandb: str = knob("offline", "Weights & Biases mode", choices=("offline", "online", "disabled"))
    project: str = knob("tannschen", "Weights & Biases project")
    name: str | None = knob(None, "run name in Weights & Biases; default: the name of run_dir")
    log_every: int = knob(10, "steps between log lines", unit="steps", at_least=1)


@dataclass(frozen=True)
class DryRunConfig:
    """`dry_run=true`: print the model state and batch arithmetic of one rank, without starting the job."""

    enabled: bool = knob(False, "print model state and batch arithmetic of one rank instead of running (short form: dry_run=true)")
    world_size: int | None = knob(None, "simulated world size; default: cluster.nodes x cluster.tasks_per_node", at_least=1)
    rank: int = knob(0, "simulated rank", at_least=0)


@dataclass(frozen=True)
class StageConfig:
    """The selected stage. Stages with additional keys extend this class in config/stages.py."""

    name: str = MISSING


@dataclass(frozen=True)
class CertificateConfig:
    """Certificate of a pretraining job (stage=certify)."""

    required: bool = knob(
        False, "pretrain and submit refuse to start without a certificate of the same configuration, layout, code version and data"
    )
    certificate: str | None = knob(None, "file of the certificate; default: run_dir/certificate.json")


@dataclass(frozen=True)
class RunConfig:
    """The complete configuration of a run."""

    run_dir: str = knob("runs/default", "run directory: config.yaml, manifest.json, metrics.jsonl, checkpoints/")
    stage: StageConfig = field(default_factory=StageConfig)
    model: ModelConfig = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    clean: CleanConfig = field(default_factory=CleanConfig)
    dedup: DedupConfig = field(default_factory=DedupConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    submit: SubmitConfig = field(default_factory=SubmitConfig)
    certify: CertificateConfig = field(default_factory=CertificateConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)

    @property
    def objective(self) -> str:
        """Name of the training objective: that of the model's family with training.objective=auto."""
        return self.model.objective if self.training.objective == "auto" else self.training.objective

    @property
    def has_reference(self) -> bool:
        """Whether the run compares with a reference model."""
        return self.objective == "dpo" and self.training.preference_loss not in REFERENCE_FREE

    @property
    def stores_reference(self) -> bool:
        """Whether the reference is computed once and stored: with adapters it need not be, it is the model without them."""
        return self.has_reference and (self.lora.rank == 0 or self.data.instructions.reference is not None)

    @property
    def buffers_experts(self) -> bool:
        """Whether tokens travel to the experts of other ranks in buffers that have more rows than their mean (parallel.expert_buffer)."""
        parallel = self.parallel
        distributed = parallel.expert > 1 or parallel.folded
        return parallel.expert_padding and distributed and getattr(self.model, "capacity_factor", None) is None

    def is_frozen(self, weight: str) -> bool:
        """Whether training leaves a weight as it is; with LoRA, all but adapters, lora.modules_to_save and the head of a classifier."""
        is_head = bool(getattr(self.model, "labels", [])) and weight.startswith("head.")
        if self.lora.rank and not (is_adapter(weight) or is_head or self.lora.saves(weight)):
            return True
        return any(fnmatchcase(weight, pattern) for pattern in self.training.frozen)
