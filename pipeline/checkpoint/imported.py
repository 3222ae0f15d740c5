"""What a run keeps of the Hugging Face model that it started from: config.json, generation_config.json and the tokenizer."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from pipeline.checkpoint.huggingface_export import TOKENIZER_FILES, VOCABULARIES, Original, read_original
from pipeline.checkpoint.huggingface_import import GENERATION_CONFIG
from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_folder
from pipeline.common.errors import UserError
from pipeline.data.tokenize import tokenizer_import
from pipeline.data.tokenize.tokenizer import load

log = logging.getLogger("pipeline")

#: Folder in run_dir with the files of the imported model, and the manifest that marks the import as complete.
FOLDER = "imported"


def original_of(folder: Path, tokenizer_folder: Path) -> Original | None:
    """Return what the export keeps of an imported model; None if the run has none, or has trained it with another vocabulary."""
    if not (folder / "config.json").is_file():
        return None
    if (folder / "tokenizer.json").is_file() and _vocabulary(folder) != _vocabulary(tokenizer_folder):
        log.warning("convert: token ids and generation_config.json of the imported model are not exported: the tokenizer is another one")
        return None
    return read_original(folder)


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return token -> id."""
    vocabulary: dict[str, int] = load(folder).get_vocab(with_added_tokens=True)
    return vocabulary


def copy_originals(folder: Path, source: Path, settings: dict[str, Any], totals: dict[str, Any]) -> None:
    """Copy config.json, generation_config.json and the tokenizer of the imported model, which pretraining and a later export read."""
    with atomic_folder(folder) as new:
        for name in ("config.json", GENERATION_CONFIG, *TOKENIZER_FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, new / name)
        if not (new / "tokenizer.json").is_file():
            _convert_tokenizer(source, new)
        artifact.write(new, artifact.Manifest("convert", settings, artifact.entries(new), totals))


def _convert_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer.json from a vocabulary in another format, if transformers can; its files are in the folder in any case."""
    vocabularies = ", ".join(name for name in VOCABULARIES if (source / name).is_file())
    if not vocabularies:
        log.warning("convert: %s has no tokenizer; set tokenizer.path to one with the same ids", source)
        return
    try:
        tokenizer_import.from_folder(source).save(str(folder / "tokenizer.json"))
        log.info("convert: wrote %s/tokenizer.json from %s", FOLDER, vocabularies)
    except UserError as error:
        log.warning("convert: copied %s, but not as tokenizer.json, which the other stages need; %s", vocabularies, error)
