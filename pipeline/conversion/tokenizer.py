"""The tokenizer of a checkpoint: that of tokenizer.path, which must be the one of its training."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint import compatibility
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.common.errors import UserError
from pipeline.config.data import TokenizerConfig
from pipeline.conversion import imported
from pipeline.data.tokenize.tokenizer import TextEncoder


def open_tokenizer(tokenizer: TokenizerConfig, run_dir: Path) -> TextEncoder:
    """Open the tokenizer.

    Raises:
        UserError: tokenizer.path contains none; the message names that of an imported model.
    """
    path, folder = Path(tokenizer.path), run_dir / imported.FOLDER
    if not (path / "tokenizer.json").is_file() and (folder / "tokenizer.json").is_file():
        fix = f"set tokenizer.path={folder}, the tokenizer of the imported model, or the one of the training data"
        raise UserError.of("tokenizer.path", path, "holds no tokenizer.json", fix)
    return TextEncoder.of(tokenizer)


def check_tokenizer(tokenizer: TextEncoder, weights: MergedWeights, vocab_size: int) -> None:
    """Refuse a tokenizer with more ids than the embedding has rows (vocab_size), and another one than that of the training.

    Raises:
        UserError: it does not fit.
    """
    folder = tokenizer.path.parent
    if tokenizer.vocab_size > vocab_size:
        rule = f"has {tokenizer.vocab_size} entries, which exceeds model.vocab_size={vocab_size} of the checkpoint"
        raise UserError.of("tokenizer.path", folder, rule, "set it to the tokenizer of the training run")
    compatibility.check_tokenizer(weights.path, weights.config, folder)
