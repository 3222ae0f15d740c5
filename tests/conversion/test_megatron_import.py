"""stage=convert of checkpoints of Megatron-LM: written by megatron-core on two ranks, and split by hand from stock models."""

import argparse
import dataclasses
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from pipeline.common.errors import UserError
from pipeline.conversion import foreign_configs, megatron_export
from pipeline.conversion.export_files import ExportWriter
from pipeline.conversion.megatron_import import MegatronFolder
from pipeline.models import config_classes
from tests.conversion import foreign_folders
from tests.conversion.foreign_folders import (
    ARGUMENTS,
    LLAMA,
    Damage,
    by_group,
    edited,
    gpt,
    gpt_block,
    llama,
    of_rank,
    removed,
    samples,
    shortened,
    with_code,
)
from tests.conversion.test_deepspeed_import import assert_refused, imported, logits
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.conversion.test_megatron_export import MODELS


@pytest.fixture(scope="module")
def written(worlds, tmp_path_factory):
    """A folder with both formats, and the logits that megatron-core computes."""
    folder = tmp_path_factory.mktemp("megatron")
    return folder, worlds(2).run(foreign_folders.write_megatron, folder, 2)[0]


@pytest.mark.world
@pytest.mark.parametrize("kind", [pytest.param("classic", marks=pytest.mark.long), "torch_dist"])
def test_the_imported_model_has_the_logits_of_megatron_core(written, kind, tmp_path):
    folder, expected = written
    checkpoint = imported(folder / kind, tmp_path, "model=gpt-tiny")
    torch.testing.assert_close(logits(checkpoint), expected)  # Megatron-Core sums in another order


def llama_layer(state: dict[str, Tensor], block: int, rank: int, *, fused: bool) -> dict[str, Tensor]:
    """The tensors of a block on a rank.

    Args:
        fused: with the names of Transformer Engine, in which norms are part of the linear layer that follows them.
    """
    theirs = {name.split(f"layers.{block}.")[1]: value for name, value in state.items() if f"layers.{block}." in name}
    qkv = [of_rank(theirs[f"self_attn.{name}_proj.weight"], rank) for name in "qkv"]
    norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight") if fused else ()
    names = norms or ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    gate, up = (of_rank(theirs[f"mlp.{name}_proj.weight"], rank) for name in ("gate", "up"))
    return {
        names[0]: theirs["input_layernorm.weight"],
        names[1]: theirs["post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": by_group(*qkv, groups=1),
        "self_attention.linear_proj.weight": of_rank(theirs["self_attn.o_proj.weight"], rank, 1),
        "self_attention.linear_proj._extra_state": torch.zeros(3, dtype=torch.uint8),
        "mlp.linear_fc1.weight": torch.cat([gate, up]),
        "mlp.linear_fc2.weight": of_rank(theirs["mlp.down_proj.weight"], rank, 1),
    }


def write(folder: Path, states: dict[str, dict[str, Any]], version: float = 3.0, **arguments: Any) -> Path:
    """Write a folder of iteration 5: name of a rank -> its entries, `model` or those of virtual stages."""
    args = argparse.Namespace(**ARGUMENTS | arguments, exit_signal=signal.SIGTERM)
    for name, state in states.items():
        path = folder / "iter_0000005" / name / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        rng = [{"np_rng_state": np.random.default_rng(0).integers(0, 9, 3, dtype=np.uint32)}]
        torch.save({"args": args, "checkpoint_version": version, "iteration": 5, "rng_state": rng, **cloned(state)}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: cloned(value) if isinstance(value, dict) else value.clone() for name, value in state.items()}


def pipeline_parallel(folder: Path, *, virtual: int, tied: bool) -> tuple[Path, Tensor]:
    """Two tensor-parallel and two pipeline ranks, with one or two virtual stages each."""
    stock = llama(tie_word_embeddings=tied)
    state, per_stage = stock.state_dict(), 4 // (2 * virtual)
    ranks: dict[str, dict[str, Any]] = {}
    for tensor in range(2):
        for stage in range(2):
            chunks: list[dict[str, Tensor]] = []
            for chunk in range(virtual):
                blocks = range((chunk * 2 + stage) * per_stage, (chunk * 2 + stage + 1) * per_stage)
                tensors = {
                    f"decoder.layers.{number}.{name}": value
                    for number, block in enumerate(blocks)
                    for name, value in llama_layer(state, block, tensor, fused=virtual == 2).items()
                }
                if blocks[0] == 0:
                    tensors["embedding.word_embeddings.weight"] = of_rank(state["model.embed_tokens.weight"], tensor)
                if blocks[-1] == 3:
                    tensors["decoder.final_layernorm.weight"] = state["model.norm.weight"]
                    tensors["output_layer.weight"] = of_rank(state["lm_head.weight"], tensor)
                chunks.append(tensors)
            names = ["model"] if virtual == 1 else [f"model{number}" for number in range(virtual)]
            ranks[f"mp_rank_{tensor:02d}_{stage:03d}"] = dict(zip(names, chunks, strict=True))
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    with torch.no_grad():
        expected = stock(samples()).logits
    return write(folder, ranks, **sizes, untie_embeddings_and_output_weights=not tied), expected


@pytest.mark.parametrize(("virtual", "tied"), [(1, True), (2, False)])
def test_pipeline_stages(tmp_path, virtual, tied):
    """Layers are numbered over virtual stages and ranks; a tied head is saved by the last stage, too."""
    source, expected = pipeline_parallel(tmp_path / "source", virtual=virtual, tied=tied)
    checkpoint = imported(source, tmp_path / "run", "model=t5-small")
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-6, atol=1e-6)


