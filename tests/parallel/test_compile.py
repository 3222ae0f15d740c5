"""Compiled blocks: no graph break, no block left out, and no compilation after the second step, in what is combined with compilation."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline.common.errors import UserError
from pipeline.config.layout import Layout
from pipeline.config.rules import check
from pipeline.layers import gpu
from pipeline.parallel.early_gathers import EarlyGathers
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import async_tensor_enabled
from tests.world import causal, configured, share, tiny, trainer

STEPS, BLOCKS, MICRO_BATCHES = 3, 2, 2
SIZES = (f"model.layers={BLOCKS}", "model.ffn_hidden=48", "model.kv_heads=2", "training.micro_batch_size=4", "training.compile=on")
MODEL = tiny("model=llama-tiny", "training.sequence_length=16", "parallel.zero_stage=0", *SIZES)


def compiled_run(overrides: tuple[str, ...], model: tuple[str, ...] = MODEL) -> tuple[list[float], list[int], list[int], int, list[str]]:
    """Train some steps; returns the losses, graphs so far and calls of compiled graphs after each step, graph breaks and their reasons."""
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    calls = 0

    def counting(graph, inputs, **options):
        """Trace forward and backward as for any backend, but do not generate code."""
        run = aot_eager(graph, inputs, **options)

        def counted(*arguments):
            nonlocal calls
            calls += 1
            return run(*arguments)

        return counted

    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=counting)):
        config, mine = trainer(*model, *overrides)
    losses, graphs, called = [], [], []
    for step in range(STEPS):
        shape = (config.training.global_batch_size, config.training.sequence_length + 1)
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
        documents = (torch.rand(shape[0], shape[1] - 1, generator=generator) < 0.2).int().cumsum(1, dtype=torch.int32)
        batch = (tokens, documents) if config.training.document_mask else (tokens,)
        losses.append(float(mine.train(*causal(*share(mine, *batch)))[0]))
        graphs.append(counters["stats"]["unique_graphs"])
        called.append(calls)
    return losses, graphs, called, sum(counters["graph_break"].values()), list(counters["graph_break"])


def fusible_collectives() -> list[tuple[int, int]]:
    """For each compiled graph: collectives of the sequence, and those that inductor's pass finds beside a matrix product."""
    import torch._dynamo
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import micro_pipeline_tp as passes
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    found = []

    def count(graph, inputs):  # noqa: ARG001 - a compiler of AOTAutograd
        view_to_reshape(graph)
        targets = (torch.ops._c10d_functional.all_gather_into_tensor.default, torch.ops._c10d_functional.reduce_scatter_tensor.default)
        beside = [match.res_node for match in passes.find_all_gather_patterns(graph.graph) if passes._find_consumer_matmuls(match.res_node)]
        beside += [
            match.wait_tensor_node
            for match in passes.find_reduce_scatter_patterns(graph.graph)
            if passes._find_producer_matmul(match.input_node) is not None
        ]
        found.append((sum(node.target in targets for node in graph.graph.nodes), len(beside)))
        return graph.forward

    torch._dynamo.reset()
    compile_module = nn.Module.compile
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, decompositions=select_decomp_table)
    with mock.patch.object(nn.Module, "compile", lambda module: compile_module(module, backend=backend)):
        config, mine = trainer(*MODEL, "parallel.tensor=2", f"training.global_batch_size={4 * MICRO_BATCHES}")
    tokens = torch.zeros(config.training.global_batch_size, config.training.sequence_length + 1, dtype=torch.int64)
    mine.train(*causal(*share(mine, tokens)))
    return found


@pytest.mark.long
def test_collectives_can_be_fused_with_matrix_products(worlds):
    """Attention and feed-forward gather their input and reduce their output; so do their gradients.

    The inputs that are gathered again for the gradients of the weights are the second operand of a product, which the pass does not fuse.
    """
    assert set(worlds(2).run(fusible_collectives)[0]) == {(4, 4), (6, 4)}


