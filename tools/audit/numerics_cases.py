"""The test cases of tools/numerics: a tiny model of every family, and its layouts."""

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


def _model(name: str, *more: str, sizes: tuple[str, ...] = SIZES, layers: int = 4, rows: tuple[Row, ...] = SOME) -> Model:
    """Return the model conf/model/NAME.yaml with tiny sizes. Four layers suffice for two pipeline ranks with two stages each."""
    return Model((f"model={name}", *COMMON, f"model.layers={layers}", *sizes, *more), rows)


CLIP_LOW = "optimizer.gradient_clipping=0.1"  # for models with small gradients
LOWER_STD = "model.init_std=0.5"  # with 1 attention is so peaked that gradients of queries differ by 3e-6 between fp32 and fp64
HIGHER_STD = "model.init_std=0.02"  # with 0.006 gradients of queries are so small that they differ by 8e-6 between fp32 and fp64
WIDE_STD = "model.init_std=0.1"  # with 0.02 gradients of the query norms differ by 1.3e-5 between fp32 and fp64
HIGHER_EPS = "model.norm_eps=1e-3"  # with 1e-6 a gradient behind small outputs of linear attention differs by 1e-3 between fp32 and fp64
SMOOTH = "model.activation=gelu"  # with ReLU, rounding can change the sign of an input, which changes the gradient by more than rounding
ONE = "training.micro_batch_size=1"  # in all layouts, since the auxiliary losses of MoE layers are means over a micro-batch

MUON = "optimizer.name=muon"
QK_CLIP = "optimizer.qk_clip=0.05"  # about half of the heads are above it
# Lion moves by signs: where one is that of a rounding error, an element differs by twice the learning rate, here below the tolerance.
LION = ("optimizer.name=lion", "optimizer.beta2=0.99", "optimizer.lr=1e-6", "optimizer.eps=1e-8")
ADEMAMIX = ("optimizer.name=ademamix", "optimizer.beta2=0.999", "optimizer.beta3=0.99", "optimizer.slow_warmup_steps=5")
SCHEDULE_FREE = ("optimizer.name=schedule_free", "optimizer.schedule=constant", "training.ema=null")