def test_more_than_ten_virtual_stages(tmp_path):
    stages = {f"model{stage}": {"decoder.layers.0.weight": torch.tensor([stage])} for stage in range(12)}
    source = MegatronFolder(write(tmp_path, {"mp_rank_00": stages}) / "iter_0000005")
    assert [source.shards(f"decoder.layers.{layer}.weight")[0].item() for layer in range(12)] == list(range(12))


def test_a_tied_head_that_differs(tmp_path):
    source, _ = pipeline_parallel(tmp_path / "source", virtual=1, tied=True)
    edited(of_file("00_001"), lambda state: state["model"]["output_layer.weight"].add_(1))(source)
    rule = r"output_layer\.weight differs from embedding\.word_embeddings\.weight; in the model both are embed\.tokens\.weight"
    with pytest.raises(UserError, match=rule):
        imported(source, tmp_path / "run", "model=t5-small")


def test_experts(tmp_path):
    """Two expert-parallel ranks, each with two of four experts; the other weights are those of both."""
    torch.manual_seed(0)
    sizes = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
    stock = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    stock.save_pretrained(tmp_path / "stock")
    state = load_file(tmp_path / "stock" / "model.safetensors")  # with a tensor an expert
    ranks = {}
    for rank in range(2):
        tensors = {
            "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
            "decoder.final_layernorm.weight": state["model.norm.weight"],
            "output_layer.weight": state["lm_head.weight"],
        }
        for block in range(4):
            theirs = {name.split(f"layers.{block}.")[1]: value for name, value in state.items() if f"layers.{block}." in name}
            qkv = [theirs[f"self_attn.{name}_proj.weight"] for name in "qkv"]
            layer = {
                "input_layernorm.weight": theirs["input_layernorm.weight"],
                "pre_mlp_layernorm.weight": theirs["post_attention_layernorm.weight"],
                "self_attention.linear_qkv.weight": by_group(*qkv, groups=2),
                "self_attention.linear_proj.weight": theirs["self_attn.o_proj.weight"],
                "mlp.router.weight": theirs["block_sparse_moe.gate.weight"],
            }
            for number in range(2):
                gate, down, up = (theirs[f"block_sparse_moe.experts.{2 * rank + number}.w{part}.weight"] for part in (1, 2, 3))
                grouped = {f"mlp.experts.linear_fc1.weight{number}": torch.cat([gate, up]), f"mlp.experts.linear_fc2.weight{number}": down}
                single = {
                    f"mlp.experts.local_experts.{number}.linear_fc{part}.weight": value
                    for part, value in zip((1, 2), grouped.values(), strict=True)
                }
                layer |= grouped if block % 2 else single
            tensors |= {f"decoder.layers.{block}.{name}": value for name, value in layer.items()}
        ranks[f"mp_rank_00_{rank:03d}"] = {"model": tensors}
    arguments = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "expert_model_parallel_size": 2, "rotary_base": 1000000}
    checkpoint = imported(write(tmp_path / "source", ranks, **arguments), tmp_path / "run", "model=t5-small")
    with torch.no_grad():
        torch.testing.assert_close(logits(checkpoint), stock(samples()).logits, rtol=1e-5, atol=1e-5)