def gatherings(micro_batch: str, *, early: bool) -> tuple[list[tuple[int, int]], int, list[Tensor]]:
    """For each compiled graph its gatherings, and those that run beside a product; copies of gathered sequences; the trained weights."""
    import torch._dynamo
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    found, copies = [], 0

    def count(graph, inputs):  # noqa: ARG001 - a compiler of AOTAutograd
        nonlocal copies
        view_to_reshape(graph)
        if early:
            EarlyGathers()(graph.graph)
            graph.recompile()
        nodes = list(graph.graph.nodes)
        starts = [node for node in nodes if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default]
        beside = [nodes[nodes.index(start) : nodes.index(next(iter(start.users)))] for start in starts]
        found.append((len(starts), sum(any(node.target is torch.ops.aten.mm.default for node in between) for between in beside)))
        joined = [node.args[0] for node in nodes if node.target is torch.ops.aten.cat.default]
        assert not any(piece.op == "placeholder" for pieces in joined for piece in pieces), "weights are one tensor already"
        copies += sum("getitem" in str(pieces[0]) for pieces in joined)
        return graph.forward

    torch._dynamo.reset()
    compile_module = nn.Module.compile
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, decompositions=select_decomp_table)
    with mock.patch.object(nn.Module, "compile", lambda module: compile_module(module, backend=backend)):
        config, mine = trainer(*MODEL, "parallel.tensor=2", "parallel.zero_stage=1", "training.global_batch_size=4", micro_batch)
    shape = (config.training.global_batch_size, config.training.sequence_length + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    mine.train(*causal(*share(mine, tokens)))
    return found, copies, [parameter.detach().clone() for parameter in mine.model.parameters()]


def early_gatherings(micro_batch: str) -> None:
    """Compare the graphs and the trained weights with and without the pass."""
    plain, copies, weights = gatherings(micro_batch, early=False)
    assert set(plain) == {(2, 0), (4, 0)}
    assert copies > 0
    moved, copies, same = gatherings(micro_batch, early=True)
    assert set(moved) == {(2, 0), (4, 2)}
    assert isinstance(torch._inductor.config.post_grad_custom_post_pass, EarlyGathers), "the blocks of a job are compiled with the pass"
    assert (copies == 0) == (micro_batch == "training.micro_batch_size=1")
    assert all(map(torch.equal, weights, same))


@pytest.mark.long
@pytest.mark.parametrize(
    "micro_batch", ["training.micro_batch_size=1", pytest.param("training.micro_batch_size=2", marks=pytest.mark.long)]
)
def test_inputs_for_the_gradients_of_weights_are_gathered_beside_products(worlds, micro_batch):
    """Of the four gatherings of a block's backward pass, two are of gradients, without which nothing can be computed."""
    worlds(2).run(early_gatherings, micro_batch)


@pytest.mark.parametrize("traced", ["real", "symbolic"])
def test_a_copy_is_removed_from_a_graph_for_one_shape_and_stays_in_one_for_several(traced):
    def halves(x: Tensor) -> Tensor:
        return torch.cat(torch.ops.aten.split.Tensor(x, x.shape[0] // 2), 1)

    graph = make_fx(halves, tracing_mode=traced)(torch.zeros(2, 3, 4))
    EarlyGathers()(graph.graph)
    graph.recompile()
    copies = sum(node.target is torch.ops.aten.cat.default for node in graph.graph.nodes)
    assert copies == (traced == "symbolic")
    for shape in [(2, 3, 4)] if traced == "real" else [(2, 3, 4), (4, 5, 2)]:
        x = torch.randn(shape)
        assert torch.equal(graph(x), halves(x))


COMBINATIONS = [
    ("parallel.zero_stage=3", "training.activation_checkpointing=selective", "training.activation_budget=0.05"),
    ("precision=fp8", "precision.fp8_exclude_layers=0", "model.hidden=64", "model.ffn_hidden=64", "parallel.tensor=2"),
    ("training.activation_checkpointing=selective", "parallel.tensor=2", "training.document_mask=true"),
    ("training.activation_checkpointing=full", "parallel.context=2", "training.document_mask=true"),
    ("parallel.zero_stage=1",),
    ("training.activation_checkpointing=offload",),
    ("training.activation_checkpointing=selective", "parallel.context=2"),
    ("training.activation_checkpointing=full", "parallel.context=2", "parallel.context_kind=ulysses"),
    ("training.activation_checkpointing=none", "parallel.tensor=2"),
]


@pytest.mark.parametrize(
    "overrides", [COMBINATIONS[0], *(pytest.param(words, marks=pytest.mark.long) for words in COMBINATIONS[1:])], ids=" ".join
)
def test_blocks_are_compiled_whole(worlds, overrides):
    replicas = 1 if any("tensor=2" in word or "context=2" in word for word in overrides) else 2
    sizes = (f"training.global_batch_size={4 * MICRO_BATCHES * replicas}",)
    for losses, graphs, calls, breaks, reasons in worlds(2).run(compiled_run, (*overrides, *sizes)):
        assert all(loss == loss and loss < 10 for loss in losses)
        assert breaks == 0, reasons
        assert graphs[0] >= 1
        assert graphs[1] == graphs[-1], "compiled again after the second step"
        per_step = {later - earlier for earlier, later in zip([0, *calls], calls, strict=False)}
        assert per_step == {BLOCKS * MICRO_BATCHES}, "every block of every micro-batch runs one compiled graph"


MIXTRAL = tiny("model=mixtral-tiny", "training.sequence_length=16", "parallel.zero_stage=0", *SIZES)
DEEPSEEK = tiny(
    *("model=deepseek-tiny", "model.q_lora_rank=12", "model.kv_lora_rank=12", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4"),
    *("model.v_head_dim=8", "model.expert_ffn_hidden=12", "model.layers=2", "training.micro_batch_size=4", "training.compile=on"),
)


PADDED = ("parallel.expert=2", "parallel.expert_padding=true", "model.capacity_factor=1.5", "parallel.zero_stage=0")
PARTS = ("parallel.expert_parts=2", "parallel.tensor=2")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "model", "layout"),
    [
        (2, MIXTRAL, ("training.activation_checkpointing=selective", PARTS[0])),
        pytest.param(4, MIXTRAL, ("training.activation_checkpointing=selective", *PARTS), marks=pytest.mark.long),
        pytest.param(2, MIXTRAL, ("training.activation_checkpointing=none",), marks=pytest.mark.long),
        pytest.param(
            2,
            DEEPSEEK,
            ("training.activation_checkpointing=selective", "model.dense_layers=0", "model.mtp_depth=0"),
            marks=pytest.mark.long,
        ),
        pytest.param(4, DEEPSEEK, ("training.activation_checkpointing=full", *PARTS), marks=pytest.mark.long),
    ],
    ids=["mixtral selective, parts", "mixtral selective, parts, tensor", "mixtral", "deepseek selective", "deepseek full, parts, tensor"],
)
def test_blocks_with_padded_experts_are_compiled_whole(worlds, ranks, model, layout):
    """Also those that are recomputed in parts: dispatch and record of the load break no graph. The losses are those without compilation."""
    layout = (*PADDED, *layout, "training.global_batch_size=16")
    losses, graphs, calls, breaks, reasons = worlds(ranks).run(compiled_run, layout, model)[0]
    eager = worlds(ranks).run(compiled_run, (*layout, "training.compile=off"), model)[0][0]
    assert losses == pytest.approx(eager, rel=1e-5)
    assert breaks == 0, reasons
    assert graphs[1] == graphs[-1], "compiled again after the second step"
    per_step = {later - earlier for earlier, later in zip([0, *calls], calls, strict=False)}
    assert per_step == {BLOCKS * MICRO_BATCHES}, "every block of every micro-batch runs one compiled graph"


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "checkpointing"),
    [(MIXTRAL, "none"), pytest.param(DEEPSEEK, "full", marks=pytest.mark.long)],
    ids=["mixtral", "deepseek full"],
)
def test_a_moe_layer_is_compiled_up_to_the_dispatch(worlds, model, checkpointing):
    """Routing, permutation and combination are compiled; dispatch, experts and the record of the load are not."""
    layout = ("parallel.expert=2", "training.global_batch_size=16", f"training.activation_checkpointing={checkpointing}")
    losses, graphs, calls, _, reasons = worlds(2).run(compiled_run, layout, model)[0]
    eager = worlds(2).run(compiled_run, (*layout, "training.compile=off"), model)[0][0]
    assert losses == pytest.approx(eager, rel=1e-5)
    assert graphs[1] == graphs[-1], "compiled again after the second step"
    assert calls[0] > BLOCKS * MICRO_BATCHES, "several graphs a block"
    assert all("function marked as skipped" in reason for reason in reasons), reasons


