"""Universal checkpoints of DeepSpeed: stage=convert reads and writes them, and the next steps of DeepSpeed and of our trainer are equal."""

import shutil
from collections.abc import Callable, Iterator
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
from pipeline.conversion.import_model import import_model
from pipeline.models import registry
from pipeline.parallel.pieces import Piece
from pipeline.training.lr_schedule import next_rate
from tests.conversion import universal_folders
from tests.conversion.foreign_folders import OVERRIDES
from tests.conversion.test_deepspeed_import import Code
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


def imported(source: Path, run_dir: Path, *overrides: str) -> Checkpoint:
    import_model(configured("stage=convert", f"run_dir={run_dir}", *(overrides or OVERRIDES)), source, file_bytes=20_000)
    return Checkpoint(find(run_dir, "latest"))


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
def test_deepspeed_continues_our_training_and_we_continue_its(ranks, stage, kernel, tied, later, tmp_path):
    """DeepSpeed trains 3 steps, we 2, and both go on for 2: with torch's AdamW and with a step that is a number, as in its kernels."""
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
    folder = exported(run, tmp_path / "output", model)
    back, *_ = ranks.run(universal_folders.continue_in_deepspeed, folder, later, kernel or later == 3, tied, 5, 7)
    assert_near(last, back, model)


@pytest.mark.world
def test_the_folder_before_ds_to_universal_has_weights_alone(ranks, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    ranks.run(universal_folders.write_universal, tmp_path / "source", 2, False, False)
    start = imported(tmp_path / "source" / "global_step3", tmp_path / "run")
    assert (start.step, start.has("blocks.1.mlp.up.weight", "exp_avg")) == (0, False)
    assert f"run first: {universal_import_command(tmp_path / 'source' / 'global_step3')}" in caplog.text


@pytest.mark.world
def test_adapters_do_not_begin_at_the_step_of_an_import(ranks, tmp_path):
    run = stored(tmp_path, state=TrainState(step=5, updates=4))
    (text, *_) = ranks.run(universal_folders.adapters, run)
    assert "continues at step 5, with moments of the imported weights, and adapters or a new head begin at step 0" in text
    assert f"fix: set checkpoint.initialize_from={run / 'checkpoints' / 'step-00000005'}, and another run_dir" in text


def universal_import_command(step: Path) -> str:
    return f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {step} --output_folder {step}_universal"


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


def test_the_constants_are_those_of_deepspeed():
    from deepspeed.checkpoint import constants

    assert universal_format.PARAM == constants.PARAM
    assert universal_format.CAT_DIM == constants.CAT_DIM
    assert universal_format.PARAM_SHAPES == constants.PARAM_SHAPES
    assert universal_format.PARAM_GROUPS == constants.PARAM_GROUPS
    assert universal_format.OPTIMIZER_STATE == constants.OPTIMIZER_STATE_DICT
    assert universal_format.DS_VERSION == constants.DS_VERSION
    assert universal_format.INFO == constants.UNIVERSAL_CHECKPOINT_INFO
    assert universal_format.INFO_VERSION == constants.UNIVERSAL_CHECKPOINT_VERSION_KEY
    assert universal_format.VERSION == constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
    assert constants.MODEL_FILE_SUFFIX.lstrip("_") == universal_format.MODEL_SUFFIX


@pytest.fixture(scope="module")
def universal(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("universal")
    return exported(stored(folder / "run"), folder / "output")


def change(folder: Path, name: str, file: str, value: Callable[[torch.Tensor], object]) -> None:
    path = folder / "global_step5_universal" / "zero" / name / file
    torch.save({"param": value(torch.load(path)["param"]), "cat_dim": 0}, path)


def not_converted(folder: Path) -> str:
    shutil.rmtree(folder / "global_step5_universal" / "zero")
    return r"latest_universal: names 'global_step5_universal', which is not a universal checkpoint.*\n.*ds_to_universal --inject"


def no_weight(folder: Path) -> str:
    shutil.rmtree(folder / "global_step5_universal" / "zero" / UP)
    return rf"{UP} \[48, 32\] is missing"


def other_shape(folder: Path) -> str:
    change(folder, UP, "fp32.pt", lambda value: value.t().contiguous())
    return rf"{UP} is \[32, 48\], not \[48, 32\]"


def no_moment(folder: Path) -> str:
    (folder / "global_step5_universal" / "zero" / UP / "exp_avg_sq.pt").unlink()
    return rf"zero/\*/exp_avg_sq.pt: {UP} \[48, 32\] is missing\n.*a frozen parameter has no moments"


def other_moment(folder: Path) -> str:
    change(folder, UP, "exp_avg.pt", lambda value: value[:5].clone())
    return rf"zero/\*/exp_avg.pt: {UP} is \[5, 32\], and the weight \[48, 32\]"


def no_tensor(folder: Path) -> str:
    change(folder, UP, "exp_avg.pt", lambda _: 3)
    return "exp_avg.pt: has no tensor param"


def two_steps(folder: Path) -> str:
    torch.save(torch.tensor(3.0), folder / "global_step5_universal" / "zero" / UP / "step.pt")
    return rf"needs one step of the optimizer.*it has 3 \({UP}\), 4 \("


def more_updates(folder: Path) -> str:
    for path in folder.glob("*/zero/*/step.pt"):
        torch.save(9, path)
    return "has 9 updates of the optimizer after 5 steps"


def no_optimizer(folder: Path) -> str:
    (folder / "global_step5_universal" / "zero" / "optimizer_state.pt").unlink()
    return "optimizer_state.pt: is missing, without which the universal checkpoint is incomplete"


def no_engine(folder: Path) -> str:
    for path in folder.glob("*/*model_states.pt"):
        path.unlink()
    return "mp_rank_00_model_states.pt: is missing, without which"


def several(folder: Path) -> str:
    shutil.copytree(folder / "global_step5_universal", folder / "global_step6_universal")
    (folder / "latest_universal").unlink()
    return "has no file latest_universal, and the universal checkpoints global_step5_universal, global_step6_universal"


def truncated(folder: Path) -> str:
    path = folder / "global_step5_universal" / "zero" / UP / "exp_avg.pt"
    path.write_bytes(path.read_bytes()[:-500])
    return "exp_avg.pt: is not readable"


def code(folder: Path) -> str:
    torch.save({"param": Code(folder / "executed")}, folder / "global_step5_universal" / "zero" / UP / "exp_avg.pt")
    return r"exp_avg\.pt: contains .*pathlib\.Path: unpickling it may run code"


DAMAGES = [
    *(not_converted, no_weight, other_shape, no_moment, other_moment, no_tensor, two_steps, more_updates, no_optimizer, no_engine),
    *(several, truncated, code),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_by_name(universal, damage, tmp_path):
    shutil.copytree(universal, tmp_path / "source")
    message = damage(tmp_path / "source")
    with pytest.raises(UserError, match=message):
        imported(tmp_path / "source", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "source" / "executed").exists()


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
