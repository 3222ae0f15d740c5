"""pretrain at the command line: outputs of a run, kill -9 and resume, and errors on invalid input."""

import contextlib
import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import pipeline, run_ranks, start_ranks, torchrun

pytestmark = pytest.mark.world

TINY = (
    "model=llama-tiny",
    "model.layers=4",
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


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def exact(run_dir: Path) -> list[tuple]:
    return [tuple(line[key] for key in EXACT) if "loss" in line else (line["step"], line["validation_loss"]) for line in lines(run_dir)]


def assert_plain(printed: str) -> None:
    assert all(ord(c) >= 32 or c in "\n\t" for c in printed), "a log contains no control characters"


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
    assert_plain(printed)


def test_another_layout_has_the_same_metrics(eight, tokens, tmp_path):
    """Started by torchrun, as users do."""
    arguments = ("parallel.zero_stage=3", "precision=fp32", f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "training.steps=6")
    printed = pipeline("stage=pretrain", *TINY, *arguments, prefix=torchrun(2, cold=True), cold=True)
    assert_plain(printed)
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


def test_only_rank_0_lists_the_checkpoints_to_choose_one(eight, tokens, tmp_path, monkeypatch):
    """On a parallel file system, every listing of a folder is a request to one server."""
    shutil.copytree(eight[0], tmp_path / "run")
    monkeypatch.setenv("LISTED", f"{tmp_path}/listed-")
    settings = ("parallel.zero_stage=1", "precision=fp32", f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "training.steps=6")
    with (tmp_path / "printed").open("wb") as output:
        ranks = start_ranks(2, "stage=pretrain", *TINY, *settings, output=output.fileno(), program=("-c", NOTING))
        codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], (tmp_path / "printed").read_text()
    assert sorted(path.name for path in tmp_path.glob("listed-*")) == ["listed-0"]


def test_evaluate_and_convert_read_the_checkpoint_in_one_process(eight, tokens, tokenizer, tmp_path):
    shutil.copytree(eight[0], tmp_path / "run")
    common = (*TINY, "precision=fp32", f"data.tokens={tokens}", f"tokenizer.path={tokenizer}", f"run_dir={tmp_path}/run")
    pipeline("stage=evaluate", "stage.batches=8", "parallel.zero_stage=0", *common)
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert found["step"] == 6
    assert found["validation_loss"] == pytest.approx(lines(eight[0])[-1]["validation_loss"], rel=1e-5)
    pipeline("stage=convert", *common)
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


def test_all_ranks_evaluate_the_checkpoint_that_rank_0_finds(eight, tokens, tmp_path):
    """Rank 1 sees an older listing of the checkpoints, as on a file system that caches it."""
    shutil.copytree(eight[0] / "checkpoints" / "step-00000004", tmp_path / "checkpoints" / "step-00000004")
    common = ("stage=evaluate", *TINY, "precision=fp32", f"data.tokens={tokens}", f"run_dir={eight[0]}", "parallel.tensor=2")
    run_ranks(2, *common, "stage.batches=8", own={1: (f"run_dir={tmp_path}",)})
    found = json.loads((eight[0] / "evaluation.json").read_text())
    assert found["validation_loss"] == pytest.approx(lines(eight[0])[-1]["validation_loss"], rel=1e-5)


def test_evaluation_counts_every_target_once(eight, tokens):
    """The result depends neither on the batch size nor on the layout; the training data and its sequence length are not required."""
    common = ("stage=evaluate", *TINY, "precision=fp32", f"data.tokens={tokens}", f"run_dir={eight[0]}")

    def evaluate(ranks: int, *arguments: str) -> float:
        run_ranks(ranks, *common, *arguments) if ranks > 1 else pipeline(*common, "parallel.zero_stage=0", *arguments)
        return json.loads((eight[0] / "evaluation.json").read_text())["validation_loss"]

    batch = "training.global_batch_size={0}", "training.micro_batch_size={1}"
    losses = [evaluate(1, *(text.format(size, micro) for text in batch)) for size, micro in ((1, 1), (35, 7), (512, 64))]
    losses.append(evaluate(2, "parallel.context=2", *(text.format(12, 3) for text in batch)))
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    assert evaluate(1, "training.sequence_length=16", "training.seed=5") == pytest.approx(losses[0], rel=0.01)


