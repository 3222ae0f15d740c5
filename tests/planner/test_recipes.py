"""The experiments of conf/experiment/ fit into the GPUs of the clusters for which the README plans them."""

from __future__ import annotations

import pytest

from pipeline.config.rules import check
from pipeline.planner.plan import hardware_of, plan
from tests.world import configured

GPUS = {"dense-1.7b": 64, "dense-9b": 256, "moe-30b-a3b": 256, "moe-235b-a22b": 512}


@pytest.mark.parametrize("cluster", ["juwels", "leonardo", "lumi", "jupiter"])
@pytest.mark.parametrize("recipe", [name if name == "dense-1.7b" else pytest.param(name, marks=pytest.mark.long) for name in GPUS])
def test_a_recipe_is_legal_and_fits(recipe, cluster):
    config = configured("stage=pretrain", f"experiment={recipe}", f"cluster={cluster}", "cluster.account=any")
    nodes = GPUS[recipe] // config.cluster.tasks_per_node
    config = configured("stage=pretrain", f"experiment={recipe}", f"cluster={cluster}", "cluster.account=any", f"cluster.nodes={nodes}")
    assert not check.violations(config, GPUS[recipe])
    found = plan(config, GPUS[recipe], hardware_of(config)).estimate
    assert found.fits
    assert config.optimizer.warmup_steps < config.training.steps // 10
