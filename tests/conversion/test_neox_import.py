"""stage=convert of checkpoints of GPT-NeoX: a file a layer and rank, or one a rank, split by hand from stock models."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from pipeline.common.errors import UserError
from tests.conversion.foreign_folders import by_group, gpt, gpt_block, llama, of_rank, removed, samples
from tests.conversion.test_deepspeed_import import assert_refused, imported, logits

RANKS = 2
SIZES = {"num-layers": 4, "hidden-size": 32, "num-attention-heads": 4, "max-position-embeddings": 32, "model-parallel-size": RANKS}
SETTINGS = SIZES | {
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "pos-emb": "rotary",
    "rotary_pct": 1,
    "no-weight-tying": True,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "gpt_j_residual": False,
}
GPT_SETTINGS = SIZES | {"activation": "gelu", "bias-gelu-fusion": True, "pos-emb": "learned"}


def llama_layers(kind: str, *, kv_heads: int = 2) -> tuple[list[dict[int, dict[str, Tensor]]], Tensor]:
    """Return rank -> layer -> tensors, and the logits of the stock model.

    Args:
        kind: "legacy": before 2024, with w1 to w3; "current": with linear1 and linear2, and grouped queries one after the other.
    """
    stock = llama(num_key_value_heads=kv_heads)
    state, ranks = stock.state_dict(), []
    for rank in range(RANKS):
        layers: dict[int, dict[str, Tensor]] = {0: {"word_embeddings.weight": of_rank(state["model.embed_tokens.weight"], rank)}}
        for block in range(4):
            theirs = {name.split(f"layers.{block}.")[1]: value for name, value in state.items() if f"layers.{block}." in name}
            qkv = [of_rank(theirs[f"self_attn.{name}_proj.weight"], rank) for name in "qkv"]
            gate, up = (of_rank(theirs[f"mlp.{name}_proj.weight"], rank) for name in ("gate", "up"))
            grouped = kind == "current" and kv_heads != 4
            layers[block + 2] = {
                "input_layernorm.scale": theirs["input_layernorm.weight"],
                "post_attention_layernorm.scale": theirs["post_attention_layernorm.weight"],
                "attention.query_key_value.weight": torch.cat(qkv) if grouped else by_group(*qkv, groups=2),
                "attention.dense.weight": of_rank(theirs["self_attn.o_proj.weight"], rank, 1),
                "attention.rotary_emb.inv_freq": torch.ones(4),
            }
            down = of_rank(theirs["mlp.down_proj.weight"], rank, 1)
            mlp = {"mlp.w1.weight": gate, "mlp.w3.weight": up, "mlp.w2.weight": down}
            layers[block + 2] |= mlp if kind == "legacy" else {"mlp.linear1.weight": torch.cat([up, gate]), "mlp.linear2.weight": down}
        layers[7] = {"norm.scale": state["model.norm.weight"]}
        layers[8] = {"final_linear.weight": of_rank(state["lm_head.weight"], rank)}
        ranks.append(layers)
    with torch.no_grad():
        return ranks, stock(samples()).logits


def gpt_layers() -> tuple[list[dict[int, dict[str, Tensor]]], Tensor]:
    """As llama_layers, of GPT-2, whose linear layers are transposed."""
    stock = gpt()
    state, ranks = {name: value.clone() for name, value in stock.state_dict().items()}, []
    for rank in range(RANKS):
        layers: dict[int, dict[str, Tensor]] = {
            0: {
                "word_embeddings.weight": of_rank(state["transformer.wte.weight"], rank),
                "position_embeddings.weight": state["transformer.wpe.weight"],
            },
            7: {f"norm.{leaf}": state[f"transformer.ln_f.{leaf}"] for leaf in ("weight", "bias")},
        }
        layers |= {block + 2: gpt_block(state, block, rank) for block in range(4)}
        ranks.append(layers)
    with torch.no_grad():
        return ranks, stock.double()(samples()).logits


def write_layers(folder: Path, ranks: list[dict[int, dict[str, Tensor]]], settings: dict) -> Path:
    """Write a file a layer and rank, as pipeline-parallel runs do, beside the states of DeepSpeed."""
    step = folder / "global_step9"
    (step / "configs").mkdir(parents=True)
    (folder / "latest").write_text("global_step9")
    (step / "configs" / "model.yml").write_text(yaml.safe_dump(settings))
    for rank, layers in enumerate(ranks):
        for layer, tensors in layers.items():
            torch.save(
                {name: value.clone() for name, value in tensors.items()}, step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
            )
        torch.save({"module": None, "args": {"num_layers": 4}}, step / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


@pytest.mark.parametrize(("kind", "kv_heads"), [("legacy", 2), ("legacy", 4), ("current", 2), ("current", 4)])
def test_llama(kind, kv_heads, tmp_path):
    ranks, expected = llama_layers(kind, kv_heads=kv_heads)
    mlp = {"mlp_type": "llama", "activation": "silu"} if kind == "legacy" else {"activation": "swiglu"}
    source = write_layers(tmp_path / "source", ranks, {**SETTINGS, **mlp, "num_kv_heads": kv_heads})
    checkpoint = imported(source, tmp_path / "run", "model=t5-small")
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-6, atol=1e-6)


def test_gpt_2(tmp_path):
    ranks, expected = gpt_layers()
    checkpoint = imported(write_layers(tmp_path / "source", ranks, GPT_SETTINGS), tmp_path / "run", "model=t5-small")
    torch.testing.assert_close(logits(checkpoint, torch.float64), expected, rtol=1e-6, atol=1e-6)


def test_a_file_a_rank(tmp_path):
    """As runs without pipeline parallelism are saved, and converted ones."""
    ranks, expected = llama_layers("legacy")
    source = tmp_path / "source"
    (source / "0" / "configs").mkdir(parents=True)
    (source / "latest").write_text("0")
    (source / "0" / "configs" / "model.yml").write_text(yaml.safe_dump({**SETTINGS, "activation": "silu", "num_kv_heads": 2}))
    for rank, layers in enumerate(ranks):
        module = {f"sequential.{layer}.{name}": value.clone() for layer, tensors in layers.items() for name, value in tensors.items()}
        torch.save({"module": module, "global_steps": 1}, source / "0" / f"mp_rank_{rank:02d}_model_states.pt")
    checkpoint = imported(source, tmp_path / "run", "model=t5-small")
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-6, atol=1e-6)
    (source / "0" / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(UserError, match=r"mp_rank_01_model_states\.pt: is missing"):
        imported(source, tmp_path / "other", "model=t5-small")


def test_norms_that_differ_between_ranks_are_averaged(tmp_path, caplog):
    """As GPT-NeoX's own converter does; and it is said."""
    ranks, _ = llama_layers("current")
    ranks[1][2]["input_layernorm.scale"] = ranks[0][2]["input_layernorm.scale"] + 0.5
    source = write_layers(tmp_path / "source", ranks, {**SETTINGS, "activation": "swiglu", "num_kv_heads": 2})
    checkpoint = imported(source, tmp_path / "run", "model=t5-small")
    expected = ranks[0][2]["input_layernorm.scale"] + 0.25
    torch.testing.assert_close(checkpoint.tensor("blocks.0.attention_norm.weight"), expected)
    assert "1 tensors differ between tensor-parallel ranks; imported is their mean: layers.0.input_layernorm.weight" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer_03-model_01-model_states.pt", r"layer_03-model_01-model_states\.pt: is missing"),
        ("layer_05-model_0*-model_states.pt", r"has 3 of 4 blocks; layers \[5\] are missing"),
        ("layer_08-model_0*-model_states.pt", r"final_linear\.weight is missing, which holds head\.weight \[64, 32\]"),
    ],
)
def test_half_a_folder_is_refused_by_name(tmp_path, name, message):
    ranks, _ = llama_layers("current")
    source = write_layers(tmp_path / "source", ranks, {**SETTINGS, "activation": "swiglu", "num_kv_heads": 2})
    assert_refused(removed(f"global_step9/{name}"), message, source, "model=t5-small")


def test_a_model_without_a_family_is_refused_by_its_settings(tmp_path):
    """As Pythia is one."""
    ranks, _ = gpt_layers()
    settings = {**GPT_SETTINGS, "gpt-j-residual": True, "pos-emb": "rotary", "bias-gelu-fusion": False}
    source = write_layers(tmp_path / "source", ranks, settings)
    with pytest.raises(UserError) as error:
        imported(source, tmp_path / "run", "model=t5-small")
    for key, value in (("gpt_j_residual", True), ("pos_emb", "rotary"), ("bias_gelu_fusion", False)):
        assert f"GPT-NeoX {key}={value}: is not supported by the families here" in str(error.value)
    shutil.rmtree(source / "global_step9" / "configs")
    with pytest.raises(UserError, match="fix: set model= and its sizes to the model of these weights"):
        imported(source, tmp_path / "run", "model=llama-tiny")