FAMILIES: dict[str, Model] = {
    "gpt": _model("gpt-tiny", layers=8, rows=ALL + CONTEXT),
    "llama": _model("llama-tiny", "model.kv_heads=4", layers=8, rows=ALL + CONTEXT),
    "qwen2.5": _model("qwen2.5-tiny", "model.kv_heads=4"),
    "gpt-banded": _model("gpt-tiny", "model.banded_window=6", rows=SOME + CONTEXT[:2]),
    "gemma3": _model(
        "gemma3-tiny",
        "model.kv_heads=4",
        "model.window=6",
        "model.sliding_window_pattern=2",
        "model.rope_local_theta=100",
        rows=SOME + CONTEXT,
    ),
    "gemma2": _model(
        "gemma2-tiny",
        *("model.kv_heads=4", "model.window=6", "model.query_pre_attn_scalar=2", "model.attn_logit_softcapping=0.5"),
        "model.final_logit_softcapping=1.0",
        rows=SOME + CONTEXT,
    ),
    "nemotron": _model("nemotron-tiny", "model.kv_heads=4", rows=SOME + CONTEXT[:2]),
    "gpt1": _model("gpt1-tiny", CLIP_LOW, sizes=NARROW, rows=SOME + CONTEXT[:2]),
    "olmo2": _model("olmo2-tiny", "model.kv_heads=4", WIDE_STD, rows=SOME + CONTEXT),
    "olmo3": _model("olmo3-tiny", "model.kv_heads=4", "model.window=6", "model.rope_local_theta=100", WIDE_STD, rows=SOME + CONTEXT[:2]),
    "granite": _model("granite-tiny", "model.kv_heads=4", CLIP_LOW, rows=SOME + CONTEXT[:2]),
    "smollm3": _model("smollm3-tiny", "model.kv_heads=4", "model.no_rope_layer_interval=2", rows=SOME + CONTEXT[:2]),
    # xIELU's derivative jumps at 0 and at -1e-6 (it clamps there, as the authors' code does). With seed 0 an input is at -3e-8, and layouts
    # that round it to the other side get another gradient (2e-3 of one weight's moments). With seed 15 no input is that close.
    "apertus": _model("apertus-tiny", "model.kv_heads=4", "training.seed=15"),
    "opt": _model("opt-tiny", SMOOTH, rows=SOME + CONTEXT[:2]),
    "opt-350m": _model("opt-tiny", "model.embed_width=48", "model.pre_norm=false", SMOOTH, HIGHER_STD, "optimizer.gradient_clipping=0.02"),
    "bloom": _model("bloom-tiny", CLIP_LOW, sizes=NARROW, rows=SOME + CONTEXT),
    "gpt_neox": _model("gpt-neox-tiny", rows=SOME + CONTEXT[:2]),
    "mistral": _model("mistral-tiny", "model.kv_heads=4", "model.window=6", rows=SOME + CONTEXT),
    "phi3": _model("phi3-tiny", "model.kv_heads=4", "model.window=6"),
    "mixtral": _model("mixtral-tiny", "model.kv_heads=4", ONE, rows=SOME + CONTEXT[:3] + EXPERT),
    # As for deepseek_v3 below: with seed 0, two layouts resolve a tie as fp64 does.
    "olmoe": _model("olmoe-tiny", "model.kv_heads=4", "training.seed=1", ONE, WIDE_STD, rows=SOME + CONTEXT[:1] + EXPERT),
    "qwen3_moe": _model("qwen3-moe-tiny", "model.kv_heads=4", "model.head_width=8", ONE, WIDE_STD, rows=SOME + CONTEXT[:1] + EXPERT),
    "qwen3_next": _model(
        "qwen3-next-tiny", "model.kv_heads=4", "model.head_width=8", ONE, WIDE_STD, HIGHER_EPS, rows=SOME + CONTEXT + EXPERT
    ),
    # With seed 0 a token is at a tie of two experts, which fp32 and fp64 resolve differently: the rounding row shows 3e-2.
    "deepseek_v3": _model("deepseek-tiny", "training.seed=1", ONE, rows=SOME + EXPERT),
    "deepseek-context": _model("deepseek-tiny", "model.mtp_depth=0", ONE, rows=CONTEXT[:3]),
    "glm4_moe": _model("glm4-moe-tiny", "model.kv_heads=4", "model.head_width=8", ONE, WIDE_STD, rows=SOME + EXPERT),
    "gpt_oss": _model(
        *("gpt-oss-tiny", "model.kv_heads=4", "model.head_width=8", "model.window=6", ONE, WIDE_STD), rows=SOME + CONTEXT[:2] + EXPERT
    ),
    "bert": _model("bert-tiny"),
    "roberta": _model("roberta-tiny"),
    "modernbert": _model("modernbert-tiny", "model.local_attention=6"),
    "t5": _model("t5-tiny", "model.gated=true"),
    "transformer": _model("transformer-tiny", SMOOTH, LOWER_STD, "data.pairs.train=[none.tsv]"),
    "opus-mt": _model("opus-mt", "data.pairs.train=[none.tsv]"),
    "lion": _model("llama-tiny", "model.kv_heads=4", *LION, rows=OPTIMIZER_ROWS),
    "ademamix": _model("llama-tiny", "model.kv_heads=4", *ADEMAMIX, rows=OPTIMIZER_ROWS),
    "schedule_free": _model("llama-tiny", "model.kv_heads=4", *SCHEDULE_FREE, rows=OPTIMIZER_ROWS),
    "muon": _model("llama-tiny", "model.kv_heads=4", MUON, rows=MUON_ROWS),
    "muon-heads": _model("llama-tiny", "model.kv_heads=4", MUON, "optimizer.muon_per_head=true", rows=SOME[:2]),
    "muon-mixtral": _model("mixtral-tiny", "model.kv_heads=4", ONE, MUON, rows=(SOME[1], *EXPERT[:4])),
    "qk-clip": _model("gpt-tiny", QK_CLIP, rows=SOME),
    "qk-clip-deepseek": _model("deepseek-tiny", "training.seed=1", ONE, MUON, QK_CLIP, rows=(SOME[1], *EXPERT[:2])),
    "muon-deepseek": _model("deepseek-tiny", "training.seed=1", ONE, MUON, rows=(SOME[1], *EXPERT[:2])),
}
