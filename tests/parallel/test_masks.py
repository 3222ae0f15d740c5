"""What blocks derive from a mask is computed once for a micro-batch, also where blocks are compiled and recomputed: executed operators."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers import one_in
from tests.world import causal, configured, share_of, tiny, trainer

STEPS, MICRO_BATCHES = 2, 2
SIZES = ("model.layers=4", "model.ffn_hidden=48", "training.micro_batch_size=4", "training.sequence_length=16", "training.compile=on")
SETTINGS = (*SIZES, "parallel.zero_stage=0", f"training.global_batch_size={4 * MICRO_BATCHES}")
LLAMA = tiny("model=llama-tiny", "model.kv_heads=2", *SETTINGS, "model.layers=2")
DOCUMENTS = (*LLAMA, "training.document_mask=true", "parallel.context=2")
WINDOWS = tiny("model=mistral-tiny", "model.kv_heads=2", "model.window=5", *SETTINGS)
#: Two blocks, one of them with linear attention.
LINEAR = tiny(
    *(
        "model=qwen3-next-tiny",
        "model.kv_heads=2",
        *SETTINGS,
        "model.full_attention_interval=2",
        "model.layers=2",
        "model.dense_blocks=[0,1]",
    ),
    *("training.document_mask=true", "parallel.context=2"),
)
T5 = tiny("model=t5-tiny", "model.head_width=8", *SETTINGS, "model.layers=4")
#: The operator of a gathering, as the profiler names it; nothing else of these layouts is gathered.
GATHERING = "_c10d_functional::all_gather_into_tensor"


def batch_of(config: Any, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A global batch: packed documents for decoders, padded sources for encoder-decoders."""
    shape, generator = (config.training.global_batch_size, config.training.sequence_length + 1), torch.Generator().manual_seed(step)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    if hasattr(config.model, "encoder_blocks") or config.model.objective == "encoder_decoder":
        lengths = torch.randint(4, shape[1] - 1, (shape[0], 1), generator=generator)
        documents = torch.where(torch.arange(shape[1] - 1) < lengths, 0, -1).int()
        return tokens[:, 1:], {"targets": tokens[:, 1:], "decoder_tokens": tokens[:, :-1], "documents": documents}
    documents = (torch.rand(tokens[:, 1:].shape, generator=generator) < 0.2).int().cumsum(1, dtype=torch.int32)
    return causal(tokens, documents if config.training.document_mask else None)


def computations(overrides: tuple[str, ...]) -> tuple[int, int, int, list[float]]:
    """Masks of (queries, keys) and gatherings of documents in a step, graphs after two steps, and the losses."""
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=aot_eager)):
        config, mine = trainer(*overrides)
        losses: list[float] = []
        for step in range(STEPS):
            local = share_of(mine, *batch_of(config, step))
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
                losses.append(float(mine.train(*local)[0]))
    events = profile.events()
    masks = sum(event.name == "aten::sub" and subtracts_positions(event.input_shapes) for event in events)
    return masks, sum(event.name == GATHERING for event in events), counters["stats"]["unique_graphs"], losses


def subtracts_positions(shapes: list[list[int]]) -> bool:
    """Whether these operands are the positions of queries and keys, (batch or 1, 1, queries, 1) and (batch or 1, 1, 1, keys)."""
    return [len(shape) for shape in shapes[:2]] == [4, 4] and shapes[0][1::2] == [1, 1] and shapes[1][1:3] == [1, 1]


#: Kind -> settings, gatherings of a micro-batch, and in each pass. Linear attention has the ring's, and in each pass of each of its layers
#: inputs of convolutions and maps of states.
CONTEXT = {"ring": (DOCUMENTS, 1, 0), "ulysses": ((*DOCUMENTS, "parallel.context_kind=ulysses"), 1, 0), "linear": (LINEAR, 2, 2)}
CONTEXT["alone"] = (*LLAMA, "training.document_mask=true"), 0, 0  # on one rank
CASES = [
    ("linear", "none", "off"),
    ("ring", "selective", "on"),
    ("ulysses", "none", "on"),
    ("ring", "none", "on"),
    ("alone", "selective", "on"),
    ("linear", "none", "on"),
]
CASES += [(kind, "full", "on") for kind in ("ring", "ulysses", "linear")]


@pytest.mark.parametrize("kind, recompute, compiled", [*one_in(4, CASES[:8]), pytest.param(*CASES[8], marks=pytest.mark.long)])
def test_ranks_gather_documents_and_compute_their_mask_once_for_a_micro_batch(worlds, kind, recompute, compiled):
    overrides, once, in_each_pass = CONTEXT[kind]
    expected = MICRO_BATCHES * (once + in_each_pass * (2 if recompute == "full" else 1))
    overrides += (f"training.activation_checkpointing={recompute}", f"training.compile={compiled}")
    for masks, gatherings, graphs, losses in worlds(1 if kind == "alone" else 2).run(computations, overrides):
        assert gatherings == expected
        assert masks == MICRO_BATCHES or kind in ("ring", "linear"), "the ring computes those of its parts"
        assert graphs == 1 or kind != "alone"
        assert all(0 < loss < 10 for loss in losses)


@pytest.mark.long
@pytest.mark.parametrize("sequence", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_every_pipeline_stage_computes_the_mask_of_a_window_once_for_a_micro_batch(worlds, sequence):
    """Stages after the first one do not see tokens; with sequence parallelism their input is a slice along the sequence."""
    ranks = worlds(4).run(computations, (*WINDOWS, "parallel.pipeline=2", "parallel.tensor=2", f"parallel.sequence_parallel={sequence}"))
    assert [masks for masks, *_ in ranks] == [MICRO_BATCHES] * 4
    assert all(graphs == 1 for _, _, graphs, _ in ranks)


@pytest.mark.long
@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.long), "selective"])
def test_an_encoder_decoder_computes_the_masks_of_encoder_and_cross_attention_once_for_a_micro_batch(worlds, recompute):
    ((masks, _, _, losses),) = worlds(1).run(computations, (*T5, f"training.activation_checkpointing={recompute}"))
    assert masks == 2 * MICRO_BATCHES
    assert all(0 < loss < 10 for loss in losses)


def test_flex_attention_of_an_encoder_decoder_searches_for_masked_blocks_once_for_each_of_its_masks(monkeypatch):
    """Three masks: of the encoder, of the decoder, and of cross-attention."""
    from torch._dynamo.backends.debugging import eager

    from pipeline.layers import flex
    from pipeline.layers.attention import plain
    from pipeline.models import registry
    from pipeline.parallel.parallelize import attention_layers

    torch._dynamo.reset()
    config = configured(*T5)
    model = registry.build(config.model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    made, compute = [], flex._block_mask
    tokens, batch = batch_of(config, 0)
    results = {}
    for core in (plain, flex.flex):
        for layer in attention_layers(model):
            layer.core = core
        if core is flex.flex:
            monkeypatch.setattr(flex, "_block_mask", lambda *arguments: made.append(1) or compute(*arguments))
            for block in model.blocks.values():
                block.compile(backend=eager, fullgraph=True)
        with torch.no_grad():
            results[core] = model(tokens, **batch)
    torch.testing.assert_close(results[flex.flex], results[plain], rtol=1e-4, atol=1e-5)
    assert len(made) == 3
