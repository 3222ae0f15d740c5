"""Refusal of jobs that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.config.rules import check
from pipeline.planner import memory_check
from pipeline.planner.plan import hardware_of, plan
from pipeline.planner.search import Choice, nearest, settings_of
from tests.helpers import pipeline
from tests.world import configured

BATCH = ("training.sequence_length=2048", "training.global_batch_size=32", "training.micro_batch_size=8")
JOB = ("stage=pretrain", "model=llama3.2-1b", *BATCH)
V100 = ("cluster.hardware=v100-16", "cluster.tasks_per_node=4")


def test_products_in_8_bits_require_a_gpu_that_has_them():
    def refused(*words: str) -> list[str]:
        config = configured("stage=pretrain", "model=llama3-8b", "precision=fp8", *words)
        return [str(violation) for violation in check.violations(config, 1) if violation.key == "precision.fp8"]

    assert refused("cluster.hardware=h100") == refused() == []
    (text,) = refused("cluster.hardware=a100-40")
    assert "requires a GPU with 8-bit products; cluster.hardware=a100-40 is " in text


@pytest.mark.long
def test_a_job_that_does_not_fit_is_refused_with_the_nearest_layout_that_does():
    config = configured(*JOB, *V100)
    result = memory_check.planned(config, 4)
    assert result is not None
    assert not result.estimate.fits
    refused = memory_check.violation(config, 4, result)
    assert refused is not None
    assert "nearest layout that fits" in refused.fix
    choice = nearest(config, 4, hardware_of(config))
    assert choice is not None
    assert " ".join(choice.settings) in refused.fix
    again = plan(choice.plan.config, 4, hardware_of(config))
    assert again.estimate.fits
    anyway = replace(config, cluster=replace(config.cluster, check_memory=False))
    assert memory_check.violation(anyway, 4, result) is None


def test_adapters_are_planned_with_their_own_memory():
    """What does not fit with all weights trained may fit with adapters, and less memory holds weights in 4 bits."""
    job = ("stage=finetune", "model=llama3.2-3b", "training.sequence_length=512", "training.micro_batch_size=1", *V100)
    totals = []
    for words in ((), ("lora.rank=16",), ("lora.rank=16", "lora.quantize=nf4")):
        result = memory_check.planned(configured(*job, *words), 4)
        assert result is not None
        totals.append((result.estimate.memory.total, result.estimate.fits))
    assert [fits for _, fits in totals] == [False, True, True]
    assert totals[1][0] - totals[2][0] > 1e9


def test_the_nearest_layout_names_what_it_sets_back():
    """The user's line with these settings is the layout that fits."""
    words = ("stage=pretrain", "model=mixtral-tiny", *V100, "training.micro_batch_size=1")
    config = configured(*words, "parallel.expert=4", "training.activation_checkpointing=full")
    fitting = configured(*words, "parallel.pipeline=2")
    choice = Choice(plan(fitting, 4, hardware_of(fitting)), settings_of(fitting))
    changes = [*choice.settings, *memory_check.restored(config, choice)]
    composed = configured(*words, "parallel.expert=4", "training.activation_checkpointing=full", *changes)
    assert composed.parallel == fitting.parallel
    assert composed.training == fitting.training


def test_without_hardware_nothing_is_planned():
    config = configured(*JOB)
    assert memory_check.planned(config, 4) is None
    assert memory_check.violation(config, 4, None) is None


def test_the_dry_run_refuses_it():
    text = pipeline(*JOB, *V100, "dry_run=true", expect=2)
    assert "GB on a GPU of 17.2 GB" in text
    assert "cluster.check_memory=false" in text
