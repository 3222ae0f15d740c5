"""The objectives by name: that of training.objective, or the one that a model's configuration gives in `objective`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.data.load import blend, validation_split
from pipeline.data.load.objectives.causal import Causal
from pipeline.data.load.objectives.classification import Classification
from pipeline.data.load.objectives.masked import Masked
from pipeline.data.load.objectives.masked_diffusion import MaskedDiffusion
from pipeline.data.load.objectives.objective import Objective
from pipeline.data.load.objectives.pairs import Pairs
from pipeline.data.load.objectives.span_corruption import SpanCorruption
from pipeline.data.load.objectives.supervised import Preferences, Supervised
from pipeline.data.tokenize.tokenizer import affixes, check_same, load

log = logging.getLogger("pipeline")

OBJECTIVES: dict[str, type[Objective]] = {
    "causal": Causal,
    "classification": Classification,
    "dpo": Preferences,
    "masked": Masked,
    "masked_diffusion": MaskedDiffusion,
    "pairs": Pairs,
    "span_corruption": SpanCorruption,
    "supervised": Supervised,
}


def objective_of(config: RunConfig) -> type[Objective]:
    """The configured objective; that of the model's family with training.objective=auto."""
    return OBJECTIVES[config.objective]


def open_training(config: RunConfig, share: tuple[int, int] = (0, 1)) -> Objective:
    """The objective of the run over its training data; arguments and errors as in Objective.open_training."""
    return objective_of(config).open_training(config, share)


def open_validation(config: RunConfig, share: tuple[int, int] = (0, 1)) -> Objective | None:
    """The objective of the run over its validation data; None if it holds no sample."""
    return objective_of(config).open_validation(config, share)


def open_data(config: RunConfig, share: tuple[int, int]) -> tuple[Objective, Objective | None]:
    """Open the training data, and the validation data if the validation split contains a sample.

    Args:
        share: (rank, world size).

    Raises:
        UserError: token shards are missing or damaged, or contain token ids outside the embedding.
    """
    training = open_training(config, share)
    check_vocabulary(config, training, share[0])
    validation = open_validation(config, share)
    if validation is not None:
        warn_of_few_documents(validation, share[0])
    elif config.training.validate_every and share[0] == 0:
        log.warning("training.validate_every=%d has no effect: there is no validation split", config.training.validate_every)
    return training, validation


def warn_of_few_documents(validation: Objective, rank: int) -> None:
    """Warn on rank 0 if the loss of a validation split says little."""
    if rank != 0:
        return
    shards = validation.data_key == "data.tokens"
    fix = "stage=shard with a larger data.validation_fraction writes more" if shards else "list files with more lines"
    validation_split.warn_of_few_documents(validation.documents, fix)


def check_vocabulary(config: RunConfig, data: Objective, rank: int) -> None:
    """Refuse data with token ids outside the embedding, and on rank 0 that of another tokenizer.

    Raises:
        UserError: the vocabulary of the data is larger than the model's, or tokenizer.path is not the tokenizer of the data.
    """
    if rank == 0 and data.data_key == "data.tokens":
        _check_tokenizer(config, Path(config.tokenizer.path), data.samples.corpora[0].totals)
    UserError.raise_for(blend.vocabulary_violations(config, data.samples.vocab_size))


def _check_tokenizer(config: RunConfig, folder: Path, totals: dict[str, Any]) -> None:
    """Refuse token shards of another tokenizer or tokenizer.bos; warn of old ones, of which nobody has chosen how documents begin."""
    source = "data.blend" if config.data.blend else f"data.tokens={config.data.tokens}"
    fix = "set tokenizer.path to the folder that stage=tokenize used, or tokenize the text with this one"
    check_same(folder, totals.get("tokenizer"), source, fix)
    written, wanted = "none" if totals.get("bos") is None else "document", config.tokenizer.bos
    if wanted not in ("auto", written):
        rule = f"differs from {source}, which was tokenized with tokenizer.bos={written}"
        raise UserError.of("tokenizer.bos", wanted, rule, f"set it to {written}, or run stage=tokenize into another folder")
    if "bos" not in totals and (folder / "tokenizer.json").is_file():
        before, after = affixes(load(folder))
        if len(before) == 1 and not after and before != [totals["end_of_document"]]:
            text = "%s is of an earlier version: its documents do not begin with token %d, as texts do in %s, nor do prompts and exports"
            log.warning("%s of this run; stage=tokenize writes it", text % (source, before[0], folder))
