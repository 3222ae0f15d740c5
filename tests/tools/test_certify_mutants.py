"""tools/certify_mutants: its mutants fit the source, every part of the list of public bugs has some, and a sample of them is found."""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers import ROOT, one_in, python
from tools.mutants import configurations, effect, mutation, trial
from tools.mutants.catalog import MUTANTS
from tools.mutants.mutation import Edit, EditError, Mutant
from tools.mutants.trial import FAILED, INEFFECTIVE, KILLED, STOPPED, SURVIVED, Result, telling


@pytest.mark.parametrize("mutant", one_in(4, MUTANTS), ids=lambda mutant: mutant.name)
def test_every_mutant_applies_and_is_python(mutant: Mutant) -> None:
    for path, source in mutant.sources().items():
        assert source != ast.unparse(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        compile(source, str(path), "exec")


def test_the_catalog_is_that_of_the_table_of_results() -> None:
    table = (ROOT / "tools/mutants/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|(.*)", table, re.MULTILINE)
    assert sorted((int(bug), name) for bug, row in rows for name in re.findall(r"\*\*`(\w+)`", row)) == sorted(
        (mutant.bug, mutant.name) for mutant in MUTANTS
    )
    assert all("**" in row or "(like `" in row for _, row in rows if "`" in row)


@pytest.mark.parametrize(
    "edit, message",
    [
        (Edit("Trainer.no_such_method", "A", "A"), "function Trainer.no_such_method is in 0 modules"),
        (Edit("Trainer._is_counted", "A.no_such_attribute", "A"), "in Trainer._is_counted, this occurs 0 times"),
        (Edit("Trainer._is_counted", 'B["loss_weights"]', "no_such_name"), "has no name no_such_name"),
    ],
)
def test_a_mutant_that_no_longer_applies_is_named(edit: Edit, message: str) -> None:
    with pytest.raises(EditError, match=f"^mutant changed: .*{re.escape(message)}"):
        Mutant("changed", 1, "", "", (edit,)).sources()


def test_letters_stand_for_any_expression_and_dots_for_further_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/some.py").write_text("def f(a, b):\n    b = g(a + 1, b, c=2)  # text\n    return [b * b, a * b]\n")
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    edits = (Edit("f", "g(A, ..., c=C)", "g(C, ..., c=A)"), Edit("f", "X * X", "X"), Edit("f", "", "BODY\nreturn a"))
    mutation._sources.cache_clear()
    (source,) = Mutant("m", 1, "", "", edits).sources().values()
    mutation._sources.cache_clear()
    assert source == "def f(a, b):\n    b = g(2, b, c=a + 1)\n    return [b, a * b]\n    return a"


def test_a_setting_of_the_mutant_replaces_a_common_one() -> None:
    job = trial.Job(1, ("training.global_batch_size=32", "model=gpt-tiny"), None, {"tokens": Path("a"), "tokenizer": Path("b")})
    words = job.overrides("optimizer.lr=0.5")
    assert words[:2] == ["precision=fp32", "model=gpt-tiny"]
    assert [word for word in words if word.startswith(("training.global_batch_size", "optimizer.lr", "data.tokens"))] == [
        "training.global_batch_size=32",
        "optimizer.lr=0.5",
        "data.tokens=a",
    ]


def test_differences_of_two_runs(tmp_path: Path) -> None:
    for name, losses in (("run", [1.0, 3.0, 2.2]), ("other", [1.0, 2.0, 2.2])):
        (tmp_path / name).mkdir()
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert effect.scalars(tmp_path / "run", tmp_path / "other") == {"loss": 0.5}
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 1.0}\n')
    assert effect.scalars(tmp_path / "run", tmp_path / "other") == {"loss": float("inf")}
    assert effect.ratio(float("nan"), 1.0) == float("inf")


@pytest.mark.parametrize(
    "verdicts, fails",
    [
        ([KILLED] * 19 + [SURVIVED], False),
        ([KILLED, STOPPED], False),
        ([KILLED] * 17 + [SURVIVED] * 2, True),
        ([KILLED] * 60 + [INEFFECTIVE], True),
        ([KILLED] * 60 + [FAILED], True),
    ],
)
def test_what_fails_the_tool(verdicts: list[str], fails: bool) -> None:
    rows = [Result(f"mutant {number}", 1, verdict, {"loss": 1.0}, "", 1.0, 2.0) for number, verdict in enumerate(verdicts)]
    assert trial.is_failure(rows) is fails
    for verdict, row in {row.verdict: row for row in rows}.items():
        assert (row.name in trial.summary(rows, 1.0)) == (verdict in (SURVIVED, INEFFECTIVE, FAILED))


def test_the_line_that_names_a_weight_is_shown() -> None:
    loss, weight = "loss in fp32: differs by 1e-2 (step 1)", "gradient in fp32: differs by 1e-2 (norm.weight)"
    assert telling([loss, weight]) == weight
    assert telling([loss]) == loss


def test_a_changed_mutant_has_another_digest() -> None:
    assert len({mutant.digest for mutant in MUTANTS}) == len(MUTANTS)
    assert dataclasses.replace(MUTANTS[0], ranks=3).digest != MUTANTS[0].digest


def test_random_configurations_have_every_family_and_axis() -> None:
    chance = random.Random(0)
    drawn = [configurations.draw(chance, family) for family in configurations.FAMILIES for _ in range(40)]
    words = Counter(word for found, _ in drawn for word in found)
    for key in ("tensor", "pipeline", "context", "expert"):
        assert words[f"parallel.{key}=2"] > 0
    for word in (
        "parallel.schedule=zbv",
        "parallel.schedule=interleaved",
        "precision=fp16",
        "precision.fp8=tensorwise",
        "training.ema=0.9",
    ):
        assert words[word] > 0
    assert max(ranks for _, ranks in drawn) <= 2 * configurations.MODEL_RANKS
    assert {f"model={family}-tiny" for family in configurations.FAMILIES} <= words.keys()
    assert all((ROOT / f"conf/model/{family}-tiny.yaml").exists() for family in configurations.FAMILIES)


def test_an_unknown_mutant_is_refused() -> None:
    code, printed = python(ROOT / "tools/certify_mutants", "--only", "nothing")
    assert code == 2
    assert "there is no mutant nothing" in printed


@pytest.mark.long
@pytest.mark.world
def test_a_sample_of_six(tmp_path: Path) -> None:
    """Mutants of every kind that certify compares, and one that it cannot survive; no more than these are trained."""
    names = (
        *("last_norm_not_summed", "ring_backward_overwrites", "norm_over_replicas"),
        *("router_bias_not_updated", "tied_gradients_not_summed", "later_contribution_lost"),
    )
    chosen = [word for name in names for word in ("--only", name)]
    code, printed = python(ROOT / "tools/certify_mutants", *chosen, "--folder", tmp_path, cold=True, timeout=1800)
    assert code == 0, printed
    rows = json.loads((tmp_path / "mutants.json").read_text())
    assert {row["name"]: row["verdict"] for row in rows} == dict.fromkeys(names, KILLED)
    assert all(row["effect"] and row["found_by"] for row in rows)
    assert re.search(r"6 of 6 mutants found \(100%\)", printed)
