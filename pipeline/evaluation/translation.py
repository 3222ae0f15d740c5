"""BLEU (Papineni et al. 2002) and chrF (Popović 2015) of completions, by sacrebleu (Post 2018). The only file that imports it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.config.stages import Generate
from pipeline.evaluation import record
from pipeline.generation.completions import COMPLETIONS

log = logging.getLogger("pipeline")

#: Maximum number of line numbers in a message.
_SHOWN = 10


class TranslationScore(NamedTuple):
    """A score from 0 to 100, and the settings that it was computed with (sacrebleu's signature)."""

    value: float
    signature: str


def check(stage: Generate) -> None:
    """Refuse metrics that cannot be computed, and log the lines without a reference.

    Raises:
        UserError: sacrebleu is not installed, or no line of stage.prompts has a reference.
    """
    if not stage.metrics or stage.prompts is None or not Path(stage.prompts).is_file():
        return
    shown = f"[{','.join(stage.metrics)}]"
    try:
        import sacrebleu  # noqa: F401
    except ImportError as error:
        rule = f"require sacrebleu, which cannot be imported: {error}"
        raise UserError.of("stage.metrics", shown, rule, "pip install -c tools/constraints.txt -e '.[sacrebleu]'") from error
    with open(stage.prompts, "rb") as handle:
        lines = [(number, references(_parsed(line))) for number, line in enumerate(handle, start=1) if line.strip()]
    missing = [number for number, texts in lines if not texts]
    if len(missing) == len(lines):
        rule = f"compare with references, and no line of stage.prompts={stage.prompts} has one"
        raise UserError.of("stage.metrics", shown, rule, 'write lines such as {"prompt": "Im Wald", "reference": "In the forest"}')
    if missing:
        numbers = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        log.warning('%s: %d lines have no "reference" and are not scored: %s', stage.prompts, len(missing), numbers)


def references(fields: Any) -> list[str]:
    """Return the references of a line: a text, or a list of texts; empty if it has none."""
    reference = fields.get("reference") if isinstance(fields, dict) else None
    texts = [text for text in (reference if isinstance(reference, list) else [reference]) if isinstance(text, str) and text.strip()]
    return texts if not isinstance(reference, list) or len(texts) == len(reference) else []


def scores(metrics: Sequence[str], texts: Sequence[str], expected: Sequence[Sequence[str]]) -> dict[str, TranslationScore]:
    """Return the score of a corpus for each metric.

    Args:
        metrics: "bleu", "chrf".
        expected: the references of each of them, at least one.
    """
    from sacrebleu.metrics import BLEU, CHRF

    most = max(map(len, expected))
    streams = [
        [references_of_text[number] if number < len(references_of_text) else None for references_of_text in expected]
        for number in range(most)
    ]
    scored = {}
    for name in metrics:
        metric = {"bleu": BLEU, "chrf": CHRF}[name]()
        value = metric.corpus_score(list(texts), streams).score
        scored[name] = TranslationScore(float(value), str(metric.get_signature()))
    return scored


def write(run_dir: Path, step: int, prompts: Path, folder: Path, metrics: Sequence[str]) -> None:
    """Score the completions of a folder, log the scores, and record them as those of a checkpoint, named after the prompts."""
    lines = map(json.loads, (folder / COMPLETIONS).read_text(encoding="utf-8").rstrip("\n").split("\n"))
    pairs = [(line["generated"]["text"].strip(), given) for line in lines if (given := references(line))]
    if not pairs:
        log.warning("%s: no completion has a reference; nothing is scored", folder)
        return
    scored = scores(metrics, *zip(*pairs, strict=True))
    name = re.sub(r"[^\w.-]", "_", prompts.stem)
    values = {name: {metric: score.value for metric, score in scored.items()} | {"samples": len(pairs)}}
    settings = artifact.read(folder, key="stage.output", stage="generate").settings
    record.write(
        run_dir, step, f"translation-{name}", values, settings | {"signatures": {m: score.signature for m, score in scored.items()}}
    )
    for metric, score in scored.items():
        log.info("step %d, %s: %s %.2f over %d completions (%s)", step, name, metric, score.value, len(pairs), score.signature)


def _parsed(line: bytes) -> Any:
    """The content of a line; None if it is not JSON, which generate rejects."""
    try:
        return json.loads(line)
    except ValueError:
        return None
