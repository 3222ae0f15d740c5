"""Rules of the group parallel: the layout splits the model, the sequences and the ranks evenly."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config import warmup, zero_group
from pipeline.config.layout import Layout, may_compile, stages_per_rank
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import RunConfig

#: Numbers of key and value heads, of all layers or of some.
KV_HEADS = ("kv_heads", "global_kv_heads")


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules between the layout, the model and the sequences."""
    yield from tensor(config)
    yield from expert(config)
    yield from _context(config)
    yield from pipeline(config)
    yield from _offload(config)
    yield from _zero_group(config)


def tensor(config: RunConfig) -> Iterator[Violation]:
    """Tensor parallelism splits heads, feed-forward layers and the sequence into equal pieces."""
    tensor, model = config.parallel.tensor, config.model
    for name in ("heads", *KV_HEADS, "ffn_hidden"):
        size = getattr(model, name, None) or 0
        if size % tensor:
            rule = f"must divide model.{name}={size}"
            names = ", ".join(f"model.{name}" for name in ("heads", *KV_HEADS, "ffn_hidden") if getattr(model, name, None))
            yield Violation("parallel.tensor", tensor, rule, f"choose a common divisor of {names}")
    if (heads := getattr(model, "linear_key_heads", 0)) % tensor:
        yield Violation("parallel.tensor", tensor, f"must divide model.linear_key_heads={heads}", "choose a divisor of it")
    for name in ("mamba_heads", "mamba_groups", "shared_ffn_hidden"):
        if (size := getattr(model, name, 0)) % tensor:
            yield Violation("parallel.tensor", tensor, f"must divide model.{name}={size}", "choose a divisor of it")
    if tensor > model.vocab_size:
        yield Violation("parallel.tensor", tensor, f"must not exceed model.vocab_size={model.vocab_size}", "use fewer tensor ranks")
    if config.parallel.async_tensor == "on" and (
        tensor == 1 or not config.parallel.sequence_parallel or not may_compile(config.training, config.parallel)
    ):
        rule = "requires parallel.tensor above 1, parallel.sequence_parallel=true, and compiled blocks (not zbv)"
        yield Violation("parallel.async_tensor", "on", rule, "set parallel.async_tensor=auto")
    lengths = warmup.keyed_values(config.training.sequence_warmup, "sequence_length", config.training.sequence_length)
    for key, length in lengths if config.parallel.sequence_parallel else ():
        if length % tensor:
            rule = f"must be divisible by parallel.tensor={tensor} with parallel.sequence_parallel=true"
            yield Violation(key, length, rule, f"choose a multiple of {tensor}, or set parallel.sequence_parallel=false")


def expert(config: RunConfig) -> Iterator[Violation]:
    """Expert parallelism distributes complete experts over ranks; tensor parallelism shards each expert, unless they are folded."""
    ranks, experts = config.parallel.expert, getattr(config.model, "experts", 0)
    if ranks > 1 and not experts:
        rule = f"requires an MoE model; model.family={config.model.family} has no experts"
        yield Violation("parallel.expert", ranks, rule, "set parallel.expert=1, or choose an MoE model (model=mixtral-8x7b)")
    elif experts % ranks:
        yield Violation("parallel.expert", ranks, f"must divide model.experts={experts}", "choose a divisor of model.experts")
    tensor, width = config.parallel.tensor, getattr(config.model, "expert_ffn_hidden", 0)
    if ranks > 1 and config.model.hidden % tensor and not config.parallel.folded:
        rule = f"must divide model.hidden={config.model.hidden} with parallel.expert={ranks}"
        yield Violation("parallel.tensor", tensor, rule, "choose a divisor of model.hidden")
    if width % tensor:
        rule = f"must divide model.expert_ffn_hidden={width}"
        yield Violation("parallel.tensor", tensor, rule, "choose a divisor of model.expert_ffn_hidden")
    yield from _expert_tensor(config)
    yield from _expert_padding(config)


def _expert_tensor(config: RunConfig) -> Iterator[Violation]:
    """Experts are sliced over all tensor ranks, or whole: tensor x expert ranks hold them, and each tensor rank has its own tokens."""
    parallel, experts = config.parallel, getattr(config.model, "experts", 0)
    key, value, tensor, ranks = "parallel.expert_tensor", parallel.expert_tensor, parallel.tensor, parallel.expert
    if value is not None and not experts:
        yield Violation(key, value, f"requires an MoE model; model.family={config.model.family} has no experts", "remove it")
        return
    if value not in (None, 1, tensor):
        rule, fix = f"is neither 1 nor parallel.tensor={tensor}", "set it to 1 for whole experts, or remove it: tensor ranks slice them"
        yield Violation(key, value, rule, fix)
    if not parallel.folded:
        return
    if experts % ranks == 0 and experts % (tensor * ranks):
        rule = f"requires that parallel.tensor={tensor} x parallel.expert={ranks} divides model.experts={experts}"
        yield Violation(key, value, rule, "use fewer expert or tensor ranks, or remove it")
    if not parallel.sequence_parallel:
        rule = "requires parallel.sequence_parallel=true: each tensor rank sends its own tokens to the experts"
        yield Violation(key, value, rule, "set that, or remove parallel.expert_tensor")