def test_gpt_2_with_the_names_of_earlier_releases(tmp_path):
    """Nested, with `attention.dense` and `mlp.dense_h_to_4h`."""
    stock = gpt()
    state = stock.state_dict()
    ranks = {}
    for rank in range(2):
        layers: dict[str, Tensor] = {f"final_layernorm.{leaf}": state[f"transformer.ln_f.{leaf}"] for leaf in ("weight", "bias")}
        for block in range(4):
            layers |= {f"layers.{block}.{name}": value for name, value in gpt_block(state, block, rank).items()}
        words = {"weight": of_rank(state["transformer.wte.weight"], rank)}
        embedding = {"word_embeddings": words, "position_embeddings": {"weight": state["transformer.wpe.weight"]}}
        ranks[f"mp_rank_{rank:02d}"] = {"model": {"language_model": {"embedding": embedding, "encoder": layers}}}
    source = write(
        tmp_path / "source",
        ranks,
        normalization="LayerNorm",
        swiglu=False,
        add_bias_linear=True,
        position_embedding_type="learned_absolute",
        ffn_hidden_size=128,
        num_query_groups=None,
        group_query_attention=False,
        tensor_model_parallel_size=2,
        untie_embeddings_and_output_weights=False,
    )
    checkpoint = imported(source, tmp_path / "run", "model=t5-small")
    with torch.no_grad():
        expected = stock.double()(samples()).logits
    torch.testing.assert_close(logits(checkpoint, torch.float64), expected, rtol=1e-6, atol=1e-6)
    edited(of_file("01"), lambda state: state.update(checkpoint_version=1.0))(source)
    with pytest.raises(UserError, match="has checkpoint_version 1, in which the rows of queries, keys and values have another order"):
        imported(source, tmp_path / "other", "model=t5-small")


def of_file(rank: str) -> str:
    return f"iter_0000005/mp_rank_{rank}/model_optim_rng.pt"


