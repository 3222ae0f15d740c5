"""The published sizes, the plans' completeness and the rules between sizes, all without memory for a weight."""

import pytest
import torch
from hydra import compose, initialize_config_dir

from pipeline.config.compose import CONF_DIR, register, typed
from pipeline.models import families, plan, registry
from pipeline.models.gpt.config import GPTConfig
from pipeline.models.llama.config import LlamaConfig

#: Parameters of the released weights (as their model cards and files count them).
RELEASED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}
#: GPT-3 was not released; its paper rounds (table 2.1).
ROUNDED = {
    "gpt3-small": 125e6,
    "gpt3-medium": 350e6,
    "gpt3-large": 760e6,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13.0e9,
    "gpt3-175b": 175.0e9,
}
SMALL = {"gpt-tiny", "gpt-demo", "llama-tiny", "llama-demo"}
NAMES = sorted(file.stem for file in (CONF_DIR / "model").glob("*.yaml"))


@pytest.fixture(scope="module")
def model_config():
    register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield lambda name: typed(compose("config", [f"model={name}"])).model


def build_on_meta(config):
    with torch.device("meta"):
        return registry.build(config)


def test_every_shipped_model_is_counted():
    assert set(NAMES) == RELEASED.keys() | ROUNDED.keys() | SMALL


@pytest.mark.parametrize("name", NAMES)
def test_parameter_count(name, model_config):
    config = model_config(name)
    assert config.violations() == []
    count = sum(parameter.numel() for parameter in build_on_meta(config).parameters())
    if name in RELEASED:
        assert count == RELEASED[name]
    elif name in ROUNDED:
        assert count == pytest.approx(ROUNDED[name], rel=0.02)
    else:
        assert 3e6 < count < 8e6


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_plan_and_table_name_every_weight(family, tied):
    config = families.from_dict({"family": family, "layers": 3, "tie_embeddings": tied})
    shapes = {name: parameter.shape for name, parameter in build_on_meta(config).named_parameters()}
    table = registry.plan(config)
    assert {pattern for pattern in table if not any(plan.fnmatchcase(name, pattern) for name in shapes)} == (
        {"head.weight"} if tied else set()
    )
    for name, shape in shapes.items():
        assert all(dim < len(shape) for dim in plan.splits(table, name).values()), name
    exported = [part for row in registry.adapter(config).weights(config) for part in row.ours]
    assert sorted(exported) == sorted(shapes)


def test_plan_that_is_silent_or_ambiguous_is_an_error():
    with pytest.raises(KeyError, match=r"norm\.weight is matched by 0"):
        plan.role({"head.*": "vocab"}, "norm.weight")
    with pytest.raises(KeyError, match=r"head\.weight is matched by 2"):
        plan.role({"head.*": "vocab", "*.weight": "replicate"}, "head.weight")


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (GPTConfig(hidden=100, heads=3), ["model.heads"]),
        (LlamaConfig(hidden=100, heads=3, kv_heads=2), ["model.heads", "model.kv_heads"]),
        (LlamaConfig(hidden=36, heads=4, kv_heads=4), ["model.heads"]),  # heads of odd width cannot be rotated
        (LlamaConfig(hidden=64, heads=4, kv_heads=3), ["model.kv_heads"]),
    ],
)
def test_sizes_that_contradict_each_other(config, keys):
    assert [violation.key for violation in config.violations()] == keys
