"""The matrix of rehearsals (matrix.py): every pair of a family and a feature that the rules allow is rehearsed, and the feature shows."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.errors import UserError
from pipeline.config.rules import check
from tests.helpers import one_in
from tests.rehearsal import test_contract
from tests.rehearsal.matrix import CASES, FAMILIES, FEATURES, JOB, PARTS, WORLD, parts, table, words
from tests.world import configured


def is_refused(*settings: str) -> bool:
    """Whether the rules of the configuration refuse a rehearsal."""
    try:
        return bool(check.violations(configured("stage=rehearse", "cluster.hardware=h100", *settings), WORLD))
    except UserError:
        return True


@pytest.mark.parametrize("family", one_in(2, FAMILIES))
def test_every_pair_is_rehearsed_or_refused(family: str) -> None:
    covered = {feature for case in CASES if parts(case)[0] == family for feature in parts(case)[1]}
    missing = [feature for feature in FEATURES if feature not in {*covered, *PARTS, "generation"}]
    assert all(is_refused(*JOB, *FAMILIES[family], *FEATURES[feature].words.split()) for feature in missing), missing
    assert ("generation" in covered) == (family != "bert"), "only an encoder alone generates nothing"
    assert not any(is_refused(*words(case)) for case in CASES if parts(case)[0] == family and "generation" not in parts(case)[1])


def rehearsed(script: str, cases: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run cases by a script of this folder; case -> its exit code, what it printed, and its rehearsal.json."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANNSCHEN_CACHE", str(folder / "cache"))
        variables = {**test_contract.variables_of.__wrapped__("h100"), "PIPELINE_REHEARSAL": "1", "DS_ACCELERATOR": "cuda"}
    variables |= {"PYTHONPATH": str(test_contract.ROOT), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [test_contract.PYTHON, Path(__file__).with_name(script), folder, *cases]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for number, line in enumerate(line for line in done.stdout.splitlines() if line.startswith("{")):
        result, written = json.loads(line), folder / str(number) / "rehearsal.json"
        found[result["case"]] = {**result, "report": json.loads(written.read_text()) if written.exists() else {}}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Case -> its exit code, what it printed, and its rehearsal.json. Prints the table of the matrix: see it with pytest -s."""
    found = rehearsed("matrix.py", CASES, tmp_path_factory.mktemp("matrix"))
    passed = {case: "x" if result["code"] else "+" for case, result in found.items()}
    print("\n" + "\n".join([*table(passed), f"{sum(result['seconds'] for result in found.values()):.0f} s of CPU"]))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
@test_contract.pytestmark[0]
@test_contract.pytestmark[1]
def test_a_rehearsed_case(results: dict[str, dict[str, Any]], case: str) -> None:
    result = results[case]
    assert result["code"] == 0, result["log"]
    report = result["report"]
    assert report["unknown_functions"] == []
    assert [name for name in parts(case)[1] if not FEATURES[name].shows(report)] == []
    if "generation" not in parts(case)[1]:
        assert report["memory"]["fits"]
        assert report["replay"]["races"] == []
