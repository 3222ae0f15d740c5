"""Universal checkpoints of DeepSpeed: stage=convert reads and writes them, and the next steps of DeepSpeed and of our trainer are equal."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.checkpoint import native, save
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.lora_merge import open_merged
from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.reader import Checkpoint, find
from pipeline.common.errors import UserError
from pipeline.config.rules import convert as rules
from pipeline.conversion import universal_export, universal_format
from pipeline.conversion.export_files import ExportWriter
from pipeline.models import registry
from pipeline.parallel.pieces import Piece
from pipeline.training.lr_schedule import next_rate
from tests.conversion import universal_folders
from tests.conversion.foreign_folders import OVERRIDES, Damage, copied, edited, removed, shortened, with_code
from tests.conversion.test_deepspeed_import import assert_refused, imported
from tests.helpers import one_in, run_directory
from tests.models.small_decoders import CONFIGS
from tests.world import World, configured

MODEL = configured("stage=convert", *OVERRIDES).model
KINDS = ("weight", "exp_avg", "exp_avg_sq")
STATE = TrainState(step=5, updates=4, samples=10)
UP = "model.layers.1.mlp.up_proj.weight"
#: One of each family.
FAMILIES = {config.family: name for name, config in CONFIGS.items()}


def stored(folder: Path, model=MODEL, kinds=KINDS, state=STATE) -> Path:
    """A run directory with a checkpoint of random weights and moments."""
    generator = torch.Generator().manual_seed(1)
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in registry.build(model).named_parameters()}
    fragments = [
        Fragment(Piece(name, shape), 0, {kind: torch.rand(shape, generator=generator).flatten() for kind in kinds})
        for name, shape in shapes.items()
    ]
    settings = asdict(configured("stage=pretrain", f"run_dir={folder}")) | {"model": asdict(model) | {"family": model.family}}
    save.save_full(run_directory(folder), native.Index(state, settings), fragments, 20_000)
    return folder


def exported(run: Path, output: Path, model=MODEL) -> Path:
    """A universal checkpoint of the newest checkpoint of a run."""
    output.mkdir()
    weights = open_merged(find(run, "latest"), None)
    universal_export.check(weights, model)
    rate = next_rate(weights.config, weights.train_state.updates)
    universal_export.write(output, weights, model, rate, ExportWriter())
    return output


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], model=MODEL) -> None:
    """Compare our weights with those of the Hugging Face class; a step changes each by about 0.01."""
    for entry in registry.stock_tensors(model)[0]:
        torch.testing.assert_close(entry.to_hf([ours[name] for name in entry.names]), theirs[entry.hf_name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[World]:
    """Two gloo ranks of their own: DeepSpeed replaces functions of torch for the whole process."""
    world = World(2, tmp_path_factory.mktemp("deepspeed"))
    yield world
    world.stop()


@pytest.mark.world
@pytest.mark.parametrize(
    ("stage", "kernel", "tied", "later"),
    [*(pytest.param(*case, marks=pytest.mark.long) for case in ((1, False, False, 3), (2, True, True, 1))), (3, True, False, 2)],
)
def test_deepspeed_continues_our_training_and_we_continue_its(ranks, stage, kernel, tied, later, tmp_path, caplog):
    """DeepSpeed trains 3 steps, we 2, and both go on for 2: with torch's AdamW and with a step that is a number, as in its kernels."""
    caplog.set_level("INFO", "pipeline")
    overrides = (*OVERRIDES, f"model.tie_embeddings={tied}")
    source, run, model = tmp_path / "source", tmp_path / "run", replace(MODEL, tie_embeddings=tied)
    theirs, *_ = ranks.run(universal_folders.write_universal, source, stage, kernel, tied)
    start = imported(source, run, *overrides)
    assert (start.train_state.step, start.train_state.updates, start.train_state.samples) == (3, 3, 0)
    for kind, file in universal_format.FILES.items():
        written = torch.load(source / "global_step3_universal" / "zero" / UP / file, weights_only=True)
        written = written if stage == 3 else written["param"]
        assert torch.equal(start.tensor("blocks.1.mlp.up.weight", kind).flatten(), written.flatten())
    (ours, last), *_ = ranks.run(universal_folders.continue_here, run, 3, 5, 7, f"parallel.zero_stage={stage}", overrides[-1])
    assert_near(ours, theirs, model)
    before = source / "global_step3"  # the folder that ds_to_universal reads
    weights_alone = imported(before, tmp_path / "weights", *overrides)
    assert (weights_alone.step, weights_alone.has("blocks.1.mlp.up.weight", "exp_avg")) == (0, False)
    convert = f"ds_to_universal --inject_missing_state --input_folder {before} --output_folder {before}_universal"
    assert f"run first: python -m deepspeed.checkpoint.{convert}" in caplog.text
    folder = exported(run, tmp_path / "output", model)
    back, *_ = ranks.run(universal_folders.continue_in_deepspeed, folder, later, kernel or later == 3, tied, 5, 7)
    assert_near(last, back, model)