def _expert_padding(config: RunConfig) -> Iterator[Violation]:
    """Only experts are padded; parts of tokens have equal sizes, and travel."""
    parallel = config.parallel
    if parallel.expert_padding and not getattr(config.model, "experts", 0):
        rule = f"requires an MoE model; model.family={config.model.family} has no experts"
        yield Violation("parallel.expert_padding", True, rule, "set it to false, or choose an MoE model (model=mixtral-8x7b)")
    if parallel.expert_parts > 1 and not parallel.expert_padding:
        rule = "requires parallel.expert_padding=true: the parts have equal sizes"
        yield Violation("parallel.expert_parts", parallel.expert_parts, rule, "set it to 1, or parallel.expert_padding=true")


def _context(config: RunConfig) -> Iterator[Violation]:
    """Context parallelism splits sequences into equal chunks, two per rank; ulysses also splits the heads."""
    parallel, model = config.parallel, config.model
    context = parallel.context
    if context == 1:
        return
    if depth := getattr(model, "mtp_depth", 0):  # labels of depth k are the next-token labels shifted by k, across chunk boundaries
        rule = f"splits sequences, and model.mtp_depth={depth} requires full sequences"
        yield Violation("parallel.context", context, rule, "set parallel.context=1 or model.mtp_depth=0")
    divisor = 2 * context * (parallel.tensor if parallel.sequence_parallel else 1)
    for key, length in warmup.keyed_values(config.training.sequence_warmup, "sequence_length", config.training.sequence_length):
        if length % divisor:
            tensor = f" x parallel.tensor={parallel.tensor}" if divisor != 2 * context else ""
            yield Violation(key, length, f"must be divisible by 2 x parallel.context={context}{tensor}", f"choose a multiple of {divisor}")
    if parallel.context_kind == "ulysses":
        for name in ("heads", *KV_HEADS):
            heads = getattr(model, name, None) or 0
            if heads % (parallel.tensor * context):
                rule = f"must divide model.{name}={heads} / parallel.tensor={parallel.tensor} (ulysses splits the heads)"
                yield Violation("parallel.context", context, rule, "use fewer context ranks, or set parallel.context_kind=ring")


def pipeline(config: RunConfig) -> Iterator[Violation]:
    """Each pipeline stage holds at least one layer, and each schedule has its own rules."""
    parallel = config.parallel
    yield from _layers_per_stage(config)
    if parallel.pipeline == 1:
        return
    if read := getattr(config.model, "beside_hidden_states", ""):
        rule = f"has stages that exchange hidden states, and blocks of model.family={config.model.family} also read {read}"
        yield Violation("parallel.pipeline", parallel.pipeline, rule, "set parallel.pipeline=1")
    per_rank, stages = stages_per_rank(config.parallel), parallel.pipeline * stages_per_rank(config.parallel)
    if config.model.layers < stages:
        rule = f"must be at least {stages}, the number of pipeline stages ({parallel.pipeline} ranks x {per_rank} per rank)"
        yield Violation("model.layers", config.model.layers, rule, "use fewer pipeline ranks or stages per rank, or more layers")
    key = "parallel.stages_per_rank"
    if parallel.schedule == "1f1b" and per_rank != 1:
        yield Violation(key, per_rank, "1f1b has exactly 1 stage per rank", "leave it unset, or set parallel.schedule=interleaved")
    if parallel.schedule == "interleaved" and per_rank < 2:
        yield Violation(
            key, per_rank, "interleaved requires at least 2 stages per rank", "set it to 2 or more, or set parallel.schedule=1f1b"
        )
    if parallel.schedule == "zbv":
        yield from _zbv(config, per_rank)


def _layers_per_stage(config: RunConfig) -> Iterator[Violation]:
    """The numbers of layers that are set for each stage are those of the model."""
    given, stages = config.parallel.layers_per_stage, config.parallel.pipeline * stages_per_rank(config.parallel)
    if not given:
        return
    key, shown = "parallel.layers_per_stage", "[" + ",".join(map(str, given)) + "]"
    if len(given) != stages:
        yield Violation(key, shown, f"has {len(given)} stages; the pipeline has {stages}", f"list {stages} numbers, or leave it empty")
    elif sum(given) != config.model.layers:
        rule = f"has {sum(given)} layers; the model has model.layers={config.model.layers}"
        yield Violation(key, shown, rule, f"choose numbers with the sum {config.model.layers}, or set parallel.balance=flops instead")


def _zbv(config: RunConfig, per_rank: int) -> Iterator[Violation]:
    """The zero-bubble V schedule computes the gradients of inputs and of weights in separate passes."""
    if per_rank != 2:
        yield Violation("parallel.stages_per_rank", per_rank, "zbv has exactly 2 stages per rank", "leave it unset")
    elif config.model.layers >= 2 * config.parallel.pipeline and not any(_layers_per_stage(config)):
        yield from _zbv_weights(config)
    recompute = config.training.activation_checkpointing
    if recompute != "none":
        rule = "zbv splits the backward pass and would recompute the activations twice"
        yield Violation("training.activation_checkpointing", recompute, rule, "set it to none, or choose another schedule")
    if config.training.compile == "on":
        yield Violation(
            "training.compile", "on", "zbv splits the backward pass, which compiled blocks do not support", "set it to auto or off"
        )


