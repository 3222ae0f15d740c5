"""checkpoint.initialize_from a smaller model: the larger one begins with its function, with the same weights in every layout."""

import dataclasses
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.certification.reference import initialize
from pipeline.checkpoint import growth, native, save
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.grown_weights import GrownWeights
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.reader import Checkpoint, WantedRun
from pipeline.common.errors import UserError
from pipeline.models import registry
from pipeline.parallel.pieces import Piece
from pipeline.training import resume
from tests.helpers import one_in
from tests.training.one_rank import lines, newest, run
from tests.world import configured, tiny, trainer, unsharded
from tools.audit.small_models import configuration, randomize

MOE = {"head_width": 16, "kv_heads": 2, "tie_embeddings": True, "rope_theta": 1e6, "norm_eps": 1e-6}
QWEN = {**MOE, "query_key_norm": True}
MIX = {"rope_theta": 1e4}
MUP = {"parametrization": "mup", "mup_base_width": 48}
SOME = {"gpt_neox": {"partial_rotary_factor": 0.5}, "granite": {"logits_scaling": 1.0}, "mistral": {"window": 9}}
#: Source family and fields, family and fields of the larger model.
CASES = {
    "experts": ("llama", {}, "mixtral", MIX),
    "experts of mistral": ("mistral", {"window": 9}, "mixtral", {**MIX, "window": 9}),
    "experts of qwen 3": ("llama", QWEN, "qwen3_moe", {**MOE, "expert_ffn_hidden": 96, "experts": 4, "top_k": 3}),
    "experts in every second block": ("llama", QWEN, "qwen3_moe", {**MOE, "expert_ffn_hidden": 96, "expert_interval": 2}),
    "fine-grained experts": ("llama", QWEN, "qwen3_moe", {**MOE, "expert_ffn_hidden": 24, "experts": 16, "top_k": 8}),
    "wider experts": ("llama", {}, "mixtral", {**MIX, "ffn_hidden": 112, "experts": 5}),
    "all at once": ("llama", QWEN, "qwen3_moe", {**MOE, "expert_ffn_hidden": 48, "experts": 4, "top_k": 2, "layers": 5}),
    "wider experts of experts": ("mixtral", {}, "mixtral", {"ffn_hidden": 100, "layers": 3}),
    "divided experts": ("olmoe", {"experts": 4, "top_k": 2}, "olmoe", {"experts": 12, "top_k": 6, "ffn_hidden": 32}),
    "divided and normalized": ("mixtral", {}, "mixtral", {"experts": 16, "top_k": 4, "ffn_hidden": 48}),
    "blocks of qwen3_moe": ("qwen3_moe", {**MOE, "experts": 4, "top_k": 2}, "qwen3_moe", {**MOE, "experts": 4, "top_k": 2, "layers": 3}),
    **{
        f"blocks and width of {family}": (
            family,
            fields,
            family,
            {**fields, "layers": 7, **({} if family == "bloom" else {"ffn_hidden": 130})},
        )
        for family in growth.PRE_NORM
        if family not in ("mixtral", "olmoe", "qwen3_moe")
        for fields in [SOME.get(family, {})]
    },
}


def configs(case: str) -> tuple[Any, Any]:
    source, fields, family, more = CASES[case]
    return configuration(source, fields), configuration(family, more)


def weights_of(model: Any, seed: int = 0) -> torch.nn.Module:
    """A model whose weights, biases and norms are all random."""
    built = registry.build(model)
    initialize(built, model, seed)
    return randomize(built)


def write(folder: Path, model: Any, settings: dict[str, Any] | None = None) -> Checkpoint:
    """The checkpoint of a model with random weights, without a run."""
    recorded = {"model": dataclasses.asdict(model), "training": {}, "tokenizer": {}, "data": {}, **(settings or {})}
    weights = dict(weights_of(model).named_parameters())
    fragments = [Fragment(Piece(name, tuple(w.shape)), 0, {"weight": w.detach().view(-1)}) for name, w in weights.items()]
    folder.mkdir()
    return Checkpoint(save.save_full(folder, Index(TrainState(), recorded, layout={}, versions={}), fragments, 10**9))


