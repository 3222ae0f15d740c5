"""tools/audit_data: its counts for 1 to 100 TB, and those of a real run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.helpers import ROOT, python, words


def audited(folder: Path, *arguments: object) -> dict[str, dict[str, dict[str, float]]]:
    """Case -> pass -> counts."""
    code, printed = python(ROOT / "tools" / "audit_data", f"--json={folder}/counts.json", *arguments)
    assert code == 0, printed
    return json.loads((folder / "counts.json").read_text())


def test_a_hundred_terabytes_need_no_more_memory_and_opens_a_byte_than_one(tmp_path):
    cases = audited(tmp_path)
    assert list(cases) == ["1 TB, 64 ranks", "10 TB, 512 ranks", "100 TB, 4096 ranks"]
    totals = [case["total"] for case in cases.values()]
    for total, terabytes, ranks in zip(totals, (1, 10, 100), (64, 512, 4096), strict=True):
        for count in ("opens", "inodes", "bytes_read", "bytes_written"):
            assert total[count] == pytest.approx(terabytes * totals[0][count], rel=0.02)
        assert total["memory"] <= 4e9
        assert total["most_opens"] <= 2 * total["opens"] / ranks


@pytest.mark.long
@pytest.mark.parametrize("spans", [(), ("dedup.spans=20", "dedup.span_megabytes=5")], ids=["documents", "spans"])
def test_the_counts_of_a_run_are_those_of_the_model(tmp_path, spans):
    """Within 2 %, except the bytes of small messages, whose encoding is larger than their rows."""
    chance = random.Random(0)
    (tmp_path / "corpus").mkdir()
    texts: list[str] = []
    for file in range(4):
        lines = []
        for number in range(900):
            kind = chance.random()
            if texts and kind < 0.15:  # a copy or, of these, one of three a near copy
                texts.append(chance.choice(texts[-99:]) + " changed" * (kind < 0.05))
            else:
                passage = " ".join(chance.choice(texts or ["none"]).split()[: 40 * (chance.random() < 0.1)])
                texts.append(f"{words(1000 * file + number, chance.randrange(100, 400))} {passage}".rstrip())
            lines.append(json.dumps({"text": texts[-1]}))
        (tmp_path / "corpus" / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    settings = (*spans, "clean=none", "data.part_megabytes=0.2", "data.shard_megabytes=0.3", f"data.input=[{tmp_path}/corpus]")
    cases = audited(tmp_path, "--run", tmp_path / "run", "--ranks", 2, *settings)
    for step in ("read", "clusters", *(["spans"] if spans else []), "shuffle", "total"):
        measured, model = cases["measured"][step], cases["model"][step]
        for name in ("opens", "most_opens", "inodes", "bytes_read", "bytes_written", "messages"):
            assert measured[name] == pytest.approx(model[name], rel=0.02, abs=100 * name.startswith("bytes")), (step, name)
        assert measured["memory"] <= model["memory"]
        assert measured["bytes_sent"] == pytest.approx(model["bytes_sent"], rel=0.15, abs=100), step