def _zbv_weights(config: RunConfig) -> Iterator[Violation]:
    """No weight of a stage is used at two depths: PyTorch's pass for the weights would run the blocks between them twice.

    The first stage, whose input has no gradient, has one backward pass. A family with such weights has a method that names them.
    """
    if (reused_weights := getattr(config.model, "reused_weights", None)) is None:
        return  # the blocks of a stage, whose FLOPs are counted with torch, need not be known
    layout = Layout.of(config, config.parallel.model_ranks)
    for stage in range(1, layout.stage_count):
        blocks = layout.layers(stage, config.model.layers)
        if reused := reused_weights(blocks, last=stage == layout.stage_count - 1):
            rule = f"splits the backward pass of a stage, and stage {stage} of {layout.stage_count} shares {reused}"
            yield Violation("parallel.schedule", "zbv", rule, "choose 1f1b or interleaved, or more pipeline ranks with fewer blocks each")
            return


def _offload(config: RunConfig) -> Iterator[Violation]:
    """Optimizer state in host memory: partitions of it, which an optimizer of the CPU updates."""
    if config.parallel.offload == "none":
        return
    if config.parallel.zero_stage == 0:
        rule = "keeps the rank's partition of the optimizer state in host memory, and ZeRO 0 has no partitions"
        yield Violation("parallel.offload", config.parallel.offload, rule, "set parallel.zero_stage to 1, 2 or 3")
    if not OPTIMIZERS[config.optimizer.name].offloads:
        offloaded = [name for name, kind in OPTIMIZERS.items() if kind.offloads]
        rule = f"requires an optimizer that the CPU steps, which optimizer.name={config.optimizer.name} is not"
        yield Violation("parallel.offload", config.parallel.offload, rule, f"set optimizer.name to {' or '.join(offloaded)}, or remove it")


def _zero_group(config: RunConfig) -> Iterator[Violation]:
    """Groups of ZeRO are the job, nodes, or have two ranks at least."""
    parallel, value = config.parallel, config.parallel.zero_group
    if not _is_group(value):
        rule = f"is neither {zero_group.JOB} nor {zero_group.NODE} nor a number of ranks from 2 on"
        yield Violation(_GROUP, value, rule, f"set it to one of these; {zero_group.JOB} shards over all data ranks")
    elif parallel.zero_stage == 0 and value != zero_group.JOB:
        yield Violation(_GROUP, value, "has no effect with parallel.zero_stage=0", "remove it, or set parallel.zero_stage to 1, 2 or 3")


_GROUP = "parallel.zero_group"


def _is_group(value: str) -> bool:
    return value in (zero_group.JOB, zero_group.NODE) or (value.isdecimal() and int(value) > 1)


def zero_groups(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """The data ranks are whole groups of ZeRO."""
    parallel, value, tasks = config.parallel, config.parallel.zero_group, config.cluster.tasks_per_node
    if not _is_group(value) or value == zero_group.JOB or world_size % parallel.model_ranks:  # these are refused with their own rules
        return
    data = world_size // parallel.model_ranks
    dense, size = data * parallel.expert * parallel.context, zero_group.group_ranks(parallel, tasks, world_size)
    if size == dense or (size is not None and size > 1 and zero_group.block(size, parallel, data)):
        return
    fix = f"set it to {' or '.join([zero_group.JOB, *map(str, zero_group.legal(parallel, data))])}"
    axes = f"of {dense} data ranks (data {data} x expert {parallel.expert} x context {parallel.context})"
    nodes = f"nodes of cluster.tasks_per_node={tasks} ranks"
    if value != zero_group.NODE:
        rule = f"is no size of groups {axes} that divide these axes"
    elif size is None:
        rule = f"requires {nodes} that hold whole tensor groups (parallel.tensor={parallel.tensor}) and parts of one pipeline stage"
    elif size == 1:
        rule = f"shards over the data ranks of a node, and {nodes} have one each"
        fix = f"set cluster.tasks_per_node to the ranks of a node, or {fix}"
    else:
        rule = f"shards over the {size} data ranks of a node, which is no size of groups {axes} that divide these axes"
    yield Violation(_GROUP, value, rule, fix)


def ranks(parallel: ParallelConfig, world_size: int) -> Iterator[Violation]:
    """The ranks are a multiple of those that hold the model."""
    if world_size % parallel.model_ranks:
        axes = ("tensor", "context", "expert", "pipeline")
        rule = "must be divisible by " + " x ".join(
            f"parallel.{axis}={getattr(parallel, axis)}" for axis in axes if getattr(parallel, axis) > 1 or axis in ("tensor", "pipeline")
        )
        fix = f"set the number of ranks to a multiple of {parallel.model_ranks}, or reduce the parallel sizes"
        yield Violation("world size", world_size, rule, fix)
