"""stage=convert of folders that DeepSpeed's engine wrote on two ranks, with ZeRO 1 to 3."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.checkpoint.reader import Checkpoint, find
from pipeline.common.errors import UserError
from pipeline.conversion.deepspeed_import import _zero2
from pipeline.conversion.import_model import import_model
from pipeline.models import config_classes, registry
from tests.conversion import foreign_folders
from tests.conversion.foreign_folders import (
    LLAMA,
    OVERRIDES,
    ZERO,
    Damage,
    copied,
    edited,
    llama,
    removed,
    samples,
    shortened,
    with_code,
)
from tests.world import configured


@pytest.fixture(scope="module")
def folders(worlds, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    worlds(2).run(foreign_folders.write_zero, folder)
    return folder


def imported(source: Path, run_dir: Path, *overrides: str) -> Checkpoint:
    import_model(configured("stage=convert", f"run_dir={run_dir}", *(overrides or OVERRIDES)), source, file_bytes=20_000)
    return Checkpoint(find(run_dir, "latest"))


def logits(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of our model with the weights of a checkpoint, computed in a dtype; default: of samples()."""
    model = registry.build(config_classes.from_dict(checkpoint.config["model"])).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.tensor(name))
        return model.eval()(samples() if tokens is None else tokens)


def stock_logits(state: dict[str, torch.Tensor], **changes) -> torch.Tensor:
    stock = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))
    missing, unexpected = stock.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        return stock.eval()(input_ids=samples()).logits


@pytest.mark.world
@pytest.mark.parametrize("name", ZERO)
def test_the_imported_model_has_the_logits_of_the_source(folders, name, tmp_path, caplog):
    """Compared with the state that DeepSpeed's reader joins; it omits frozen weights of ZeRO 1, which are those before training."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    caplog.set_level("INFO", "pipeline")
    stage, _, changes, frozen = ZERO[name]
    state = get_fp32_state_dict_from_zero_checkpoint(str(folders / name))
    if frozen:
        head = llama(**changes).lm_head.weight.detach()
        state["lm_head.weight"] = head.bfloat16().float() if stage == 1 else head
    assert not torch.equal(state["model.norm.weight"], llama(**changes).model.norm.weight), "an untrained model would test less"
    checkpoint = imported(folders / name, tmp_path, *OVERRIDES, f"model.tie_embeddings={not frozen}")
    torch.testing.assert_close(logits(checkpoint), stock_logits(state, **changes), rtol=1e-6, atol=1e-6)
    assert torch.equal(checkpoint.tensor("blocks.1.attention.key.weight"), state["model.layers.1.self_attn.k_proj.weight"])
    assert "the logits of LlamaForCausalLM on 64 tokens differ by at most" in caplog.text


def test_the_elements_that_align_a_weight_are_not_those_of_the_next_one():
    """DeepSpeed writes how many follow each weight; two ranks hold the vector."""
    flat = torch.arange(16.0)
    tensors = _zero2([[flat[:8]], [flat[8:]]], [{"first": (3,), "second": (2, 2)}], [[5, 4]])
    assert torch.equal(tensors["first"][2](), flat[:3])
    assert torch.equal(tensors["second"][2](), flat[8:12].view(2, 2))


@pytest.mark.world
def test_the_model_is_that_of_config_json(folders, tmp_path):
    """As the Trainer of transformers writes it, beside the folder of the step; which may be named itself."""
    source = tmp_path / "checkpoint-1"
    shutil.copytree(folders / "zero3-frozen", source)
    LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]).save_pretrained(source)
    first, second = (imported(path, tmp_path / path.name, "model=gpt-tiny") for path in (source, source / "global_step1"))
    assert first.config["model"]["ffn_hidden"] == 48
    assert json.loads((tmp_path / "global_step1" / "imported" / "config.json").read_text())["intermediate_size"] == 48
    assert all(torch.equal(first.tensor(name), second.tensor(name)) for name in first.names())


def assert_refused(damage: Damage, message: str, source: Path, *overrides: str) -> None:
    """Damage a folder, and assert that its import is refused with a message, and that nothing was written or executed."""
    damage(source)
    with pytest.raises(UserError, match=message):
        imported(source, source.parent / "run", *overrides)
    assert not (source.parent / "run").exists()
    assert not list(source.rglob("executed"))


RANK_0, RANK_1 = ("global_step1/zero_pp_rank_0_mp_rank_00", "global_step1/zero_pp_rank_1_mp_rank_00")
DAMAGES: dict[str, tuple[Damage, str]] = {
    "half": (removed(f"{RANK_1}_optim_states.pt"), r"Expected 2 of '\*_optim_states\.pt'.* but found 1"),
    "no masters": (removed("*/*_optim_states.pt"), r"was written with ZeRO, and its files \*_optim_states\.pt are missing"),
    "half of the model": (removed(f"{RANK_1}_model_states.pt"), "2 files .* are expected and 1 are there"),
    "truncated": (shortened(f"{RANK_1}_optim_states.pt", 1000), "zero_pp_rank_1_mp_rank_00_optim_states.pt: is not readable"),
    "other tag": (
        lambda folder: (folder / "latest").write_text("global_step7"),
        r"latest: names 'global_step7', which is not there; there are global_step1",
    ),
    "two tags": (
        lambda folder: (copied("global_step1", "global_step2")(folder), removed("latest")(folder)),
        "has no file latest, and the checkpoints global_step1, global_step2",
    ),
    "mixed steps": (
        edited(f"{RANK_1}_model_states.pt", lambda state: state.update(global_steps=9)),
        "mixes files of several steps: .*rank_0.* of step 1, .*rank_1.* of step 9",
    ),
    "tensor parallel": (
        copied(f"{RANK_0}_model_states.pt", "global_step1/zero_pp_rank_0_mp_rank_01_model_states.pt"),
        "has the shards of 2 tensor-parallel ranks, which DeepSpeed's reader does not join",
    ),
    "code": (
        with_code(f"{RANK_0}_model_states.pt", "lr_scheduler"),
        r"zero_pp_rank_0_mp_rank_00_model_states\.pt: contains .*pathlib\.Path: unpickling it may run code",
    ),
}


@pytest.mark.world
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_by_name(folders, damage, tmp_path):
    shutil.copytree(folders / "zero3-frozen", tmp_path / "source")
    assert_refused(*DAMAGES[damage], tmp_path / "source")


@pytest.mark.world
def test_another_model_is_refused_with_every_weight(folders, tmp_path):
    with pytest.raises(UserError) as error:
        imported(folders / "zero2-tied", tmp_path, *OVERRIDES, "model.layers=5", "model.ffn_hidden=64", "model.tie_embeddings=true")
    text = str(error.value)
    assert "model.layers.4.self_attn.q_proj.weight [32, 32] is missing" in text
    assert "model.layers.3.mlp.up_proj.weight is [48, 32], not [64, 32]" in text
    assert "fix: set model= and its sizes to the model of these weights, or put its config.json beside them" in text
    assert len(error.value.violations) == 9 + 4 * 3
    with pytest.raises(UserError, match=r"has model\.embed_tokens\.weight.*the model \(model= of family t5.*has shared\.weight"):
        imported(folders / "zero2-tied", tmp_path, "model=t5-small")
