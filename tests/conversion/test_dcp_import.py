"""stage=convert of folders of torch.distributed.checkpoint: with the names of torchtitan's Llama, and of a Hugging Face class."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from pipeline.common.errors import CheckFailed, UserError
from pipeline.models.families import llama as family
from tests.conversion.foreign_folders import OVERRIDES, Code, Damage, copied, llama, removed, samples, shortened
from tests.conversion.test_deepspeed_import import assert_refused, imported, logits
from tests.conversion.test_huggingface_export import random_model
from tests.world import configured

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Layer(nn.Module):
    """A block as torchtitan has it: rotary embeddings multiply pairs of neighboring dims, as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {name: nn.Linear(32, size, bias=False) for name, size in zip(("wq", "wk", "wv", "wo"), (32, 16, 16, 32), strict=True)}
        )
        self.feed_forward = nn.ModuleDict({"w1": nn.Linear(32, 48, bias=False), "w3": nn.Linear(32, 48, bias=False)})
        self.feed_forward["w2"] = nn.Linear(48, 32, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(32, eps=1e-5), nn.RMSNorm(32, eps=1e-5)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (self.attention[name](normed).unflatten(-1, (-1, 8)) for name in ("wq", "wk", "wv"))
        query, key = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * rotations[:, None]).flatten(-2) for part in (query, key)
        )
        key, value = (part.repeat_interleave(2, dim=2) for part in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, value)), is_causal=True)
        x = x + self.attention["wo"](mixed.transpose(1, 2).flatten(-2))
        normed = self.ffn_norm(x)
        return x + self.feed_forward["w2"](nn.functional.silu(self.feed_forward["w1"](normed)) * self.feed_forward["w3"](normed))


class TitanLlama(nn.Module):
    """torchtitan's Llama, with its names."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(64, 32)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(4)})
        self.norm = nn.RMSNorm(32, eps=1e-5)
        self.output = nn.Linear(32, 64, bias=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(tokens.shape[1]), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, torch.polar(torch.ones_like(angles), angles))
        return self.output(self.norm(x))


def saved(model: nn.Module, folder: Path, *, nested: bool) -> None:
    """Save model and optimizer: flat as torchtitan does, or nested as DCP's tutorial does."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    if nested:
        dcp.save({"app": {"model": weights, "optim": state}, "step": 3}, checkpoint_id=folder)
    else:
        dcp.save({**weights, "optimizer": state, "train_state": {"step": torch.tensor(3)}}, checkpoint_id=folder)


@pytest.fixture(scope="module")
def titan(tmp_path_factory) -> tuple[Path, Tensor]:
    """A folder as torchtitan writes it, and the logits of its model."""
    folder, model = tmp_path_factory.mktemp("titan"), TitanLlama()
    saved(model, folder / "step-3", nested=False)
    with torch.no_grad():
        return folder, model(samples())


def test_llama_of_torchtitan(titan, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    folder, expected = titan
    checkpoint = imported(folder, tmp_path)
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-6, atol=1e-6)
    assert "tensors are not imported, which are not the model's: optimizer.state." in caplog.text
    assert "convert: blocks.3.mlp.up.weight [48, 32]: norm " in caplog.text, "no stock class has these names, so that digests are logged"
    imported(folder, tmp_path)
    assert "is already imported, nothing to do" in caplog.text


def test_a_hugging_face_model_that_was_trained_with_dcp(tmp_path, caplog):
    """Under the names of its class and a prefix."""
    caplog.set_level("INFO", "pipeline")
    model = llama()
    saved(model, tmp_path / "source", nested=True)
    checkpoint = imported(tmp_path / "source", tmp_path / "run")
    with torch.no_grad():
        torch.testing.assert_close(logits(checkpoint), model(samples()).logits, rtol=1e-6, atol=1e-6)
    assert "the logits of LlamaForCausalLM on 64 tokens differ by at most" in caplog.text


def test_two_models_in_one_state_dict_are_refused(tmp_path):
    """For example trained and averaged weights: the order of the names must not decide which of them is imported."""
    weights = llama().state_dict()
    dcp.save({"average": weights, "model": {name: value + 1 for name, value in weights.items()}}, checkpoint_id=tmp_path / "source")
    with pytest.raises(UserError, match=r"has 2 models with these weights: average\.\* and model\.\*"):
        imported(tmp_path / "source", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_module_with_our_names(tmp_path):
    """Which another tool trained."""
    config = configured(*OVERRIDES).model
    model = random_model(config).eval()
    saved(model, tmp_path / "source", nested=True)
    checkpoint = imported(tmp_path / "source", tmp_path / "run")
    with torch.no_grad():
        assert torch.equal(logits(checkpoint), model(samples()))


def test_other_logits_fail_and_nothing_is_written(tmp_path, monkeypatch):
    """As if the table had the two norms of a block in each other's place."""
    llama().save_pretrained(tmp_path / "source")
    swapped = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}
    table = tuple(
        replace(entry, hf_name=entry.hf_name.replace(name, swapped[name]))
        if (name := next((name for name in swapped if f".{name}." in entry.hf_name), None))
        else entry
        for entry in family.TABLE
    )
    monkeypatch.setattr(family, "TABLE", table)
    with pytest.raises(CheckFailed, match="LlamaForCausalLM computes other logits from the source than the imported weights give"):
        imported(tmp_path / "source", tmp_path / "run")
    assert not (tmp_path / "run").exists()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "half": (removed("step-3/__0_0.distcp"), r"__0_0\.distcp: is missing"),
    "truncated": (shortened("step-3/__0_0.distcp", 100), r"__0_0\.distcp: is truncated: it has \d+ bytes, and the index names \d+"),
    "truncated index": (shortened("step-3/.metadata", 100), r"\.metadata: is not readable"),
    "code": (
        lambda folder: (folder / "step-3" / ".metadata").write_bytes(pickle.dumps(Code(folder / "executed"))),
        r"\.metadata: contains .*: unpickling it may run code",
    ),
    "several steps": (copied("step-3", "step-4"), "has the checkpoints step-3, step-4"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_by_name(titan, damage, tmp_path):
    shutil.copytree(titan[0], tmp_path / "source")
    assert_refused(*DAMAGES[damage], tmp_path / "source")


def test_another_model_is_refused_with_every_weight(titan, tmp_path):
    with pytest.raises(UserError) as error:
        imported(titan[0], tmp_path, *OVERRIDES, "model.layers=3", "model.kv_heads=4", "model.attention_bias=true")
    text = str(error.value)
    assert "layers.0.attention.wq.bias is missing, which holds blocks.0.attention.query.bias [32]" in text
    assert "layers.2.attention.wk.weight is [16, 32], and the model has blocks.2.attention.key.weight [32, 32] there, not [16, 32]" in text
    assert "layers.3.ffn_norm.weight [32] is not a weight of the model" in text
    assert len(error.value.violations) == 3 * (4 + 2) + 9


def test_a_folder_of_no_known_format(tmp_path):
    (tmp_path / "model.pt").touch()
    with pytest.raises(UserError, match=r"has no known format; it contains model\.pt\. Known are Hugging Face .*DeepSpeed .*Megatron-LM"):
        imported(tmp_path, tmp_path / "run")