def config_of(model: Any, *settings: str) -> Any:
    return dataclasses.replace(configured("stage=pretrain", "model=llama-tiny", *settings), model=model)


def growth_of(checkpoint: Checkpoint, model: Any, *settings: str) -> Any:
    return growth.of(config_of(model, *settings), checkpoint.path, checkpoint.config)


def grown(checkpoint: Checkpoint, model: Any, *settings: str) -> Any:
    """The larger model, with all weights NaN before they are read."""
    built = registry.build(model)
    config = config_of(model, *settings)
    for weight in built.parameters():
        weight.data.fill_(torch.nan)
    made = growth_of(checkpoint, model, *settings)
    assert made is not None
    full = [
        WantedRun(name, tuple(w.shape), tuple((0, size) for size in w.shape), 0, {"weight": w.data.view(-1)})
        for name, w in built.named_parameters()
    ]
    GrownWeights(MergedWeights(checkpoint), made, config).read(full)
    return built.eval()


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(300, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens)


#: Cases of a family that grows in the same way as the others.
OF_FAMILIES = [case for case in CASES if case.startswith("blocks and width of ")]


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in OF_FAMILIES), *one_in(3, OF_FAMILIES)])
def test_the_larger_model_computes_the_same_logits(case, tmp_path):
    smaller, model = configs(case)
    checkpoint = write(tmp_path / "run", smaller)
    expected = logits(weights_of(smaller))
    found = logits(grown(checkpoint, model))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    changed = logits(weights_of(model))
    assert (changed - expected).abs().max() > 0.1


@pytest.mark.parametrize("place, expected", [("interleaved", [0, 1, 1, 2, 3, 3]), ("last", [0, 1, 2, 3, 3, 3])])
def test_where_new_blocks_stand(place, expected, tmp_path):
    smaller, model = configuration("llama", {"layers": 4}), configuration("llama", {"layers": 6})
    checkpoint = write(tmp_path / "run", smaller)
    made = growth_of(checkpoint, model, f"checkpoint.new_blocks={place}")
    assert [block for block, _ in made.blocks] == expected
    assert [is_new for _, is_new in made.blocks] == [number and expected[number - 1] == block for number, block in enumerate(expected)]
    model = grown(checkpoint, model, f"checkpoint.new_blocks={place}")
    assert all((block.mlp.down.weight == 0).all() == is_new for block, (_, is_new) in zip(model.blocks.values(), made.blocks, strict=True))
    torch.testing.assert_close(logits(model), logits(weights_of(smaller)), atol=5e-6, rtol=0)


def test_reinitialized_dims_and_noise(tmp_path):
    """The paper's three steps: the dims of an expert, the moments of their weights, and normal weights with these moments."""
    smaller = configuration("llama", {"hidden": 256, "ffn_hidden": 512, "layers": 1})
    model = configuration("mixtral", {**MIX, "hidden": 256, "ffn_hidden": 512, "layers": 1})
    checkpoint = write(tmp_path / "run", smaller)
    mlp = weights_of(smaller).blocks["0"].mlp
    experts = grown(checkpoint, model, "checkpoint.expert_reinitialized=0.25").blocks["0"].mlp.experts
    chosen = []
    for expert in range(8):
        new = experts.gate[expert] != mlp.gate.weight
        dims = new.any(dim=1)
        assert dims.sum() == 128
        chosen.append(dims)
        for stack, weight in ((experts.gate, mlp.gate.weight), (experts.up, mlp.up.weight), (experts.down, mlp.down.weight)):
            drawn, was = (value[dims] if weight is not mlp.down.weight else value[:, dims] for value in (stack[expert], weight))
            kept = [value[~dims] if weight is not mlp.down.weight else value[:, ~dims] for value in (stack[expert], weight)]
            assert torch.equal(*kept)
            assert (drawn == was).float().mean() < 1e-3
            assert drawn.std().item() == pytest.approx(was.std().item(), rel=0.02)
            assert drawn.mean().item() == pytest.approx(was.mean().item(), abs=4 * was.std().item() / 181)
    assert len({tuple(dims.tolist()) for dims in chosen}) == 8
    noisy = grown(checkpoint, model, "checkpoint.expert_noise=0.1").blocks["0"].mlp.experts
    noise = (noisy.up - mlp.up.weight) / mlp.up.weight.std()
    assert noise.std().item() == pytest.approx(0.1, rel=0.01)
    assert torch.corrcoef(noise.flatten(1)).fill_diagonal_(0).abs().max() < 0.02


