"""tools/demo on a small text for a few steps: twice, and with wrong arguments."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.long

#: Settings for a run of seconds.
SHORT = [
    "data.suffixes=[.jsonl]", "data.validation_fraction=0.1", "tokenizer.vocab_size=300", "model.layers=1", "training.steps=30",
    "training.global_batch_size=2", "training.micro_batch_size=1", "training.sequence_length=32", "training.validate_every=10",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not (ROOT / ".venv" / "installed").exists():
        pytest.skip("requires the environment of tools/install, which the demo would create")


def demo(*arguments: object, expect: int = 0) -> str:
    """Run the demo; return standard output and standard error."""
    done = subprocess.run(
        [str(ROOT / "tools" / "demo"), *map(str, arguments)],
        cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def report(printed: str) -> str:
    """The table, without the duration below it."""
    return printed.rpartition("\n--- ")[2].partition("\ndemo: done")[0]


def contents(folder: Path) -> dict[Path, int]:
    """Every file and its modification time in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_all_steps_and_a_second_run(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    printed = demo(folder, f"data.input=[{corpus}]", *SHORT)

    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())["totals"]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert len(losses) == 30
    assert losses[-1] < losses[0]
    evaluation = json.loads((folder / "evaluation.json").read_text())
    table = dict(re.findall(r"^(\S+(?: \S+)*)  +(\S.*)$", report(printed), re.MULTILINE))
    for count in ("documents", "bytes", "tokens"):
        assert table[count].startswith(f"{manifest['train'][count] + manifest['validation'][count]:,} ")
    assert table["trained on"].startswith(f"{30 * 2 * 32:,} tokens")
    assert table["validation loss"].startswith(f"{evaluation['validation_loss']:.3f}")
    assert table["bits per byte"].startswith(f"{evaluation['bits_per_byte']:.3f}")
    assert table["Hugging Face model"] == str(folder / "hf")
    assert Path(table["loss curve"]).read_bytes().startswith(b"\x89PNG")
    assert printed.count("--- the model writes") == 4
    steps = re.findall(r"^demo: step (\d) of 8 \(\w+\), about \d+ (?:s|min) left$", printed, re.MULTILINE)
    assert steps == [str(number) for number in range(1, 9)]
    assert re.search(r"step 25/30 .* tokens/s, 0:00:\d\d left", printed)

    before = contents(folder)
    again = demo(folder, f"data.input=[{corpus}]", *SHORT)
    assert report(again) == report(printed)
    assert "stage=evaluate" not in again
    rewritten = {path.name for path, written in contents(folder).items() if before.get(path) != written}
    assert rewritten == {"loss.png"}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["training.stebs=1"], "did you mean training.steps"),
        (["data.input=[/nowhere]"], "/nowhere"),
        (["--fast"], "unknown option '--fast'"),
    ],
    ids=["misspelt", "missing", "option"],
)
def test_a_wrong_argument_stops_it(arguments: list[str], said: str, tmp_path: Path) -> None:
    printed = demo(*([tmp_path / "demo"] if "=" in arguments[0] else []), *arguments, expect=2)
    assert said in printed
    assert "train_tokenizer" not in printed


def test_a_folder_that_no_setting_can_contain(tmp_path: Path) -> None:
    assert "choose another one" in demo(tmp_path / "my demo", expect=2)


def test_a_spike_is_traced_and_its_document_removed(tmp_path: Path) -> None:
    folder = tmp_path / "curriculum"
    command = [str(ROOT / "tools" / "demo_curriculum"), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout
    asked = [json.loads(line)["source"] for line in (folder / "asked.jsonl").read_text().splitlines()]  # one row a sample
    assert set(asked) == {"noise.py"}
    (removed,) = map(json.loads, (folder / "left_out.jsonl").read_text().splitlines())
    assert max(removed["steps"]) <= 240 < min(removed["left_out"]), "it would have been read again"
    assert json.loads((folder / "certificate.json").read_text())["totals"]["tokens_read_since_removal"] == 0
    assert (folder / "summary" / "training-content.md").exists()
    assert (folder / "hf" / "README.md").exists()
