"""Import of tokenizers of other libraries as Hugging Face tokenizers: tiktoken's rank files, SentencePiece's models.

The imported tokenizer is verified against the original library, on texts that are hard to split.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from pipeline.common.errors import UserError
from pipeline.config.data import TokenizerConfig
from pipeline.data.tokenize.encoders import HARD_TEXTS
from pipeline.data.tokenize.tokenizer import encode
from pipeline.data.tokenize.tokenizer_training import split_pattern

VERIFIED_TEXTS = [
    *HARD_TEXTS,
    "The quick brown fox jumps over the lazy dog.",
    "Über 1.234 Tännchen stehen im Wald,\nund 56 davon sind grün.",
]
"""Texts for which both libraries must return the same ids."""


def read(source: Path, config: TokenizerConfig) -> Tokenizer:
    """Import the tokenizer of a file.

    Args:
        source: NAME.tiktoken or NAME.model.
        config: split pattern (tiktoken's files contain none), end-of-document token and special tokens.

    Raises:
        UserError: the file has an unsupported format or is damaged, its library is not installed, or the ids differ.
    """
    readers = {".tiktoken": _read_tiktoken, ".model": _read_sentencepiece}
    if source.suffix not in readers:
        raise UserError.of("tokenizer.source", source, "must end in .tiktoken or .model", "set the path of such a file")
    try:
        tokenizer, reference = readers[source.suffix](source, config)
    except ImportError as error:
        fix = f"pip install {'tiktoken' if source.suffix == '.tiktoken' else 'sentencepiece protobuf'} transformers"
        raise UserError.of("tokenizer.source", source, f"cannot be read: {error}", fix) from error
    except UserError:
        raise
    except Exception as error:  # the libraries raise no more specific type
        raise UserError.of("tokenizer.source", source, f"cannot be read: {error}", "download it again") from error
    tokenizer.encode_special_tokens = True
    added = [f"a {token.content} b" for token in tokenizer.get_added_tokens_decoder().values()]
    for text in [*VERIFIED_TEXTS, *added]:
        if encode(tokenizer, [text])[0].tolist() != reference(text):
            rule = f"has different ids in its own library than as a Hugging Face tokenizer, for {text[:40]!r}"
            fix = "set tokenizer.split and tokenizer.digits to the values that it was trained with, or convert it with another tool"
            raise UserError.of("tokenizer.source", source, rule, fix)
    return tokenizer


def from_folder(folder: Path) -> Tokenizer:
    """Convert the vocabulary of a Hugging Face model without tokenizer.json, such as vocab.json and merges.txt, vocab.txt or spiece.model.

    Raises:
        UserError: transformers is not installed, or cannot convert it.
    """
    try:
        from transformers import AutoTokenizer

        backend = getattr(AutoTokenizer.from_pretrained(folder), "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError("its class has no tokenizer.json")
    except Exception as error:  # the libraries raise no more specific type
        fix = "pip install transformers sentencepiece and import again, or set tokenizer.path to a tokenizer with the same ids"
        raise UserError.of("tokenizer", folder, f"cannot be converted: {error}", fix) from error
    return backend


Reference = Callable[[str], list[int]]
"""The original library's encoding: text -> token ids."""


def _read_tiktoken(source: Path, config: TokenizerConfig) -> tuple[Tokenizer, Reference]:
    """Read byte sequences and their ranks; the ranks determine the merges."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern, special = split_pattern(config.split, config.digits), [config.end_of_document, *config.special_tokens]
    tokenizer = TikTokenConverter(str(source), pattern=pattern, extra_special_tokens=special).converted()
    tokenizer.post_processor = None
    original = tiktoken.Encoding(source.stem, pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(str(source)), special_tokens={})
    return tokenizer, original.encode_ordinary


def _read_sentencepiece(source: Path, config: TokenizerConfig) -> tuple[Tokenizer, Reference]:
    """Read a Unigram or BPE model with its normalization and control symbols."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    from pipeline.data.tokenize import tokenizer_sentencepiece

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(source.read_bytes())
    tokenizer = tokenizer_sentencepiece.convert(proto)
    tokenizer.add_special_tokens([config.end_of_document, *config.special_tokens])
    return tokenizer, SentencePieceProcessor(model_proto=source.read_bytes()).encode