def test_new_dims_of_experts_are_those_of_a_run_from_scratch(tmp_path):
    smaller, model = configs("wider experts")
    experts = grown(write(tmp_path / "run", smaller), model).blocks["0"].mlp.experts
    fresh = registry.build(model)
    initialize(fresh, model, 0)
    for name in ("gate", "up"):
        added, drawn = (getattr(each, name)[:, 96:] for each in (experts, fresh.blocks["0"].mlp.experts))
        assert torch.equal(added, drawn)
        assert len(torch.unique(added[:, 0, 0])) == 5, "each expert has its own"


REFUSED = [
    ("llama", {}, "llama", {"hidden": 64}, "model.hidden=64: PATH was made with 48|only layers, feed-forwards and experts grow"),
    ("llama", {}, "llama", {"layers": 1}, "model.layers=1: PATH has more: 2"),
    ("llama", {}, "llama", {"ffn_hidden": 64}, "model.ffn_hidden=64: PATH has more: 96"),
    ("llama", {}, "llama", {"vocab_size": 301, "layers": 3}, "model.vocab_size=301: PATH was made with 300"),
    ("llama", {}, "gpt", {}, "model.family=gpt: PATH was made with llama; what becomes experts is llama -> mixtral"),
    ("llama", {}, "olmoe", {}, "model.family=olmoe: PATH was made with llama"),
    ("olmo2", {}, "olmo2", {"layers": 3}, "model.layers=3: PATH was made with 2, and the families that grow are apertus"),
    ("llama", {}, "mixtral", {}, "model.rope_theta=1000000.0: PATH was made with 10000.0"),
    ("llama", {}, "mixtral", {**MIX, "window": 9}, "model.window=9: PATH was made with None"),
    ("llama", {"query_key_norm": True}, "mixtral", MIX, "model.query_key_norm=False: PATH was made with True"),
    ("llama", {}, "qwen3_moe", MIX, "model.query_key_norm=True: PATH was made with False|makes heads of width 128, and PATH has 12"),
    ("llama", {"head_width": 16}, "mixtral", MIX, "model.heads=4: makes heads of width 12, and PATH has 16"),
    (
        *("llama", {}, "mixtral", {**MIX, "ffn_hidden": 48, "top_k": 1}),
        "model.ffn_hidden=48: makes each expert 1/2 of the feed-forward of PATH|top_k=1 are not multiples of 2|or model.ffn_hidden=96",
    ),
    ("llama", {}, "mixtral", {**MIX, "ffn_hidden": 50}, "model.ffn_hidden=50: is neither a part of the width 96 of PATH"),
    ("mixtral", {}, "mixtral", {"experts": 16}, "model.experts=16: with model.top_k=2 and experts of width 96 does not keep the function"),
    (
        "mixtral",
        {},
        "mixtral",
        {"experts": 16, "top_k": 4},
        "model.experts=16: copies each expert of PATH 2 times|expert_reinitialized=0.5",
    ),
    ("mixtral", {}, "mixtral", {"top_k": 3}, "model.experts=8: with model.top_k=3 and experts"),
    ("llama", {"no_rope_layer_interval": 2}, "llama", {"no_rope_layer_interval": 2, "layers": 4}, "by model.no_rope_layer_interval=2 what"),
    (
        "gpt",
        {"banded_window": 8},
        "gpt",
        {"banded_window": 8, "layers": 4},
        "by model.banded_window=8 what a block computes depends on its",
    ),
    ("llama", MUP, "llama", {**MUP, "layers": 3}, "model.layers=3: PATH was made with 2, and muP has no rule"),
    (
        "llama",
        QWEN,
        "qwen3_moe",
        {**MOE, "expert_ffn_hidden": 96, "norm_topk_prob": False},
        "norm_topk_prob=False: scales the feed-forwards",
    ),
]


