"""The tables of tools/bench_data, without assertions on times. The peer libraries are not installed."""

import json

import pytest

from tests.helpers import ROOT, python, words

pytestmark = pytest.mark.slow

ENGLISH = "The winter was long, and the people of the village had to wait for the snow to melt before they could go to the forest. "


def bench(*arguments: str) -> tuple[int, str]:
    return python(ROOT / "tools/bench_data", "--no-peers", "--rounds=1", *arguments)


def rows(table: str) -> dict[str, list[str]]:
    """Return row name -> its cells, for all indented lines."""
    lines = [line for line in table.splitlines() if line.startswith("  ") and line[2] != " "]
    return {line[:28].strip(): line[28:].split() for line in lines}


def test_ours_is_measured_and_missing_peers_are_reported(tmp_path):
    text = tmp_path / "some.jsonl"
    text.write_text("".join(json.dumps({"text": ENGLISH + words(seed, 400)}) + "\n" for seed in range(20)), encoding="utf-8")
    code, printed = bench(
        "--input", str(text), "--size=0.2", "--only=tokenize", "--only=loader", "--sequence=64", "--seconds=0.1", f"--work={tmp_path}"
    )
    assert code == 0, printed
    found = rows(printed)
    measured = [cells for name, cells in found.items() if name.startswith("ours")]
    assert len(measured) == 6, printed
    assert all(float(cells[0].replace(",", "")) > 0 for cells in measured)
    assert " ".join(found["datatrove"]) == "not installed: --no-peers"
    assert found["ours, tokenize"][-2:] == found["ours, shard and tokenize"][-2:], "the same tokens"
    assert sum(line.endswith(("met", "MISSED")) for line in printed.splitlines()) == 2, (
        "only the targets of the first batch apply to this size"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some.jsonl"], "temporary files remain"


def test_a_missing_input_is_refused(tmp_path):
    done = bench("--input", str(tmp_path / "none.jsonl"))
    assert done[0] == 2
    assert "none.jsonl" in done[1]