@pytest.mark.long
def test_weights_have_no_gradient_of_another_dtype_when_blocks_are_compiled(worlds):
    """Parts of the blocks are compiled in the second micro-batch, after gradients have been accumulated in fp32."""
    settings = ("precision=bf16", "parallel.zero_stage=1", "training.global_batch_size=8", "training.activation_checkpointing=none")
    ((losses, graphs, _, _, reasons),) = worlds(1).run(compiled_run, (*settings, "model.dense_layers=0", "model.mtp_depth=0"), DEEPSEEK)
    assert all(0 < loss < 10 for loss in losses)
    assert graphs[-1] > 0
    assert not any("dtype mismatch" in reason for reason in reasons), reasons


@pytest.mark.long
def test_compilation_of_all_axes_together(worlds):
    """Tensor x context x recomputation, and the losses of the same run without compilation."""
    layout = ("parallel.tensor=2", "parallel.context=2", "training.activation_checkpointing=selective", "training.document_mask=true")
    layout += (f"training.global_batch_size={4 * MICRO_BATCHES}",)
    losses, graphs, _, breaks, reasons = worlds(4).run(compiled_run, layout)[0]
    eager, none, *_ = worlds(4).run(compiled_run, (*layout, "training.compile=off"))[0]
    assert breaks == 0, reasons
    assert graphs[-1] >= 1
    assert none[-1] == 0
    assert losses == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize("override", ["parallel.tensor=1", "parallel.sequence_parallel=false", "training.compile=off"])