@pytest.mark.parametrize("source, fields, family, more, said", REFUSED)
def test_what_is_refused(source, fields, family, more, said, tmp_path):
    checkpoint = write(tmp_path / "run", configuration(source, fields))
    with pytest.raises(UserError) as raised:
        growth_of(checkpoint, configuration(family, more))
    for text in said.replace("PATH", str(checkpoint.path)).split("|"):
        assert text in str(raised.value)


@pytest.mark.parametrize(
    "settings, said",
    [
        (("checkpoint.expert_noise=0.1",), "checkpoint.expert_noise=0.1: has no effect: the model has as many experts as"),
        (("checkpoint.expert_reinitialized=1",), "checkpoint.expert_reinitialized=1.0: has no effect: the model has as many experts"),
        (("lora.rank=2",), "lora.rank=2: adapts weights of a checkpoint, and those of a model that is larger"),
    ],
)
def test_settings_without_effect(settings, said, tmp_path):
    checkpoint = write(tmp_path / "run", configuration("llama", {}))
    with pytest.raises(UserError, match=re.escape(said)):
        growth_of(checkpoint, configuration("llama", {"layers": 3}), *settings)
    with pytest.raises(UserError, match=r"checkpoint.new_blocks=last: has no effect: the model has as many blocks as"):
        growth_of(checkpoint, configuration("llama", {"ffn_hidden": 112}), "checkpoint.new_blocks=last")


def start(source: str, *words: str) -> dict[str, torch.Tensor]:
    """The weights that a run begins with on the ranks of a layout. Collective."""
    config, mine = trainer(*words, f"checkpoint.initialize_from={source}", "tokenizer.path=none")
    resume.begin(config, mine, None, None)
    return unsharded(mine)


LARGER = (
    *("model=qwen3-moe-tiny", "model.layers=4", "model.kv_heads=4", "model.head_width=8", "model.expert_ffn_hidden=48", "model.experts=8"),
    *("model.top_k=2", "model.rope_theta=10000", "model.norm_eps=1e-5", "model.tie_embeddings=false", "model.ffn_hidden=96"),
)
DRAWN = ("checkpoint.expert_noise=0.05", "checkpoint.expert_reinitialized=0.5")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("zero_stage=1", marks=pytest.mark.long),
        "tensor=2 pipeline=2 zero_stage=1",
        "expert=2 zero_stage=3",
        pytest.param("tensor=2 expert=2 expert_tensor=1", marks=pytest.mark.long),
        pytest.param("zero_stage=2 expert=4", marks=pytest.mark.long),
        pytest.param("zero_stage=3 tensor=2", marks=pytest.mark.long),
    ],
)
def test_every_layout_begins_with_the_same_weights(layout, world, tmp_path):
    words = tiny(*LARGER, *DRAWN, *(f"parallel.{word}" for word in layout.split()))
    smaller = configured(
        *tiny("model=llama-tiny", "model.kv_heads=4", "model.query_key_norm=true", "model.layers=3", "model.ffn_hidden=96")
    )
    checkpoint = write(tmp_path / "run", smaller.model)
    expected = grown(checkpoint, configured(*words).model, *DRAWN).named_parameters()
    found = world.run(start, str(checkpoint.path), *words)[0]
    for name, weight in expected:
        assert torch.equal(found[name], weight), name


