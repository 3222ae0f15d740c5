"""What we use of the installed DeepSpeed is there: keys of its configuration, its schedules, and every name of its code."""

import ast
import logging
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from pipeline.config.deepspeed_json import read
from pipeline.config.deepspeed_keys import OFF, ONLY, SECTIONS, SETS, WITHOUT_EFFECT
from pipeline.config.deepspeed_sections import READERS
from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.training import TrainingConfig
from pipeline.training.lr_schedule import learning_rate
from tests.test_private_names import imported, qualified

PIPELINE = Path(__file__).resolve().parents[2] / "pipeline"


def names(model):
    """The keys of a section of DeepSpeed's configuration, with the older names of some."""
    return {name for key, field in model.model_fields.items() for name in (key, field.alias) if name}


def test_every_key_of_deepspeed_is_known():
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config, offload_config

    known = {*SETS, *WITHOUT_EFFECT, *ONLY, *OFF, *SECTIONS}
    sections = {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
    }
    unknown = {f"{section}.{name}" for section, model in sections.items() for name in names(model)} - known
    assert not unknown
    for section, model in {"bf16": precision_config.DeepSpeedBF16Config, "fp16": precision_config.DeepSpeedFP16Config}.items():
        read_here = {key.removeprefix(f"{section}.") for key, _, _ in READERS[section]({section: dict.fromkeys(names(model), False)})}
        refused = [
            key
            for key, _, meaning in READERS[section]({section: dict.fromkeys(names(model), 0)})
            if getattr(meaning, "rule", "") == "no such key"
        ]
        assert read_here == names(model) - {"enabled"}
        assert not refused


@pytest.mark.parametrize(
    ("kind", "parameters", "lead"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 5}, 2),
        ("WarmupDecayLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 5, "total_num_steps": 20}, 2),
        ("WarmupCosineLR", {"warmup_num_steps": 5, "total_num_steps": 20, "cos_min_ratio": 0.1}, 1),
    ],
)
def test_learning_rates_are_those_of_the_scheduler(kind, parameters, lead, tmp_path):
    """DeepSpeed's update n has the rate of our update n - 2; in the cosine's decay, that of n - 1."""
    from deepspeed.runtime import lr_schedules

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = getattr(lr_schedules, kind)(optimizer, warmup_type="linear", **parameters)
    stock = []
    for _ in range(20):
        stock.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    path = tmp_path / f"{kind}.json"
    path.write_text(
        f'{{"optimizer": {{"type": "Adam", "params": {{"lr": 0.01}}}}, "scheduler": {{"type": "{kind}", "params": '
        + str({**parameters, "warmup_type": "linear"}).replace("'", '"')
        + "}}"
    )
    settings = {key: value for key, (value, _) in read(str(path)).values.items()}
    assert not read(str(path)).violations
    optimizers = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith("optimizer.")}
    ours = [learning_rate(n, OptimizerConfig(**optimizers), TrainingConfig(steps=settings.get("training.steps", 20))) for n in range(20)]
    assert stock[:2] == [0, 0]
    assert stock[2:6] == pytest.approx(ours[:4])
    assert stock[6 + lead :] == pytest.approx(ours[6:-lead])


def mentioned():
    """Every name of DeepSpeed that the package uses."""
    for path in PIPELINE.rglob("*.py"):
        if "deepspeed" in (text := path.read_text(encoding="utf-8")):
            tree = ast.parse(text)
            names = {name: whole for name, whole in imported(tree).items() if whole.partition(".")[0] == "deepspeed"}
            yield from names.values()
            yield from filter(None, (qualified(node, names) for node in ast.walk(tree) if isinstance(node, ast.Attribute)))
            yield from re.findall(r'"(deepspeed(?:\.\w+){2,})"', text)


def test_every_name_of_deepspeed_exists():
    found = set(mentioned())
    assert "deepspeed.utils.zero_to_fp32.parse_optim_states" in found
    for name in sorted(found):
        resolve_name(name)