@pytest.mark.world
def test_adapters_do_not_begin_at_the_step_of_an_import(ranks, tmp_path):
    run = stored(tmp_path, state=TrainState(step=5, updates=4))
    (text, *_) = ranks.run(universal_folders.adapters, run)
    assert "continues at step 5, with moments of the imported weights, and adapters or a new head begin at step 0" in text
    assert f"fix: set checkpoint.initialize_from={run / 'checkpoints' / 'step-00000005'}, and another run_dir" in text


@pytest.mark.parametrize("name", one_in(4, FAMILIES.values()))
def test_parameters_have_the_names_of_the_module(name, tmp_path):
    """Those that DeepSpeed's engine finds in the class, with their shapes; other models than dense decoders are refused."""
    model = CONFIGS[name]
    run = stored(tmp_path / "run", model)
    if getattr(model, "experts", 0) or model.family in ("gemma4", "nemotron_h", "olmo_hybrid"):
        rule = (
            r"is supported for dense decoders|has the moments of all weights, and blocks\.0\.layer_scalar of model\.family=gemma4 is not|"
        )
        rule += r"is not supported for model\.family=\w+, whose files have other names than the parameters of its class"
        with pytest.raises(UserError, match=rf"stage\.format=deepspeed_universal: ({rule})"):
            exported(run, tmp_path / "output", model)
        return
    folder = exported(run, tmp_path / "output", model) / "global_step5_universal" / "zero"
    content = registry.mapping_of(model).config_json(model)
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    shapes = {name: tuple(weight.shape) for name, weight in stock.named_parameters()}
    for kind, file in universal_format.FILES.items():
        found = {path.parent.name: torch.load(path, weights_only=True)["param"] for path in folder.glob(f"*/{file}")}
        assert {name: tuple(value.shape) for name, value in found.items()} == shapes, kind
    assert all(float(torch.load(folder / name / "step.pt", weights_only=True)) == 4 for name in shapes)


def test_an_export_is_imported_again_without_a_difference(tmp_path):
    run = stored(tmp_path / "run")
    output = exported(run, tmp_path / "output")
    (output / "model.safetensors").touch()  # as in a folder of the Trainer of transformers
    first, second = Checkpoint(find(run, "latest")), imported(output, tmp_path / "again")
    assert (second.train_state.step, second.train_state.updates) == (5, 4)
    assert first.names() == second.names()
    assert all(torch.equal(first.tensor(name, kind), second.tensor(name, kind)) for name in first.names() for kind in KINDS)


def test_the_scheduler_continues_at_the_updates_and_not_at_the_steps_of_the_engine(tmp_path):
    """Skipped steps are none of the scheduler."""
    (tmp_path / universal_format.ZERO).mkdir()
    universal_export._write_engine(tmp_path, TrainState(step=9, updates=7), {}, 0.0)
    engine = torch.load(tmp_path / universal_format.MODEL_FILES[0], weights_only=True)
    assert (engine["global_steps"], engine["skipped_steps"], engine["lr_scheduler"]["last_epoch"]) == (9, 2, 7)


