"""Weights of further losses: their values by step, what is refused, and that a run or an import may change them."""

from types import SimpleNamespace

import pytest

from pipeline.checkpoint import compatibility
from pipeline.common.errors import UserError
from pipeline.config import loss_weights, renamed
from pipeline.config.layout import Layout
from pipeline.config.rules import check
from pipeline.planner import rank_report
from tests.world import configured

#: That of DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 4.2.
RECIPE = (
    *("model=deepseek-tiny", "training.bias_update_speed=0", "training.bias_update_speed_schedule=[{until_step:143,value:0.001}]"),
    *("training.mtp_loss=0.1", "training.mtp_loss_schedule=[{until_step:100,value:0.3}]"),
)


def at(step, *settings):
    config = configured("stage=pretrain", *settings)
    return loss_weights.at(config.model, config.training, step)


def test_the_recipe_of_deepseek_v3():
    before, between, after = (at(step, *RECIPE) for step in (99, 142, 143))
    assert before == {"balance_loss": 0.0001, "bias_update_speed": 0.001, "mtp_loss": 0.3}
    assert between == {**before, "mtp_loss": 0.1}
    assert after == {**between, "bias_update_speed": 0.0}
    assert at(0, "model=mixtral-tiny", "training.balance_loss=0") == {"balance_loss": 0.0, "z_loss": 0.0}
    assert at(0, "model=llama-tiny") == {}


def test_a_dry_run_shows_the_values_of_the_run():
    config = configured("stage=pretrain", *RECIPE)
    text = "\n".join(rank_report.batch_lines(config, Layout.of(config, 1)))
    assert "  bias_update_speed 0.001 until step 143, then 0\n" in text
    assert "  mtp_loss        0.3 until step 100, then 0.1" in text


TWICE = "training.z_loss_schedule=[{until_step:5,value:1},{until_step:5,value:%d}]"


@pytest.mark.parametrize(
    ("model", "setting", "message"),
    [
        ("llama-tiny", "training.balance_loss=0", "training.balance_loss=0.0: has no effect with model.family=llama"),
        ("mixtral-tiny", "training.mtp_loss_schedule=[{until_step:5,value:1}]", "1 entries: has no effect with model.family=mixtral"),
        ("deepseek-tiny model.mtp_depth=0", "training.mtp_loss=0.1", "training.mtp_loss=0.1: has no effect with model.mtp_depth=0"),
        ("mixtral-tiny", TWICE % -1, "training.z_loss_schedule.1.value=-1.0: must be at least 0"),
        ("mixtral-tiny", TWICE % 2, "training.z_loss_schedule.1.until_step=5: must be after step 5"),
    ],
)
def test_what_is_refused(model, setting, message):
    config = configured("stage=pretrain", *f"model={model}".split(), setting)
    found = [str(violation) for violation in check.violations(config, 1)]
    assert any(message in text for text in found), found


def test_a_run_may_change_them_also_if_its_checkpoint_has_the_former_keys():
    config = configured("stage=pretrain", *RECIPE)
    saved = {"model": {"family": "deepseek_v3", "balance_loss": 0.02, "bias_step": 0.5, "mtp_loss": 0.3}, "training": {"steps": 1000}}
    saved["model"] |= {name: getattr(config.model, name) for name in config.model.__dataclass_fields__}
    renamed.update(saved)
    checkpoint = SimpleNamespace(path="step-1", config=saved)
    compatibility.check_same_model(checkpoint, config)
    changes = {key: (old, new) for key, old, new in compatibility.changed_settings(checkpoint.config, config)}
    assert changes["training.bias_update_speed"] == (0.5, 0.0)
    assert changes["training.mtp_loss"] == (0.3, 0.1)
    assert changes["training.balance_loss"] == (0.02, None)
    assert "training.z_loss_schedule" not in changes, "the checkpoint was written before that key existed"
    other = configured("stage=pretrain", *RECIPE, "model.layers=1")
    with pytest.raises(UserError, match=r"model\.layers=1"):
        compatibility.check_same_model(checkpoint, other)
