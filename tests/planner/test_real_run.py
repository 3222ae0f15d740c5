"""The plan is what the job runs: FLOPs and collectives of a step, traced on the meta device and counted in real runs on gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.layout import Layout
from pipeline.planner.engine_model import engine_model
from pipeline.planner.operations import AttentionCall, Collective, Product
from pipeline.planner.plan import hidden_states
from pipeline.planner.planned_buckets import planned_buckets
from pipeline.planner.state_memory import state_format_of
from pipeline.planner.trace import hidden_bytes, trace
from pipeline.rehearsal.analysis import ZERO
from tests.world import configured, trainer

#: (kind, axis, bytes) -> count
Events = Counter[tuple[str, str, int]]
SMALL = ("training.sequence_length=32", "training.micro_batch_size=1", "training.compile=off", "model.vocab_size=512")
#: Norms, losses and router statistics: a step sums a few numbers over all ranks.
SCALARS = 128
#: Settings and ranks of each run. Micro-batches: two a rank.
LAYOUTS = {
    "tensor, every family": [
        (2, *f"model={family}".split(), "model.layers=2", "parallel.tensor=2", "parallel.zero_stage=0", "training.global_batch_size=2")
        for family in (
            *("gpt-tiny", "gpt1-tiny", "bert-tiny", "roberta-tiny", "t5-tiny", "gemma3-tiny", "olmo2-tiny", "opt-tiny"),
            *(
                "transformer-tiny data.pairs.train=[unread.tsv]",
                "apertus-tiny",
                "mistral-tiny",
                "smollm3-tiny",
                "qwen2.5-tiny",
                "qwen3-tiny",
            ),
        )
    ],
    "tensor": [
        (2, f"model={family}", "model.layers=2", "parallel.tensor=2", "parallel.zero_stage=0", *words, "training.global_batch_size=2")
        for family, words in (
            ("llama-tiny", ("training.activation_checkpointing=full", "parallel.sequence_parallel=false")),
            ("bloom-tiny", ("training.activation_checkpointing=full",)),
            ("bloom-tiny", ("parallel.sequence_parallel=false",)),
        )
    ],
    "ZeRO": [
        (2, "model=llama-tiny", "model.layers=3", f"parallel.zero_stage={stage}", "training.global_batch_size=4", *more)
        for stage, more in ((0, ()), (1, ()), (2, ()), (3, ()), (2, ("precision.dtype=bf16", "precision.reduce_dtype=bf16")))
    ],
    "ZeRO in groups": [
        *(
            (
                4,
                "model=llama-tiny",
                "model.layers=2",
                f"parallel.zero_stage={stage}",
                "parallel.zero_group=2",
                "training.global_batch_size=8",
            )
            for stage in (1, 2, 3)
        ),
        (4, "model=llama-tiny", "model.layers=2", "parallel.context=2", "parallel.zero_group=2", "training.global_batch_size=4"),
        (
            *(4, "model=mixtral-tiny", "model.layers=2", "parallel.expert=2", "parallel.zero_stage=3", "parallel.zero_group=2"),
            "training.global_batch_size=8",
        ),
        (4, "model=mixtral-tiny", "model.layers=2", "parallel.expert=4", "parallel.zero_group=2", "training.global_batch_size=8"),
    ],
    "ZeRO with tensor": [
        (4, "model=bloom-tiny", "model.layers=2", "parallel.tensor=2", f"parallel.zero_stage={stage}", "training.global_batch_size=4")
        for stage in (1, 3)
    ],
    "pipeline": [
        (2, "model=gpt-tiny", "model.layers=2", "parallel.pipeline=2", "parallel.zero_stage=1", "training.global_batch_size=2"),
        (2, "model=t5-tiny", "model.layers=2", "parallel.pipeline=2", "parallel.zero_stage=1", "training.global_batch_size=2"),
        (4, "model=llama-tiny", "model.layers=2", "parallel.pipeline=2", "parallel.zero_stage=3", "training.global_batch_size=4"),
        (
            *(2, "model=llama-tiny", "model.layers=4", "parallel.pipeline=2", "parallel.schedule=interleaved"),
            *("parallel.stages_per_rank=2", "parallel.zero_stage=0", "training.global_batch_size=4"),
        ),
        (
            *(2, "model=gpt-tiny", "model.layers=4", "parallel.pipeline=2", "parallel.schedule=zbv"),
            *("parallel.zero_stage=0", "training.global_batch_size=4"),
        ),
    ],
    "context": [
        (2, "model=llama-tiny", "model.layers=2", "parallel.context=2", "parallel.zero_stage=1", "training.global_batch_size=2"),
        (
            *(4, "model=llama-tiny", "model.layers=2", "parallel.context=2", "parallel.tensor=2", "parallel.context_kind=ulysses"),
            *("parallel.zero_stage=0", "training.global_batch_size=1"),
        ),
        *(
            (
                *(2, "model=qwen3-next-tiny", "model.layers=2", "model.full_attention_interval=2", "parallel.context=2"),
                *(f"parallel.context_kind={kind}", "parallel.zero_stage=1", "training.global_batch_size=2"),
            )
            for kind in ("ring", "ulysses")
        ),
    ],
    "experts": [
        (2, "model=mixtral-tiny", "model.layers=2", "parallel.expert=2", "parallel.zero_stage=1", "training.global_batch_size=4"),
        (
            *(4, "model=mixtral-tiny", "model.layers=2", "parallel.expert=2", "parallel.tensor=2"),
            *("parallel.zero_stage=0", "training.global_batch_size=2"),
        ),
        (4, "model=deepseek-tiny", "model.layers=2", "parallel.expert=2", "parallel.zero_stage=3", "training.global_batch_size=8"),
        (
            *(4, "model=mixtral-tiny", "model.layers=2", "parallel.expert=2", "parallel.tensor=2", "parallel.expert_tensor=1"),
            *("parallel.zero_stage=1", "training.global_batch_size=2"),
        ),
    ],
}
BATCH = "training.global_batch_size=4"
TINY = {family: (f"model={family}", "model.layers=2") for family in ("llama-tiny", "gpt-tiny", "mixtral-tiny", "bert-tiny")}
LAYOUTS |= {
    "ZeRO with a pipeline": [
        (4, *TINY[family], "parallel.pipeline=2", f"parallel.zero_stage={stage}", "training.global_batch_size=4")
        for family, stage in (("llama-tiny", 1), ("llama-tiny", 2), ("gpt-tiny", 1), ("gpt-tiny", 2), ("gpt-tiny", 3))
    ]
    + [
        (4, *TINY["llama-tiny"], "model.layers=4", "parallel.pipeline=2", *words, "training.global_batch_size=8")
        for words in (
            ("parallel.schedule=interleaved", "parallel.zero_stage=2"),
            ("parallel.schedule=interleaved", "parallel.zero_stage=3"),
            ("parallel.schedule=zbv", "parallel.zero_stage=1"),
            ("parallel.schedule=zbv", "parallel.zero_stage=2"),
        )
    ],
    "two axes": [
        (4, *TINY["gpt-tiny"], "parallel.pipeline=2", "parallel.tensor=2", "parallel.zero_stage=1", "training.global_batch_size=2"),
        *(
            (4, *TINY["llama-tiny"], "parallel.context=2", axis, f"parallel.zero_stage={stage}", "training.global_batch_size=2")
            for axis in ("parallel.pipeline=2", "parallel.tensor=2")
            for stage in (1, 2, 3)
        ),
        *(
            (4, *TINY["mixtral-tiny"], "parallel.expert=2", "parallel.pipeline=2", f"parallel.zero_stage={stage}", BATCH)
            for stage in (1, 2, 3)
        ),
        (4, *TINY["mixtral-tiny"], "parallel.expert=2", "parallel.tensor=2", "parallel.zero_stage=3", "training.global_batch_size=4"),
        (4, *TINY["mixtral-tiny"], "parallel.expert=2", "parallel.context=2", "parallel.zero_stage=1", "training.global_batch_size=4"),
        (4, *TINY["mixtral-tiny"], "parallel.expert=2", "parallel.context=2", "parallel.zero_stage=3", "training.global_batch_size=4"),
    ],
    "fine-tuning": [
        (2, *TINY["llama-tiny"], "lora.rank=4", f"lora.quantize={quantize}", f"parallel.zero_stage={stage}", BATCH)
        for quantize, stage in (("none", 1), ("nf4", 1), ("nf4", 3))
    ]
    + [
        (2, *TINY["llama-tiny"], "lora.rank=4", "lora.modules_to_save=[embed.*]", *words, "training.global_batch_size=4")
        for words in (("parallel.tensor=2",), ("parallel.pipeline=2",))
    ]
    + [
        (2, *TINY["llama-tiny"], "model.layers=4", f"training.frozen=[{frozen}]", "parallel.zero_stage=2", "training.global_batch_size=4")
        for frozen in ("embed.*", "embed.*,blocks.0.*,blocks.1.*", "blocks.3.*,head.*")
    ]
    + [
        (2, *TINY["llama-tiny"], "lora.rank=4", "training.objective=dpo", *words, "training.global_batch_size=4")
        for words in (("parallel.zero_stage=1",), ("parallel.zero_stage=3",), ("parallel.tensor=2",), ("parallel.pipeline=2",))
    ]
    + [
        (
            *(2, *TINY["bert-tiny"], "training.objective=classification", "model.labels=[a,b,c]", "model.next_sentence=false"),
            *("model.tie_embeddings=false", *words, "training.global_batch_size=4"),
        )
        for words in (("parallel.zero_stage=1",), ("parallel.tensor=2",), ("lora.rank=4", "parallel.zero_stage=2"))
    ],
}
#: The default tier runs one of every five cases of a kind, and two of the families.
CASES = [
    pytest.param(kind, case, id=f"{kind}-{i}", marks=pytest.mark.long if i % (7 if kind == "tensor, every family" else 5) else ())
    for kind, cases in LAYOUTS.items()
    for i, case in enumerate(cases)
]


#: Operator of a collective -> kind, and which argument is the whole tensor.
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "_allgather_base_": ("all_gather", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
}


class Counted(TorchDispatchMode):
    """Counts the collectives of a real step by kind, axis and bytes, and the FLOPs of its matrix products."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.events: Events = Counter()
        self.flops = 0.0
        self._axes = axes

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator.name().partition("::")[2].partition(".")[0]
        if operator.namespace == "_c10d_functional" and name != "wait_tensor":
            group = next(a for a in reversed(args) if isinstance(a, str) and a in self._axes)
            kinds = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}
            self.add(kinds.get(name, name), group, max(args[0].nbytes, result.nbytes))
        elif operator.namespace == "c10d" and name in _C10D:
            group = next(
                dist.ProcessGroup.unbox(a).group_name for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a)
            )
            kind, argument = _C10D[name]
            tensors = args[argument] if isinstance(args[argument], list) else [args[argument]]
            self.add(kind, group, sum(tensor.nbytes for tensor in tensors))
        elif name in ("mm", "addmm"):  # not bmm: products of activations belong to attention
            first, second = args[-2:]
            self.flops += 2 * first.numel() * second.shape[-1]
        return result

    def add(self, kind: str, group: str, size: int) -> None:
        """Count a collective."""
        if size > SCALARS:
            self.events[kind, self._axes[group], size] += 1

    def batch(self, operations: list[Any]) -> Any:
        """Stand in for dist.batch_isend_irecv: a dispatch mode does not see into the operator of ring attention."""
        for operation in operations:
            if operation.op is dist.isend and self._axes[operation.group.group_name] == "context":
                self.add("send", operation.group.group_name, operation.tensor.nbytes)
        return _BATCH(operations)


