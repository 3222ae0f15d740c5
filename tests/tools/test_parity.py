"""tools/parity: a family is within the tolerance, a changed weight fails, and every family has test cases."""

from pipeline.models.config_classes import CONFIG_CLASSES
from tests.helpers import ROOT, python
from tools.audit.family_cases import FAMILIES


def parity(*arguments: str) -> tuple[int, str]:
    return python(ROOT / "tools" / "parity", *arguments)


def test_a_family_equals_its_stock_class_in_both_directions():
    code, table = parity("--family", "gpt")
    assert code == 0, table
    lines = [line.split() for line in table.splitlines() if line.startswith("gpt ")]
    assert [line[:3] for line in lines] == [
        ["gpt", variant, direction] for variant in ("tied", "untied") for direction in ("export", "import")
    ]
    assert all(line[-1] == "GPT2LMHeadModel" and float(line[3]) <= 1e-5 and int(line[4]) > 100 for line in lines)


def test_a_changed_weight_fails():
    code, table = parity("--family", "llama", "--spoil")
    assert code == 1
    assert "0 of " in table.splitlines()[-1]


def test_every_family_has_test_cases():
    assert FAMILIES.keys() == CONFIG_CLASSES.keys()
