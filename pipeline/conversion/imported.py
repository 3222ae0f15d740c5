"""What a run keeps of the Hugging Face model that it started from: config.json, generation settings, tokenizer and license."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_folder, digest
from pipeline.common.errors import UserError
from pipeline.config.run_tokenizer import IMPORTED
from pipeline.conversion.huggingface_export import TOKENIZER_FILES, VOCABULARIES, copy_tokenizer_files
from pipeline.conversion.huggingface_import import GENERATION_CONFIG
from pipeline.conversion.original import Original, read_original
from pipeline.data.tokenize import tokenizer_import
from pipeline.data.tokenize.tokenizer import load

log = logging.getLogger("pipeline")

#: Folder in run_dir with the files of the imported model, and the manifest that marks the import as complete.
FOLDER = IMPORTED
#: Patterns of the files with the terms under which a model and what is made of it may be used.
_TERMS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*")


def folder_of(checkpoint: Path) -> Path:
    """Return the folder with the files of the model that the run of a checkpoint started from; it may not exist."""
    return checkpoint.resolve().parent.parent / FOLDER


def original_of(folder: Path, tokenizer_folder: Path) -> Original | None:
    """Return what is kept of an imported model; None if the run has none, or has another vocabulary.

    Args:
        folder: as folder_of returns it.
        tokenizer_folder: tokenizer.path.

    Raises:
        UserError: a file is damaged.
    """
    if not (folder / "config.json").is_file():
        return None
    if (folder / "tokenizer.json").is_file() and not _have_same_vocabulary(folder, tokenizer_folder):
        log.warning(
            "token ids and generation_config.json of the imported model are not used: the tokenizer %s is another one", tokenizer_folder
        )
        return None
    return read_original(folder)


def _have_same_vocabulary(*folders: Path) -> bool:
    """Whether two tokenizers have the same tokens with the same ids."""
    if len({digest(folder / "tokenizer.json") for folder in folders}) == 1:
        return True
    first, second = (load(folder).get_vocab(with_added_tokens=True) for folder in folders)
    return bool(first == second)


def copy_originals(folder: Path, source: Path, tokenizer: Path, settings: dict[str, Any], totals: dict[str, Any]) -> None:
    """Copy what training, generation and a later export need of the imported model.

    Args:
        folder: as folder_of returns it.
        source: folder with its config.json and license, if it has some.
        tokenizer: folder with its tokenizer, if it has one.
        settings, totals: of the manifest.
    """
    with atomic_folder(folder) as new:
        _copy(source, new)
        copy_tokenizer_files(tokenizer, new)
        if not (new / "tokenizer.json").is_file():
            _convert_tokenizer(tokenizer, new)
        artifact.write(new, artifact.Manifest("convert", settings, artifact.entries(new), totals))


def tokenizer_folder(*folders: Path) -> Path:
    """Return the first folder that has a tokenizer, in itself or in `tokenizer` below it; the first of all if none has."""
    places = [place for folder in folders for place in (folder, folder / "tokenizer")]
    return next((place for place in places if any((place / name).is_file() for name in TOKENIZER_FILES)), folders[0])


def carry(checkpoint: Path, run_dir: Path) -> None:
    """Copy what a run keeps of an imported model to another run, which starts with one of its checkpoints."""
    source, folder = folder_of(checkpoint), run_dir / FOLDER
    if source.is_dir() and source != folder.resolve():
        with atomic_folder(folder) as new:
            _copy(source, new)


def copy_terms(folder: Path, output: Path) -> None:
    """Copy the license of an imported model to an export."""
    for path in (path for pattern in _TERMS for path in folder.glob(pattern) if path.is_file()):
        shutil.copyfile(path, output / path.name)


def _copy(source: Path, folder: Path) -> None:
    """Copy the files of a model except its weights."""
    for name in ("config.json", GENERATION_CONFIG):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    copy_tokenizer_files(source, folder)
    copy_terms(source, folder)


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
