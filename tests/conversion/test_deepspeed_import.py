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
from tests.conversion.foreign_folders import LLAMA, OVERRIDES, ZERO, llama, samples
from tests.world import configured


@pytest.fixture(scope="module")
def folders(worlds, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    worlds(2).run(foreign_folders.write_zero, folder)
    return folder


def imported(source: Path, run_dir: Path, *overrides: str) -> Checkpoint:
    import_model(configured("stage=convert", f"run_dir={run_dir}", *(overrides or OVERRIDES)), source, file_bytes=20_000)
    return Checkpoint(find(run_dir, "latest"))


def logits(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of our model with the weights of a checkpoint, computed in a dtype."""
    model = registry.build(config_classes.from_dict(checkpoint.config["model"])).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.tensor(name))
        return model.eval()(samples())


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


def half(folder: Path) -> str:
    (folder / "global_step1" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    return r"Expected 2 of '\*_optim_states\.pt'.* but found 1"


def no_masters(folder: Path) -> str:
    for path in (folder / "global_step1").glob("*_optim_states.pt"):
        path.unlink()
    return r"was written with ZeRO, and its files \*_optim_states\.pt are missing"


def half_of_the_model(folder: Path) -> str:
    (folder / "global_step1" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    return "2 files .* are expected and 1 are there"


def truncated(folder: Path) -> str:
    path = folder / "global_step1" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    return "zero_pp_rank_1_mp_rank_00_optim_states.pt: is not readable"


def other_tag(folder: Path) -> str:
    (folder / "latest").write_text("global_step7")
    return r"latest: names 'global_step7', which is not there; there are global_step1"


def two_tags(folder: Path) -> str:
    shutil.copytree(folder / "global_step1", folder / "global_step2")
    (folder / "latest").unlink()
    return "has no file latest, and the checkpoints global_step1, global_step2"


def mixed_steps(folder: Path) -> str:
    path = folder / "global_step1" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    torch.save({**state, "global_steps": 9}, path)
    return "mixes files of several steps: .*rank_0.* of step 1, .*rank_1.* of step 9"


def tensor_parallel(folder: Path) -> str:
    step = folder / "global_step1"
    shutil.copyfile(step / "zero_pp_rank_0_mp_rank_00_model_states.pt", step / "zero_pp_rank_0_mp_rank_01_model_states.pt")
    return "has the shards of 2 tensor-parallel ranks, which DeepSpeed's reader does not join"


class Code:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def code(folder: Path) -> str:
    path = folder / "global_step1" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "lr_scheduler": Code(folder / "executed")}, path)
    return r"zero_pp_rank_0_mp_rank_00_model_states\.pt: contains .*pathlib\.Path: unpickling it may run code"


@pytest.mark.world
@pytest.mark.parametrize(
    "damage", [half, no_masters, half_of_the_model, truncated, other_tag, two_tags, mixed_steps, tensor_parallel, code]
)
def test_damaged_folders_are_refused_by_name(folders, damage, tmp_path):
    shutil.copytree(folders / "zero3-frozen", tmp_path / "source")
    message = damage(tmp_path / "source")
    with pytest.raises(UserError, match=message):
        imported(tmp_path / "source", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "source" / "executed").exists()


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