@pytest.fixture(scope="module")
def universal(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("universal")
    return exported(stored(folder / "run"), folder / "output")


ZERO = "global_step5_universal/zero"
OF_UP = f"{ZERO}/{UP}"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "not converted": (
        removed(ZERO),
        r"latest_universal: names 'global_step5_universal', which is not a universal checkpoint.*\n.*ds_to_universal --inject",
    ),
    "no weight": (removed(OF_UP), rf"{UP} \[48, 32\] is missing"),
    "other shape": (
        edited(f"{OF_UP}/fp32.pt", lambda state: state.update(param=state["param"].t().contiguous())),
        rf"{UP} is \[32, 48\], not \[48, 32\]",
    ),
    "no moment": (
        removed(f"{OF_UP}/exp_avg_sq.pt"),
        rf"zero/\*/exp_avg_sq.pt: {UP} \[48, 32\] is missing\n.*a frozen parameter has no moments",
    ),
    "other moment": (
        edited(f"{OF_UP}/exp_avg.pt", lambda state: state.update(param=state["param"][:5].clone())),
        rf"zero/\*/exp_avg.pt: {UP} is \[5, 32\], and the weight \[48, 32\]",
    ),
    "no tensor": (edited(f"{OF_UP}/exp_avg.pt", lambda state: state.update(param=3)), "exp_avg.pt: has no tensor param"),
    "two steps": (
        lambda folder: torch.save(torch.tensor(3.0), folder / OF_UP / "step.pt"),
        rf"needs one step of the optimizer.*it has 3 \({UP}\), 4 \(",
    ),
    "more updates": (
        lambda folder: [torch.save(9, path) for path in folder.glob(f"{ZERO}/*/step.pt")],
        "has 9 updates of the optimizer after 5 steps",
    ),
    "no optimizer": (
        removed(f"{ZERO}/optimizer_state.pt"),
        "optimizer_state.pt: is missing, without which the universal checkpoint is incomplete",
    ),
    "no engine": (removed("*/*model_states.pt"), "mp_rank_00_model_states.pt: is missing, without which"),
    "several": (
        lambda folder: (copied("global_step5_universal", "global_step6_universal")(folder), removed("latest_universal")(folder)),
        "has no file latest_universal, and the universal checkpoints global_step5_universal, global_step6_universal",
    ),
    "truncated": (shortened(f"{OF_UP}/exp_avg.pt", 500), "exp_avg.pt: is not readable"),
    "code": (with_code(f"{OF_UP}/exp_avg.pt", "param"), r"exp_avg\.pt: contains .*pathlib\.Path: unpickling it may run code"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_by_name(universal, damage, tmp_path):
    shutil.copytree(universal, tmp_path / "source")
    assert_refused(*DAMAGES[damage], tmp_path / "source")


def test_another_model_is_refused(universal, tmp_path):
    with pytest.raises(UserError, match=r"has lm_head\.weight.*the model \(model= of family opt.*has model\.decoder\.embed_tokens"):
        imported(universal, tmp_path, "model=opt-tiny")
    with pytest.raises(UserError, match=r"model\.layers\.4\.self_attn\.q_proj\.weight \[32, 32\] is missing"):
        imported(universal, tmp_path, *OVERRIDES, "model.layers=5")


def test_checkpoints_without_such_a_form_are_refused(tmp_path):
    run = stored(tmp_path / "frozen", kinds=("weight", "exp_avg"))
    with pytest.raises(UserError, match=r"has no exp_avg_sq of .*and lacks 38 further moments, after 4 updates"):
        exported(run, tmp_path / "output")
    untrained = exported(stored(tmp_path / "untrained", kinds=("weight",), state=TrainState()), tmp_path / "zero")
    assert not torch.load(untrained / "global_step0_universal" / "zero" / UP / "exp_avg.pt")["param"].any()
    stage = configured("stage=convert", "stage.format=deepspeed_universal", "stage.dtype=bf16", "stage.weights=ema").stage
    found = {violation.key: violation.rule for violation in rules.violations(stage)}
    assert sorted(found) == ["stage.dtype", "stage.weights"]
    assert found["stage.dtype"].startswith("has no effect with stage.format=deepspeed_universal, which exports the trained fp32 weights")