OTHER_SIZES = r"decoder\.layers\.0\.mlp\.linear_fc1\.weight \(mp_rank_00_000/model_optim_rng\.pt\) is \[48, 32\] \+ \[48, 32\]"
OTHER_SIZES += r", and the model has blocks\.0\.mlp\.gate\.weight \[64, 32\] there, not \[48, 32\]"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "half": (removed("*/mp_rank_01_001"), r"mp_rank_01_001: is missing"),
    "truncated": (shortened(of_file("01_001"), 1000), r"mp_rank_01_001/model_optim_rng\.pt: is not readable"),
    "other tag": (
        lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("6"),
        r"names '6', and there is no iter_0000006; there are iter_0000005",
    ),
    "mixed steps": (
        edited(of_file("01_000"), lambda state: state.update(iteration=4)),
        r"mixes files of several steps: .*mp_rank_00_000/model_optim_rng\.pt of 5.*mp_rank_01_000/model_optim_rng\.pt of 4",
    ),
    "code": (with_code(of_file("00_000"), "more"), r"model_optim_rng\.pt: contains .*pathlib\.Path: unpickling it may run code"),
    "other sizes": (edited(of_file("*"), lambda state: setattr(state["args"], "ffn_hidden_size", 64)), OTHER_SIZES),
    "no family": (
        edited(of_file("*"), lambda state: vars(state["args"]).update(rotary_percent=0.5, multi_latent_attention=True)),
        r"(?s)multi_latent_attention=True: is not supported by the families here.*rotary_percent=0\.5: is not supported",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_by_name(tmp_path, damage):
    source, _ = pipeline_parallel(tmp_path / "source", virtual=1, tied=False)
    assert_refused(*DAMAGES[damage], source, "model=t5-small")


#: Those of other tensors or settings than the stock Llama of test_pipeline_stages.
OTHERS = ("qwen2.5", "qwen3", "llama3", "mixtral")


@pytest.mark.parametrize("name", [name if name in OTHERS else pytest.param(name, marks=pytest.mark.long) for name in MODELS])
def test_an_export_is_imported_again(name, tmp_path, tokenizer):
    """stage.format=megatron, whose layers and experts are stacked; bit for bit, with the same configuration."""
    ours = random_model(MODELS[name])
    weights = InMemory(ours)
    export = {"dtype": torch.float32, "shard_bytes": 60_000, "tokenizer": str(tokenizer), "writer": ExportWriter()}
    megatron_export.write(tmp_path, weights, MODELS[name], **export)
    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    source = tmp_path / "release" if name == "mixtral" else tmp_path  # the folder of the step, or that above
    checkpoint = imported(source, tmp_path / "run", "model=t5-small")
    assert (tmp_path / "run" / "imported" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    config = config_classes.from_dict(checkpoint.config["model"])
    known = {"init_std": MODELS[name].init_std, "capacity_factor": None} if name == "mixtral" else {"init_std": MODELS[name].init_std}
    assert dataclasses.replace(config, **known) == dataclasses.replace(MODELS[name], **known)
    assert all(torch.equal(checkpoint.tensor(weight), weights.tensor(weight)) for weight in weights.names())


class NoTensors:
    """A source without tensors."""

    path = Path()

    def names(self) -> list[str]:
        return []


GPT_2 = {"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, "position_embedding_type": "learned_absolute"}
GPT_2 |= {"num_query_groups": None, "group_query_attention": False}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2}


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"add_bias_linear": True}, "add_bias_linear=True"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type=learned_absolute"),
        ({"normalization": "LayerNorm"}, "normalization=LayerNorm"),
        ({"hidden_size": None}, "hidden_size=None: is missing in the checkpoint"),
        ({**GPT_2, "use_rotary_position_embeddings": True}, "position_embedding_type=rope"),
        ({**GPT_2, "bias_gelu_fusion": False}, "bias_gelu_fusion=False: computes the exact GELU"),
        ({**EXPERTS, "moe_router_score_function": "sigmoid"}, "moe_router_score_function=sigmoid"),
        ({**EXPERTS, "moe_layer_freq": [0, 1, 1, 1]}, r"moe_layer_freq=\[0, 1, 1, 1\]"),
        ({**EXPERTS, "moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size=8"),
    ],
)
def test_arguments_that_no_family_has(arguments, refused):
    with pytest.raises(UserError, match=refused):
        foreign_configs.megatron({**ARGUMENTS, **arguments}, NoTensors())


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, "rope_scaling", "llama3"),
        ({"rotary_seq_len_interpolation_factor": 4}, "rope_factor", 4.0),
        ({"kv_channels": 16}, "head_dim", 16),
        ({"group_query_attention": False}, "kv_heads", 4),
        ({"add_qkv_bias": True}, "qkv_bias", True),
        ({**EXPERTS, "moe_ffn_hidden_size": 24, "moe_layer_freq": [1, 1, 1, 1]}, "ffn_hidden", 24),
        ({**GPT_2, "untie_embeddings_and_output_weights": False}, "tie_embeddings", True),
    ],
)
def test_arguments(arguments, field, value):
    assert getattr(foreign_configs.megatron({**ARGUMENTS, **arguments}, NoTensors()), field) == value
