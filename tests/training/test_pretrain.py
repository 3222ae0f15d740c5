"""pretrain at the command line: outputs of a run, kill -9 and resume, and errors on invalid input."""

import contextlib
import json
import logging
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from tests.helpers import pipeline, run_ranks, start_ranks, torchrun
from tests.training import one_rank

pytestmark = pytest.mark.world

TINY = (
    "model=llama-tiny",
    "model.layers=2",
    "model.hidden=32",
    "model.ffn_hidden=64",
    "model.vocab_size=320",
    "training.sequence_length=32",
    "training.global_batch_size=16",
    "training.micro_batch_size=4",
    "optimizer.warmup_steps=2",
    "tracking=disabled",
)
#: The deterministic keys of a line; the others are times.
EXACT = ("step", "samples", "tokens", "loss", "grad_norm", "lr", "skipped")


def run(ranks: int, *arguments: str) -> str:
    """Train to completion, and return stdout and stderr of all ranks."""
    return run_ranks(ranks, "stage=pretrain", *TINY, *arguments)


def alone(stage: str, run_dir: Path, *arguments: object) -> None:
    """Run a stage of the same model in this process."""
    same = ("model.heads=8", "optimizer.lr=0.0003", "checkpoint.every=0", "training.validation_batches=20")
    one_rank.run(stage, run_dir, *TINY, *same, *arguments)


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def exact(run_dir: Path) -> list[tuple]:
    return [tuple(line[key] for key in EXACT) if "loss" in line else (line["step"], line["validation_loss"]) for line in lines(run_dir)]


@pytest.fixture(scope="module")
def eight(tokens, tmp_path_factory) -> tuple[Path, str]:
    """A run on eight ranks with tensor, pipeline and data parallelism."""
    folder = tmp_path_factory.mktemp("eight") / "run"
    axes = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.zero_stage=2", "precision=fp32")
    return folder, run(
        8, *axes, f"data.tokens={tokens}", f"run_dir={folder}", "training.steps=6", "checkpoint.every=2", "tracking.wandb=offline"
    )


def test_a_run_on_eight_ranks_writes_the_documented_files(eight):
    folder, printed = eight
    steps = [line for line in lines(folder) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    needed = {"step", "samples", "tokens", "loss", "grad_norm", "lr", "skipped", "seconds", "tokens_per_second", "mfu"}
    assert needed <= steps[0].keys()
    assert steps[-1]["samples"] == 6 * 16
    assert steps[-1]["tokens"] == 6 * 16 * 32
    assert steps[-1]["mfu"] is None
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert "validation_loss" in lines(folder)[-1]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["catalog.json", "step-00000004", "step-00000006"], (
        "the last two are kept"
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["totals"]["world_size"] == 8
    assert (folder / "config.yaml").is_file()
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1, "only rank 0 logs"
    assert all(ord(c) >= 32 or c in "\n\t" for c in printed), "a log contains no control characters"


@pytest.mark.long
def test_another_layout_has_the_same_metrics(eight, tokens, tmp_path):
    """Started by torchrun, as users do."""
    arguments = ("parallel.zero_stage=3", "precision=fp32", f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "training.steps=6")
    pipeline("stage=pretrain", *TINY, *arguments, prefix=torchrun(2))
    for ours, theirs in zip(exact(tmp_path / "run"), exact(eight[0]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


#: A rank that notes which folders it lists, before it runs the package.
NOTING = """
import os, sys
def note(event, arguments):
    if event in ("os.listdir", "os.scandir") and str(arguments[0]).endswith("/checkpoints"):
        with open(os.environ["LISTED"] + os.environ["RANK"], "a") as file:
            file.write(event + "\\n")
sys.addaudithook(note)
from pipeline.__main__ import main_and_leave
main_and_leave()
"""


def test_a_finished_run_does_nothing_and_a_longer_one_continues(eight, tokens, tmp_path, monkeypatch, caplog):
    """Only rank 0 lists the checkpoints to choose one: on a parallel file system, every listing of a folder is a request to one server."""
    shutil.copytree(eight[0], tmp_path / "run")
    before = exact(tmp_path / "run")
    monkeypatch.setenv("LISTED", f"{tmp_path}/listed-")
    settings = ("parallel.zero_stage=1", "precision=fp32", f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "training.steps=6")
    with (tmp_path / "printed").open("wb") as output:
        ranks = start_ranks(2, "stage=pretrain", *TINY, *settings, output=output.fileno(), program=("-c", NOTING))
        codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], (tmp_path / "printed").read_text()
    assert "nothing to do" in (tmp_path / "printed").read_text()
    assert sorted(path.name for path in tmp_path.glob("listed-*")) == ["listed-0"]
    assert exact(tmp_path / "run") == before
    with caplog.at_level(logging.INFO, "pipeline"):
        alone("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=8")  # one rank now, eight before
    assert "step 6, 96 samples" in caplog.text
    assert [line[0] for line in exact(tmp_path / "run") if len(line) > 2] == list(range(1, 9))


def test_evaluate_and_convert_read_the_checkpoint_in_one_process(eight, tokens, tokenizer, tmp_path):
    shutil.copytree(eight[0], tmp_path / "run")
    alone("evaluate", tmp_path / "run", f"data.tokens={tokens}", "stage.batches=8")
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert found["step"] == 6
    assert found["validation_loss"] == pytest.approx(lines(eight[0])[-1]["validation_loss"], rel=1e-5)
    alone("convert", tmp_path / "run", f"data.tokens={tokens}", f"tokenizer.path={tokenizer}")
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


def test_all_ranks_evaluate_the_checkpoint_that_rank_0_finds_and_count_every_target_once(eight, tokens, tmp_path):
    """The result depends neither on the batch size nor on the layout; the training data and its sequence length are not required.

    Rank 1 sees an older listing of the checkpoints, as on a file system that caches it.
    """

    def loss() -> float:
        return json.loads((eight[0] / "evaluation.json").read_text())["validation_loss"]

    def evaluated(*arguments: str) -> float:
        alone("evaluate", eight[0], f"data.tokens={tokens}", *arguments)
        return loss()

    shutil.copytree(eight[0] / "checkpoints" / "step-00000004", tmp_path / "checkpoints" / "step-00000004")
    batch = "training.global_batch_size={0}", "training.micro_batch_size={1}"
    losses = [evaluated(*(text.format(size, micro) for text in batch)) for size, micro in ((35, 7), (512, 64))]
    common = ("stage=evaluate", *TINY, "precision=fp32", f"data.tokens={tokens}", f"run_dir={eight[0]}", "parallel.context=2")
    run_ranks(2, *common, *(text.format(12, 3) for text in batch), own={1: (f"run_dir={tmp_path}",)})
    losses.append(loss())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert evaluated("training.sequence_length=16", "training.seed=5") == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize(
    "zero, tensor, ranks", [(2, 1, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, 2, 2), (2, 2, 4)))]
)
def test_killed_at_any_moment_and_continued_bit_for_bit(tokens, tmp_path, zero, tensor, ranks):
    arguments = (
        f"parallel.zero_stage={zero}",
        f"parallel.tensor={tensor}",
        "precision=fp32",
        f"data.tokens={tokens}",
        "training.steps=8",
        "checkpoint.every=2",
        "training.validate_every=3",
    )
    run(ranks, *arguments, f"run_dir={tmp_path}/straight")
    metrics, until = tmp_path / "killed" / "metrics.jsonl", random.uniform(2, 5)
    codes = [0]
    while 0 in codes:  # again if it ended before it was killed
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        processes = start_ranks(ranks, "stage=pretrain", *TINY, *arguments, f"run_dir={tmp_path}/killed")
        while processes[0].poll() is None and (not metrics.is_file() or metrics.read_bytes().count(b"\n") < until):
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.1))
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        codes = [process.wait() for process in processes]
    # A thread of gloo may abort a rank whose peer was killed a moment before it.
    assert set(codes) in ({-signal.SIGKILL}, {-signal.SIGKILL, -signal.SIGABRT})
    run(ranks, *arguments, f"run_dir={tmp_path}/killed")
    assert exact(tmp_path / "killed") == exact(tmp_path / "straight")