def test_a_run_that_grows(tokens, tmp_path, caplog):
    """From the command line: the first loss is that of the smaller model, and what was done is recorded; it is continued as any run."""
    data, sizes = f"data.tokens={tokens}", ("model=llama-tiny", "model.layers=2", "model.kv_heads=2", "model.rope_theta=1e6")
    run("pretrain", tmp_path / "dense", data, *sizes, "training.steps=4", "optimizer.lr=0.02")
    larger = (
        "model=mixtral-tiny",
        "model.layers=3",
        "model.kv_heads=2",
        "model.experts=4",
        "training.balance_loss=0",
        "model.ffn_hidden=40",
    )
    begin = (data, f"checkpoint.initialize_from={tmp_path}/dense", "training.seed=5")
    run("pretrain", tmp_path / "same", *begin, *sizes, "training.steps=1")
    with caplog.at_level(logging.INFO, "pipeline"):
        run("pretrain", tmp_path / "moe", *begin, *larger, "training.steps=2")
    assert lines(tmp_path / "moe")[1]["loss"] == pytest.approx(lines(tmp_path / "same")[1]["loss"], abs=2e-6)
    text = "model.layers 2 -> 3, model.ffn_hidden 32 -> 40, model.experts none -> 4, model.top_k none -> 2, new blocks interleaved"
    assert f"(step 4), grown to a larger model: {text}, expert_noise 0, expert_reinitialized 0" in caplog.text
    parent = newest(tmp_path / "moe").parent
    assert parent["how"] == "initialize_from"
    assert parent["growth"].startswith(text)
    run("pretrain", tmp_path / "moe", *begin, *larger, "training.steps=3")
    assert newest(tmp_path / "moe").parent == parent
    with pytest.raises(UserError, match=r"model.hidden=32: .*/dense/checkpoints/step-00000004 was made with 16"):
        run("pretrain", tmp_path / "no", *begin, *larger, "model.hidden=32", "training.steps=2")
    assert not native.complete(tmp_path / "no")
    with pytest.raises(UserError, match=r"checkpoint.new_blocks=last: has no effect with checkpoint.initialize_from=None"):
        run("pretrain", tmp_path / "no", data, *larger, "checkpoint.new_blocks=last", "training.steps=2")


@pytest.mark.parametrize("family", one_in(2, ["qwen3", "llama"]))
def test_an_imported_model_grows_and_is_exported(family, tokens, tokenizer, tmp_path):
    """The stock classes of both models compute the same logits; the smaller one's config.json has a list with an entry for each block."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    content = AutoConfig.for_model(family, num_attention_heads=2, num_key_value_heads=2, head_dim=16, rope_theta=1e4, **sizes)
    stock = randomize(AutoModelForCausalLM.from_config(content))
    stock.save_pretrained(tmp_path / "stock")
    shutil.copytree(tokenizer, tmp_path / "stock", dirs_exist_ok=True)
    run("convert", tmp_path / "base", f"stage.input={tmp_path}/stock")
    larger = {
        "qwen3": (
            "model=qwen3-moe-tiny",
            "model.head_width=16",
            "model.tie_embeddings=false",
            "model.ffn_hidden=48",
            "model.expert_ffn_hidden=24",
            "model.top_k=4",
        ),
        "llama": ("model=mixtral-tiny", "model.ffn_hidden=64"),
    }[family]
    same = ("model.hidden=32", "model.kv_heads=2", "model.max_positions=64", "model.norm_eps=1e-6", "model.rope_theta=10000.0")
    begin = (f"checkpoint.initialize_from={tmp_path}/base", f"tokenizer.path={tokenizer}", f"data.tokens={tokens}", "optimizer.lr=1e-12")
    run("pretrain", tmp_path / "moe", *begin, *larger, *same, "model.layers=3", "model.experts=8", "training.steps=1")
    run("convert", tmp_path / "moe", f"tokenizer.path={tokenizer}")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "moe" / "hf")
    assert type(exported).__name__ == {"qwen3": "Qwen3MoeForCausalLM", "llama": "MixtralForCausalLM"}[family]
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, stock(ids).logits, atol=1e-5, rtol=1e-5)
