"""Every family has what the recipe in .github/CONTRIBUTING.md says, and its file is short."""

import re
import subprocess
import sys

import pytest

from pipeline.models import registry, stock_keys
from tests.helpers import ROOT
from tools.audit.family_cases import FAMILIES

FOLDER = ROOT / "pipeline" / "models" / "families"
README = (ROOT / "pipeline" / "models" / "README.md").read_text(encoding="utf-8")
#: Families other than decoders with Llama's names, or with layers of their own, whose files may be longer.
LONG = {
    *("bert", "deepseek_v3", "gemma4", "gpt_oss", "granite_hybrid", "kimi_linear", "modernbert", "nemotron_h", "olmo_hybrid"),
    *("qwen3_next", "t5", "transformer"),
}


def test_every_file_of_the_folder_is_registered_and_has_cases():
    files = {file.stem for file in FOLDER.glob("*.py")} - {"__init__"}
    assert files == set(registry.NAMES) == FAMILIES.keys()
    assert list(registry.NAMES) == sorted(registry.NAMES)


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_family_has_what_the_recipe_says(name):
    family, cases = registry.FAMILIES[name], FAMILIES[name]
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (320 if name in LONG else 150)
    assert family.config().family == name
    size = (ROOT / "conf" / "model" / f"{cases.tiny}.yaml").read_text(encoding="utf-8")
    assert f"/schema/model/{name}@_here_" in size
    assert re.search(rf"^\| `{name}` \|", README, re.MULTILINE), "the family has no row"
    classes = {mapping.architecture for mapping in family.huggingface if not mapping.architecture.endswith("SequenceClassification")}
    assert all(f"`{architecture}`" in README and stock_keys.keys_of(architecture) for architecture in classes)


def test_the_files_that_the_recipe_names_exist():
    recipe = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add a model family")[2].partition("\n## ")[0]
    paths = re.findall(r"`((?:pipeline|conf|tools|tests)/[\w./-]+)`", recipe.replace("NAME", "exaone4"))
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_configurations_load_no_torch():
    code = "import sys, pipeline.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
