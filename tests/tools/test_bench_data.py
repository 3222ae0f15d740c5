"""The tables of tools/bench_data, without assertions on times. The peer libraries are not installed."""

import json
from itertools import islice

import pytest

from tests.helpers import ROOT, load_tool, python, words
from tools.bench import data_text
from tools.bench.data_sections import Result, Row, Section

ENGLISH = "The winter was long, and the people of the village had to wait for the snow to melt before they could go to the forest. "


def bench(*arguments: str) -> tuple[int, str]:
    return python(ROOT / "tools/bench_data", "--no-peers", "--rounds=1", *arguments)


def rows(table: str) -> dict[str, list[str]]:
    """Return row name -> its cells, for all indented lines."""
    lines = [line for line in table.splitlines() if line.startswith("  ") and line[2] != " "]
    return {line[:28].strip(): line[28:].split() for line in lines}


def test_the_text_is_grown_without_blank_documents():
    short = [" x", "  y\n", "a  ", "one two three"]
    assert all(text.strip() for text in islice(data_text._with_copies(short), 2000))


def test_unequal_work_is_named_without_a_ratio():
    section = Section("tokenize", "MB/s", [Row(name, lambda _: Result(1)) for name in ("ours", "same", "other")])
    results = {"ours": Result(10, 1, "9 tokens"), "same": Result(2, 5, "the same ids"), "other": Result(4, 2, "", "other ids")}
    tool = load_tool("bench_data")
    table = tool.table(section, results)
    assert rows(table) == {
        "ours": ["1.00", "10", "1.00", "9", "tokens"],
        "same": ["5.00", "2", "5.00", "the", "same", "ids"],
        "other": ["-", "4", "2.00", "UNEQUAL", "WORK:", "other", "ids"],
    }
    assert tool.unequal(section, results) == ["UNEQUAL WORK: tokenize: other: other ids"]


@pytest.mark.long
def test_ours_is_measured_and_missing_peers_are_reported(tmp_path):
    text = tmp_path / "some.jsonl"
    text.write_text("".join(json.dumps({"text": ENGLISH + words(seed, 400)}) + "\n" for seed in range(20)), encoding="utf-8")
    code, printed = bench(
        "--input",
        str(text),
        "--size=0.2",
        "--only=tokenize",
        "--only=clean",
        "--only=loader",
        "--sequence=64",
        "--seconds=0.1",
        f"--work={tmp_path}",
    )
    assert code == 0, printed
    found = rows(printed)
    measured = [cells for name, cells in found.items() if name.startswith("ours")]
    assert len(measured) == 7, printed  # "ours" of clean and of the first batch are one key
    assert all(float(cells[0].replace(",", "")) > 0 for cells in measured)
    assert " ".join(found["datatrove"]) == "not installed: --no-peers"
    assert found["ours, tokenize"][-2:] == found["ours, shard and tokenize"][-2:], "the same tokens"
    assert sum(line.endswith(("met", "MISSED")) for line in printed.splitlines()) == 2, (
        "only the targets of the first batch apply to this size"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some.jsonl"], "temporary files remain"


def test_a_benchmark_of_unequal_work_exits_with_1(monkeypatch, tmp_path, capsys):
    """Ours as a peer of itself, whose ids differ."""
    tool = load_tool("bench_data")
    section = Section("tokenize", "MB/s", [Row("ours", lambda _: Result(2)), Row("peer", lambda _: Result(1, None, "", "other ids"))])
    monkeypatch.setattr(tool, "sections", lambda *_: [("tokenize 1", section)])
    monkeypatch.setattr("sys.argv", ["bench_data", "--no-peers", "--only=tokenize", "--rounds=1", f"--work={tmp_path}"])
    assert tool.main() == 1
    assert "UNEQUAL WORK: tokenize: peer: other ids" in capsys.readouterr().out


def test_a_missing_input_is_refused(tmp_path):
    done = bench("--input", str(tmp_path / "none.jsonl"))
    assert done[0] == 2
    assert "none.jsonl" in done[1]
