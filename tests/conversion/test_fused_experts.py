"""Experts in one parameter, as classes of transformers 5 have them, and in a tensor each, as its files do: stage=convert imports both."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline.common.errors import UserError
from pipeline.conversion import stock_logits
from pipeline.models import config_classes
from tests.conversion.foreign_folders import LLAMA, samples
from tests.conversion.test_deepspeed_import import imported, logits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = {**LLAMA, "num_hidden_layers": 2}
HEADS = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
EXPERTS |= {"moe_intermediate_size": 16, "num_nextn_predict_layers": 0}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16, "head_dim": 16}
#: 18: rows of 72 bytes, which the grouped product of transformers refuses.
MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=18)),
    "glm4-moe": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**{**SIZES, **EXPERTS, "head_dim": 8})),
    "qwen3.5-moe": lambda: Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**SIZES, **LINEAR, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=18)
    ),
    "deepseek": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, **HEADS, **EXPERTS})),
    "kimi-linear": lambda: KimiLinearForCausalLM(
        KimiLinearConfig(
            **{**SIZES, **HEADS, "pad_token_id": None},
            num_experts=4,
            num_experts_per_token=2,
            moe_intermediate_size=18,
            linear_num_heads=3,
            linear_head_dim=8,
            layer_types=["full_attention", "linear_attention"],
        )
    ),
}


@pytest.fixture(scope="module")
def stock(request, tmp_path_factory) -> tuple[nn.Module, Path]:
    """A model, and its folder, whose files have a tensor for each expert."""
    torch.manual_seed(0)
    model, folder = MODELS[request.param]().eval(), tmp_path_factory.mktemp("stock")
    model.set_experts_implementation("eager")
    model.save_pretrained(folder)
    assert any(name.endswith("experts.gate_up_proj") for name in model.state_dict())
    assert not any(name.endswith("experts.gate_up_proj") for name in load_file(folder / "model.safetensors"))
    return model, folder


def in_dcp(folder: Path, state: dict[str, Tensor]) -> None:
    dcp.save({"model": state}, checkpoint_id=folder)


def in_deepspeed(folder: Path, state: dict[str, Tensor]) -> None:
    (folder / "global_step1").mkdir(parents=True)
    torch.save({"module": state, "global_steps": 1}, folder / "global_step1" / "mp_rank_00_model_states.pt")


def in_huggingface(folder: Path, state: dict[str, Tensor]) -> None:
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})


#: The default tier has every model, format and kind of tensors, but not all combinations.
CASES = [
    pytest.param(model, save, of, marks=() if i % 3 == j and i % 2 == k else pytest.mark.long, id=f"{model}-{save.__name__}-{of}")
    for i, model in enumerate(MODELS)
    for j, save in enumerate((in_dcp, in_deepspeed, in_huggingface))
    for k, of in enumerate(("parameters", "files"))
]


@pytest.mark.parametrize("stock, save, of", CASES, indirect=["stock"], scope="module")
def test_experts_are_imported(stock, save, of, tmp_path, caplog):
    """With the logits of the class, which also the import compares."""
    caplog.set_level("INFO", "pipeline")
    model, folder = stock
    save(tmp_path / "source", dict(model.state_dict()) if of == "parameters" else load_file(folder / "model.safetensors"))
    shutil.copy(folder / "config.json", tmp_path / "source" / "config.json")
    checkpoint = imported(tmp_path / "source", tmp_path / "run", "model=gpt-tiny")
    stock_logits.compare(folder, checkpoint, config_classes.from_dict(checkpoint.config["model"]), torch.float32)  # as of an export
    found = logits(checkpoint)
    with torch.no_grad():
        torch.testing.assert_close(found, model(samples()).logits, rtol=1e-5, atol=1e-5)
    assert f"the logits of {type(model).__name__} on 64 tokens differ by at most" in caplog.text


def test_moments_of_experts_are_imported(tmp_path):
    """From a universal checkpoint of DeepSpeed with ZeRO 3, whose tensors are flat."""
    torch.manual_seed(0)
    model, step = MODELS["mixtral"](), tmp_path / "source" / "global_step2_universal"
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        (step / "zero" / name).mkdir(parents=True)
        for kind, value in (("fp32", weight.detach()), ("exp_avg", 2 * weight.detach()), ("exp_avg_sq", weight.detach() ** 2)):
            torch.save(value.flatten(), step / "zero" / name / f"{kind}.pt")
    torch.save({"optimizer_state_dict": {"state": {0: {"step": 2}}}}, step / "zero" / "optimizer_state.pt")
    torch.save({"global_steps": 2, "param_shapes": [shapes]}, step / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    model.config.architectures = ["MixtralForCausalLM"]
    model.config.save_pretrained(tmp_path / "source")
    found = imported(tmp_path / "source", tmp_path / "run", "model=gpt-tiny")
    assert (found.train_state.step, found.train_state.updates) == (2, 2)
    fused = model.model.layers[1].mlp.experts
    up, down = fused.gate_up_proj.detach().chunk(2, dim=1)[1], fused.down_proj.detach()
    assert torch.equal(found.tensor("blocks.1.mlp.experts.up", "exp_avg"), 2 * up)
    assert torch.equal(found.tensor("blocks.1.mlp.experts.down", "exp_avg_sq"), down**2)
    assert all(torch.equal(found.tensor(name, "exp_avg"), 2 * found.tensor(name)) for name in found.names())


@pytest.mark.parametrize("stock", MODELS, indirect=True, scope="module")
def test_another_number_of_experts_is_refused_by_name(stock, tmp_path):
    model, folder = stock
    state = {name: value[:3] if name.endswith("experts.down_proj") else value for name, value in model.state_dict().items()}
    in_dcp(tmp_path / "source", state)
    shutil.copy(folder / "config.json", tmp_path / "source" / "config.json")
    with pytest.raises(UserError, match=r"experts\.3\.(w2|down_proj)\.weight \[32, (16|18|48)\] is missing"):
        imported(tmp_path / "source", tmp_path / "run", "model=gpt-tiny")