_BATCH = dist.batch_isend_irecv


def step(*settings: str) -> tuple[Events, float]:
    """The collectives of this rank in a step, and the FLOPs of its matrix products."""
    config, job = trainer(*settings)
    mesh = job.mesh
    axes = {
        getattr(mesh, axis).group_name: "expert" if axis == "tensor_expert" else axis
        for axis in (*reversed(ZERO), "tensor_expert", "data", "dense", "expert", "context", "tensor", "pipeline")
        if getattr(mesh, axis) is not None and getattr(mesh, axis).size() > 1
    }
    if mesh.tied_embedding is not None:
        axes.setdefault(mesh.tied_embedding.group_name, "tied_embedding")
    sequences, length = config.training.global_batch_size // mesh.layout.batch_shards, config.training.sequence_length
    tokens = torch.randint(512, (sequences, length), generator=torch.Generator().manual_seed(dist.get_rank()))
    batch = {"targets": tokens.roll(-1, 1)}
    if hasattr(config.model, "encoder_blocks") or config.model.family == "t5":
        batch["decoder_tokens"] = tokens
    if getattr(config.model, "next_sentence", False):
        batch["next_sentence"] = torch.zeros(sequences, dtype=torch.int64)
    if config.objective == "dpo":
        batch["choices"] = torch.ones_like(tokens)
        batch["choices"][:, length // 2 :] = -1
    if config.objective == "classification":
        batch["targets"] = torch.full_like(tokens, -100)
        batch["targets"][:, 0] = 1
    counted = Counted(axes)
    with counted, mock.patch.object(dist, "batch_isend_irecv", counted.batch):
        job.train(tokens, batch)
    return counted.events, counted.flops


def planned(settings: tuple[str, ...], ranks: int) -> Iterator[tuple[Events, float]]:
    """The same for every pipeline rank, from the trace."""
    config = configured(*settings)
    layout, traced, zero_stage = Layout.of(config, ranks), trace(config), config.parallel.zero_stage
    engine = engine_model(state_format_of(config))
    names = {"data": "dense"} if layout.expert == 1 else {}
    if layout.data == 1 and layout.context > 1:  # these axes have the same ranks
        names["data"] = "context"
        if layout.expert == 1:
            names["dense"] = "context"
    elif layout.data == 1 and layout.expert > 1:
        names["dense"] = "expert"
    if layout.pipeline == 2:
        names["tied_embedding"] = "pipeline"
    if layout.zero_block is not None:
        names |= group_names(layout)
    for rank in range(layout.pipeline):
        events: Events = Counter()
        flops = 0.0
        buckets, sent = planned_buckets(traced, layout, layout.stages(rank), zero_stage), (hidden_bytes(config), hidden_states(config))
        for exchange in engine.step_exchanges(buckets, layout, rank, zero_stage, *sent, reference=traced.has_reference):
            c = exchange.collective
            events[c.kind, names.get(c.axis, c.axis), int(c.bytes)] += exchange.count
        for stage in layout.stages(rank):
            for operation in (o for part in traced.stage_parts(layout, stage) for o in (*part.operations, *part.reference)):
                if isinstance(operation, Collective):
                    events[operation.kind, operation.axis, int(operation.bytes)] += layout.micro_batches
                elif isinstance(operation, Product) and operation.batch == 1:
                    flops += layout.micro_batches * operation.flops
                elif isinstance(operation, AttentionCall) and operation.sent:
                    events["ring", "context", 0] += layout.micro_batches * int(operation.sent)
        yield Counter({event: count for event, count in events.items() if event[2] > SCALARS or event[0] == "ring"}), flops


def group_names(layout: Layout) -> dict[str, str]:
    """The groups of ZeRO -> the name of their ranks in `step`."""
    at, whole = layout.coordinates(0), replace(layout, zero_block=None)
    found = {
        "data_shards": layout.zero_members(at, experts=True)[0],
        "data_replicas": layout.zero_members(at, experts=True)[1],
        "dense_shards": layout.zero_members(at, experts=False)[0],
        "dense_replicas": layout.zero_members(at, experts=False)[1],
        "data": whole.zero_members(at, experts=True)[0],
        "dense": whole.zero_members(at, experts=False)[0],
        "expert": tuple(layout.rank(replace(at, expert=index)) for index in range(layout.expert)),
        "context": tuple(layout.rank(replace(at, context=index)) for index in range(layout.context)),
    }
    of = {ranks: name for name, ranks in found.items()}
    return {name: of[found[name]] for name in ZERO}


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_collectives_and_flops_of_a_step_are_those_of_a_real_run(worlds, kind, case):
    ranks, *settings = case
    if kind == "fine-tuning":
        settings = ["data.instructions.train=[unread.jsonl]", *settings]
    settings = (f"stage={'finetune' if kind == 'fine-tuning' else 'pretrain'}", *SMALL, "precision=fp32", *settings)
    real = worlds(ranks).run(step, *settings)
    layout = Layout.of(configured(*settings), ranks)
    plans = list(planned(settings, ranks))
    assert sum(flops for _, flops in real) == sum(flops for _, flops in plans) * ranks / layout.pipeline
    by_stage = [real[rank] for rank in range(ranks)]
    for pipeline_rank, (expected, _) in enumerate(plans):
        mine = [events for rank, (events, _) in enumerate(by_stage) if layout.coordinates(rank).pipeline == pipeline_rank]
        if layout.expert > 1:  # how many tokens go where depends on the router: only their sum over all ranks is known
            for routed in (("all_to_all", "expert"), ("all_gather", "tensor"), ("reduce_scatter", "tensor")):
                assert _total(mine, *routed) == _total([expected], *routed) * len(mine)
                mine, expected = [_without(events, *routed) for events in mine], _without(expected, *routed)
        if layout.context > 1:  # the trace counts the bytes of a ring attention, not its sends
            sent = _total(mine, "send", "context")
            assert sent == expected.pop(("ring", "context", 0), 0) * len(mine)
            mine = [_without(events, "send", "context") for events in mine]
        for events in mine:
            assert events == expected


def _total(ranks: list[Events], kind: str, axis: str) -> int:
    """Bytes of all collectives of a kind along an axis."""
    return sum(size * count for events in ranks for (k, a, size), count in events.items() if (k, a) == (kind, axis))


def _without(events: Events, kind: str, axis: str) -> Events:
    return Counter({event: count for event, count in events.items() if event[:2] != (kind, axis)})