def test_fusion_requires_sharded_sequences_and_compiled_blocks(override):
    config = configured("stage=pretrain", "model=llama-tiny", "parallel.async_tensor=on", "parallel.tensor=2", override)
    with pytest.raises(UserError, match=r"parallel\.async_tensor=on: requires"):
        check.check(config, 2)


@pytest.mark.parametrize(
    "node_ranks, visible, tensor, setting, fused",
    [(8, 8, 8, "auto", True), (4, 8, 8, "auto", False), (4, 8, 8, "on", True), (8, 8, 2, "off", False), (8, 1, 4, "auto", False)],
)
def test_fusion_by_default_requires_that_the_tensor_ranks_are_on_one_node(node_ranks, visible, tensor, setting, fused, monkeypatch):
    """And see its GPUs: symmetric memory would take those of ranks that see one each, which have number 0, for one."""
    monkeypatch.setattr(gpu, "of", lambda _: gpu.Gpu("NVIDIA H100", (9, 0)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    config = configured("stage=pretrain", "model=llama-tiny", f"parallel.tensor={tensor}", f"parallel.async_tensor={setting}")
    layout = Layout(tensor=tensor, pipeline=1, data=2)
    mesh = Mesh(layout, 0, torch.device("cuda"), *7 * [None], node_ranks=node_ranks)
    assert async_tensor_enabled(config.training, config.parallel, mesh) == fused