def test_one_history_in_a_run_directory(eight, tokens, tmp_path):
    """A run may start from a checkpoint of another one; the same command then continues. A branch beside newer checkpoints is refused."""
    common = ("stage=pretrain", *TINY, "precision=fp32", "parallel.zero_stage=0", f"data.tokens={tokens}")
    source = eight[0] / "checkpoints" / "step-00000004"
    branch = (*common, f"run_dir={tmp_path}/branch", f"checkpoint.fork={source}", "optimizer.lr=0.001")
    printed = pipeline(*branch, "training.steps=5")
    assert "step 4, 64 samples" in printed
    assert "optimizer.lr=0.001, was 0.0003" in printed
    assert "step 5, 80 samples" in pipeline(*branch, "training.steps=6")
    assert "step 6, 96 samples" in pipeline(*common, f"run_dir={tmp_path}/branch", "training.steps=7")
    before = exact(eight[0])
    other = f"checkpoint.fork={eight[0]}/step-6"
    for run_dir, start in ((eight[0], f"checkpoint.fork={source}"), (eight[0], "checkpoint.resume=none"), (tmp_path / "branch", other)):
        said = pipeline(*common, f"run_dir={run_dir}", start, "training.steps=9", expect=2)
        assert "do not continue from it" in said, start
    assert exact(eight[0]) == before


def test_a_finished_run_does_nothing_and_a_longer_one_continues(eight, tokens, tmp_path):
    shutil.copytree(eight[0], tmp_path / "run")
    common = ("stage=pretrain", *TINY, "precision=fp32", "parallel.zero_stage=1", f"data.tokens={tokens}", f"run_dir={tmp_path}/run")
    before = exact(tmp_path / "run")
    assert "nothing to do" in pipeline(*common, "training.steps=6")
    assert exact(tmp_path / "run") == before
    assert "step 6, 96 samples" in pipeline(*common, "training.steps=8")  # one rank now, eight before
    assert [line[0] for line in exact(tmp_path / "run") if len(line) > 2] == list(range(1, 9))


@pytest.mark.parametrize("zero, ranks", [pytest.param(0, 2, marks=pytest.mark.long), (2, 4)])
def test_killed_at_any_moment_and_continued_bit_for_bit(tokens, tmp_path, zero, ranks):
    arguments = (
        f"parallel.zero_stage={zero}",
        "parallel.tensor=2",
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
    rules = ("parallel.tensor=3", "model.layers=4", "training.activation_checkpointing=full", "training.sequence_length=100000")
    for text in (*rules, "world size=1", "fix:"):
        assert text in said
    assert "Traceback" not in said


def test_flex_attention_on_a_cpu_is_refused(tokens, tmp_path):
    said = pipeline("stage=pretrain", *TINY, f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "training.attention=flex", expect=2)
    assert "training.attention=flex: requires a GPU" in said


def test_missing_tokens_name_the_stage_that_makes_them(tmp_path):
    said = pipeline("stage=pretrain", *TINY, f"data.tokens={tmp_path}/nowhere", expect=2)
    assert "stage=tokenize" in said
    assert "Traceback" not in said


def test_a_vocabulary_that_contradicts_the_tokenizer_is_refused(tokens, tmp_path):
    said = pipeline("stage=pretrain", *TINY, f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "model.vocab_size=100", expect=2)
    assert "model.vocab_size=100" in said
    assert "300" in said
    assert not (tmp_path / "run").exists()


def test_another_model_in_a_run_directory_names_the_differences(eight, tokens, tmp_path):
    shutil.copytree(eight[0], tmp_path / "run")
    common = ("stage=pretrain", *TINY, f"data.tokens={tokens}", f"run_dir={tmp_path}/run")
    said = pipeline(*common, "model.rope_theta=5000", "training.seed=7", "training.steps=9", expect=2)
    assert "model.rope_theta=5000" in said
    assert "10000" in said
    assert "training.seed=7" in said
    assert "checkpoint.resume=none" in pipeline(*common, "checkpoint.resume=none", expect=2)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_named(eight, tokens, tmp_path, damage):
    shutil.copytree(eight[0], tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-00000006" / "rank-00002.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(content[:-10])
    elif damage == "flip":
        content[-5] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    said = pipeline(
        "stage=pretrain", *TINY, "precision=fp32", f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "training.steps=9", expect=2
    )
    assert "rank-00002.safetensors" in said
    assert "Traceback" not in said
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert "step 4, 64 samples" in pipeline(
        "stage=pretrain", *TINY, "precision=fp32", f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "training.steps=5"
    )


def test_a_full_disk_is_reported_and_leaves_no_partial_checkpoint(tokens, tmp_path):
    """A file-size limit simulates a full disk: metrics.jsonl stays below it, a checkpoint does not."""
    limited = ("bash", "-c", 'trap "" XFSZ; ulimit -f 60; exec "$@"', "limited")
    common = ("stage=pretrain", *TINY, "parallel.zero_stage=0", f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "training.steps=3")
    said = pipeline(*common, expect=2, prefix=limited, cold=True)
    assert "could not be written" in said
    assert "Traceback" not in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["catalog.json"]
    pipeline(*common)
    assert [line[0] for line in exact(tmp_path / "run") if len(line) > 2] == [1, 2, 3]