def test_all_violations_are_reported_at_once(tokens):
    said = pipeline(
        "stage=pretrain",
        *TINY,
        f"data.tokens={tokens}",
        "parallel.tensor=3",
        "parallel.pipeline=4",
        "parallel.schedule=zbv",
        "training.activation_checkpointing=full",
        "training.sequence_length=100000",
        expect=2,
    )
    rules = ("parallel.tensor=3", "model.layers=2", "training.activation_checkpointing=full", "training.sequence_length=100000")
    for text in (*rules, "world size=1", "fix:"):
        assert text in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("training.attention=flex", "training.attention=flex: requires a GPU"),
        ("data.tokens={folder}/nowhere", "stage=tokenize"),
        ("model.vocab_size=100", "model.vocab_size=100.*300"),
    ],
)
def test_what_contradicts_the_machine_or_the_data_is_refused(tokens, tmp_path, settings, said):
    """Missing tokens name the stage that makes them."""
    with pytest.raises(UserError, match=f"(?s){said}"):
        alone("pretrain", tmp_path / "run", f"data.tokens={tokens}", settings.format(folder=tmp_path))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_another_model_in_a_run_directory_names_the_differences(eight, tokens, tmp_path):
    shutil.copytree(eight[0], tmp_path / "run")
    common = ("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=9")
    with pytest.raises(UserError, match=r"model.rope_theta=5000") as raised:
        alone(*common, "model.rope_theta=5000", "training.seed=7")
    assert "10000" in str(raised.value)
    assert "training.seed=7" in str(raised.value)
    with pytest.raises(UserError, match=r"checkpoint.resume=none"):
        alone(*common, "checkpoint.resume=none")


def test_a_damaged_checkpoint_is_named(eight, tokens, tmp_path, caplog):
    shutil.copytree(eight[0], tmp_path / "run")
    common = ("pretrain", tmp_path / "run", f"data.tokens={tokens}")
    file = tmp_path / "run" / "checkpoints" / "step-00000006" / "rank-00002.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-10], content[:-5] + bytes([content[-5] ^ 1]) + content[-4:], None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"rank-00002\.safetensors"):
            alone(*common, "training.steps=9")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    with caplog.at_level(logging.INFO, "pipeline"):
        alone(*common, "training.steps=5")
    assert "step 4, 64 samples" in caplog.text
