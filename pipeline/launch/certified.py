"""Whether a certificate is that of a job: of its configuration, layout, code version and data. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.common import artifact
from pipeline.common.errors import UserError, Violation
from pipeline.common.git_commit import commit
from pipeline.common.texts import first_names
from pipeline.config import phases
from pipeline.config.schema import RunConfig

FILE = "certificate.json"
#: Groups that decide what a job computes.
GROUPS = ("model", "training", "optimizer", "parallel", "precision", "lora", "data", "checkpoint")
#: Keys of these groups that do not.
WITHOUT_EFFECT = frozenset(
    (
        *("training.timeout_minutes", "training.profile", "training.profile_ranks", "training.validate_every"),
        *("training.validation_batches", "training.token_budget", "training.check_replicas_every"),
        "training.recompute_every",
        *("data.prefetch", "data.verify"),
        *("checkpoint.keep", "checkpoint.keep_every", "checkpoint.every_minutes", "checkpoint.max_failures", "checkpoint.failing_minutes"),
        *("checkpoint.skip_damaged", "checkpoint.resume"),
    )
)
#: Differences that are named; the others are counted.
_SHOWN = 5


def data_of(config: RunConfig) -> dict[str, str]:
    """Return the fingerprints of the token shards of a job by folder; without those that are not there."""
    folders = [corpus.tokens or config.data.tokens for corpus in config.data.blend.values()] or [config.data.tokens]
    fingerprints = {}
    for folder in dict.fromkeys(folders):
        if (Path(folder) / artifact.MANIFEST).is_file():
            fingerprints[folder] = artifact.fingerprint(artifact.read(Path(folder), key="data.tokens", stage="tokenize"))
    return fingerprints


def check(config: RunConfig, world_size: int) -> None:
    """Refuse a job with certify.required that has no valid certificate.

    Raises:
        UserError: it has none, or one of another job, naming what differs.
    """
    UserError.raise_for(violations(config, world_size))


def violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Return why a job may not start for want of a certificate; as check."""
    if not config.certify.required:
        return []
    path = Path(config.certify.certificate or Path(config.run_dir) / FILE)
    fix = f"run stage=certify stage.world_size={world_size} with the settings of the job, or set certify.required=false"
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        wrong = list(_wrong(written, config, world_size))
    except FileNotFoundError:
        wrong = [f"{path} is not there"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        wrong = [f"{path} is not readable as a certificate ({type(error).__name__}: {error})"]
    if not wrong:
        return []
    reasons = first_names(wrong, _SHOWN, "; ", "; and ")
    return [Violation("certify.required", True, f"and the job has no valid certificate: {reasons}", fix)]


def _wrong(written: dict[str, Any], config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield what is wrong with a certificate for this job."""
    if written["certified"] is not True:
        yield "it says that the job is not certified"
    if skipped := written["planned"]["config"]["stage"]["skip"]:
        yield f"it was written with stage.skip=[{','.join(skipped)}]"
    planned = written["planned"]["world_size"]
    if world_size not in (size for _, size in phases.alone(config, planned)):
        yield f"it is about {planned} ranks, the job has {world_size}"
    now = commit()
    if now is None or now.endswith("-dirty"):
        yield f"the version of the code is {'unknown' if now is None else 'that of uncommitted changes'}, commit them"
    elif written["commit"] != now:
        yield f"it is of commit {written['commit']}, the code is {now}"
    ours = json.loads(json.dumps(dataclasses.asdict(config)))
    for group in GROUPS:
        yield from _different(written["planned"]["config"][group], ours[group], group)
    for folder, fingerprint in data_of(config).items():
        if (certified := written["data"].get(folder)) != fingerprint:
            yield f"data {folder} " + ("has changed since" if certified else "was not there or not checked")


def _different(certified: Any, ours: Any, key: str) -> Iterator[str]:
    if key in WITHOUT_EFFECT:
        return
    if isinstance(certified, dict) and isinstance(ours, dict):
        for name in dict.fromkeys((*certified, *ours)):
            yield from _different(certified.get(name), ours.get(name), f"{key}.{name}")
    elif certified != ours:
        yield f"{key}={ours}, certified with {certified}"
