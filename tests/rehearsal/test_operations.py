"""The record of real code on the driver without a GPU: planted faults of streams and lifetimes are found, correct twins are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal import test_contract

pytestmark = test_contract.pytestmark
SCRIPT = Path(__file__).parent / "faults.py"
NONE = {"races": [], "waits": []}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return test_contract.python(str(SCRIPT), **test_contract.variables_of("h100"))


def line(function: str, comment: str) -> str:
    """The line of a function that ends with a comment."""
    lines = SCRIPT.read_text().splitlines()
    start = lines.index(f"def {function}(planted: bool) -> None:")
    return f"faults.py:{next(number for number, text in enumerate(lines[start:], start + 1) if text.endswith(f'# {comment}'))}"


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("missing_wait", {"read before its write"}),
        ("freed_buffer", {"freed while used", "reused while used"}),
        ("late_gather", {"never written"}),
    ],
)
def test_a_planted_race_is_found(found: dict[str, Any], name: str, kinds: set[str]) -> None:
    right, wrong = found[name]
    assert right == NONE
    assert {kind for kind, _, _ in wrong["races"]} == kinds
    assert {first for _, first, _ in wrong["races"]} == {line(name, "FIRST")}
    assert line(name, "SECOND") in {second for _, _, second in wrong["races"]}


@pytest.mark.parametrize("how", ["", "_list", "_index", "_nonzero", "_copy", "_device"])
def test_a_wait_of_the_host_is_found(found: dict[str, Any], how: str) -> None:
    right, wrong = found[f"host_wait{how}"]
    assert right == NONE
    assert wrong["races"] == []
    assert [site for site, _ in wrong["waits"]] == [line(f"host_wait{how}", "FIRST")]


def test_products_of_a_backward_pass_have_the_line_of_the_forward_pass(found: dict[str, Any]) -> None:
    names, sites = zip(*found["products"], strict=True)
    assert names == ("aten::mm",) * 3
    assert len(set(sites)) == 1
    assert sites[0].startswith("faults.py:")


def test_a_recomputation_is_recorded_up_to_what_is_needed(found: dict[str, Any]) -> None:
    """Two products forward, the first one of them again, and two gradients of each."""
    assert found["recomputed"] == ["aten::mm"] * (2 + 1 + 4)


def test_attention_with_documents_is_one_kernel(found: dict[str, Any]) -> None:
    assert found["documents"] == [["flex_attention", False], ["flex_attention_backward", False]]
