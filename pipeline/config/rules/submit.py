"""Rules of the group submit; those of each of its jobs are checked in launch/stage_chain.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.common import knobs
from pipeline.common.errors import Violation
from pipeline.config.command_line import key_of, nearest
from pipeline.config.rules import paths
from pipeline.config.schema import RunConfig, SubmitConfig
from pipeline.config.stages import INTERACTIVE_STAGES, STAGES

#: Stages that may be jobs.
JOBS = tuple(stage for stage in STAGES if stage not in INTERACTIVE_STAGES)
EXAMPLE = "'submit.stages=[shard,train_tokenizer,tokenize,pretrain,convert]'"
#: Keys that the chain sets for all of its jobs.
_OWN = ("stage", "submit", "dry_run", "hydra")


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the rules that the settings of stage=submit violate: every other group is checked for each stage."""
    found = knobs.range_violations(config.submit, "submit.")
    yield from found
    yield from paths.violations(config)
    if not found:
        yield from _stages(config.submit)
        yield from _overrides(config.submit)


def _stages(submit: SubmitConfig) -> Iterator[Violation]:
    """There are some, each once."""
    if not submit.stages:
        yield Violation("submit.stages", "[]", "is required", f"name the stages in their order, for example {EXAMPLE}")
    for stage in dict.fromkeys(submit.stages):
        if stage in INTERACTIVE_STAGES:
            yield Violation("submit.stages", stage, "is no batch job", "remove it from the list")
        elif stage not in JOBS:
            yield Violation("submit.stages", stage, f"must be one of {', '.join(JOBS)}", nearest("", stage, list(JOBS)))
        elif (count := submit.stages.count(stage)) > 1:
            yield Violation("submit.stages", stage, f"is named {count} times", "name it once; submit a second chain for other settings")


def _overrides(submit: SubmitConfig) -> Iterator[Violation]:
    """They are those of stages of the chain, in the form of the command line."""
    for stage, words in submit.overrides.items():
        key = f"submit.overrides.{stage}"
        if stage not in submit.stages:
            rule = f"is for a stage that is none of submit.stages=[{','.join(submit.stages)}]"
            yield Violation(
                key, ",".join(words), rule, nearest("submit.overrides.", stage, submit.stages) if submit.stages else "remove it"
            )
        for word in words:
            if word.startswith("-") or not re.match(r"[+~]*\w[\w./@:-]*=", word):
                yield Violation(key, repr(word), "is not of the form key=value", f"write '{key}=[key=value]'")
            elif key_of(word).partition(".")[0].partition("/")[0] in _OWN and not re.match(r"[+]*stage\.", word):
                yield Violation(key, word, "is set for the whole chain", "remove it here")
