"""The layouts of tools/numerics, and the settings of its tiny models, which are those of the families (family_cases.py)."""

from __future__ import annotations

from dataclasses import dataclass

WORLD = 8
STEPS = 10
BATCH = 16

COMMON = (
    "precision=fp32",
    "model.vocab_size=101",  # odd: the tensor ranks have vocabulary pieces of different sizes
    "training.sequence_length=16",
    f"training.steps={STEPS}",
    f"training.global_batch_size={BATCH}",
    "optimizer.lr=0.001",
    "optimizer.warmup_steps=2",
    "optimizer.gradient_clipping=0.5",
    "optimizer.eps=1e-6",
    "training.ema=0.9",
)
SIZES = ("model.hidden=64", "model.heads=8", "model.ffn_hidden=96", "model.max_positions=32")
NARROW = tuple(size for size in SIZES if "ffn_hidden" not in size)  # for families whose feed-forward width is always 4 x hidden


@dataclass(frozen=True)
class Row:
    """A layout: the sizes of the mesh axes and further settings."""

    tensor: int
    pipeline: int
    zero: int
    schedule: str = "1f1b"
    more: tuple[str, ...] = ()
    context: int = 1
    expert: int = 1

    @property
    def micro_batch_size(self) -> int:
        """2, or 1 where a rank would not accumulate gradients, or where its micro-batches would not fill the pipeline."""
        needed = 2 * self.pipeline if self.schedule == "zbv" else max(2, self.pipeline)
        samples = BATCH * self.tensor * self.pipeline * self.context // WORLD
        return 2 if samples >= 2 * needed else 1

    @property
    def data(self) -> int:
        """The size of the data axis: the remaining factor of the world size."""
        return WORLD // (self.tensor * self.pipeline * self.context * self.expert)

    def overrides(self) -> list[str]:
        """Return the settings of the layout as a command line."""
        axes = ("tensor", "pipeline", "context", "expert")
        return [
            *(f"parallel.{axis}={getattr(self, axis)}" for axis in axes),
            f"parallel.zero_stage={self.zero}",
            f"parallel.schedule={self.schedule}",
            f"training.micro_batch_size={self.micro_batch_size}",
            *self.more,
        ]

    def __str__(self) -> str:
        more = [f"{axis} {getattr(self, axis)}" for axis in ("context", "expert") if getattr(self, axis) > 1]
        more += [m.rpartition(".")[2] for m in self.more]
        return " ".join([f"tensor {self.tensor} pipeline {self.pipeline} data {self.data} zero {self.zero} {self.schedule}", *more])


GROUPS = ("parallel.zero_group=2",)
NO_SEQUENCE = ("parallel.sequence_parallel=false",)
ULYSSES = ("parallel.context_kind=ulysses",)
WHOLE_EXPERTS = ("parallel.expert_tensor=1",)

#: Layouts of every family.
SOME = (
    Row(1, 1, 3),
    Row(2, 1, 1),
    Row(4, 1, 2, more=NO_SEQUENCE),
    Row(1, 2, 0, "zbv"),
    Row(1, 2, 2, "interleaved"),
    Row(2, 2, 1),
    Row(2, 2, 3, more=("training.activation_checkpointing=full",)),
)
#: Layouts of gpt and llama.
ALL = (
    *(Row(1, 1, zero) for zero in (0, 1, 2, 3)),
    *(Row(1, 1, zero, more=GROUPS) for zero in (1, 2, 3)),
    *(Row(2, 1, zero) for zero in (0, 1, 3)),
    Row(4, 1, 2),
    Row(2, 1, 1, more=NO_SEQUENCE),
    Row(4, 1, 2, more=NO_SEQUENCE),
    *(Row(1, 2, zero) for zero in (0, 1, 3)),
    Row(1, 4, 2),
    Row(1, 8, 1),
    *(Row(1, 2, zero, "interleaved") for zero in (0, 2, 3)),
    *(Row(1, 4, zero, "zbv") for zero in (0, 1)),
    *(Row(2, 2, zero) for zero in (0, 1, 2, 3)),
    Row(2, 2, 2, more=NO_SEQUENCE),
    *(Row(2, 2, zero, "interleaved") for zero in (0, 1)),
    *(Row(2, 2, zero, "zbv") for zero in (0, 2)),
    Row(4, 2, 1, "zbv", NO_SEQUENCE),
    Row(2, 2, 1, more=("training.activation_checkpointing=full",)),
    Row(2, 2, 2, more=("training.activation_checkpointing=selective",)),
)
#: Layouts without a pipeline that compute activations again.
RECOMPUTED = tuple(Row(2, 1, zero, more=(f"training.activation_checkpointing={mode}",)) for zero, mode in ((3, "full"), (1, "selective")))
#: Layouts of DeepSpeed's engine.
DEEPSPEED = tuple(Row(tensor, 1, zero, more=("parallel.engine=deepspeed",)) for tensor in (1, 2) for zero in (0, 1, 2, 3))
#: Layouts of decoders with context parallelism.
CONTEXT = (
    Row(1, 1, 1, context=2),
    Row(2, 2, 0, context=2),
    Row(1, 1, 3, context=4),
    Row(1, 1, 1, more=("parallel.zero_group=4",), context=2),
    Row(1, 2, 1, more=ULYSSES, context=2),
    Row(2, 1, 2, more=ULYSSES, context=2),
)
#: Layouts of Muon.
MUON_ROWS = (*(Row(1, 1, zero) for zero in (0, 1, 2)), *SOME, Row(2, 1, 0), Row(4, 1, 2), Row(2, 2, 0), CONTEXT[0])
#: Layouts of optimizers whose update of an element reads only its own state.
OPTIMIZER_ROWS = (Row(1, 1, 0), Row(1, 1, 3), Row(2, 1, 2), Row(2, 2, 1), CONTEXT[0])
#: Layouts of MoE models with expert parallelism.
EXPERT = (
    Row(1, 1, 0, expert=4),
    Row(2, 1, 1, expert=2),
    Row(2, 1, 2, more=NO_SEQUENCE, expert=2),
    Row(1, 2, 3, expert=2),
    Row(1, 1, 3, more=GROUPS, expert=4),
    Row(1, 1, 2, more=("parallel.zero_group=4",), expert=2),
    Row(2, 2, 1, expert=2),
    Row(2, 1, 1, more=WHOLE_EXPERTS),
    Row(2, 1, 3, more=WHOLE_EXPERTS, expert=2),
    Row(4, 2, 2, more=WHOLE_EXPERTS),
)


@dataclass(frozen=True)
class Model:
    """The tiny model of a family.

    Attributes:
        overrides: its settings as a command line.
        rows: its layouts.
    """

    overrides: tuple[str, ...]
    rows: tuple[Row, ...]


def model(name: str, *more: str, sizes: tuple[str, ...] = SIZES, layers: int = 4, rows: tuple[Row, ...] = SOME) -> Model:
    """Return the model conf/model/NAME.yaml with tiny sizes. Four layers suffice for two pipeline ranks with two stages each."""
    return Model((f"model={name}", *COMMON, f"model.layers={layers}", *sizes, *more), rows)
