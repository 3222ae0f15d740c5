"""Tokenizers of other libraries as Hugging Face ones: tiktoken's files of ranks, SentencePiece's models.

What comes out is held against the library that the file is from, on texts that are hard to split.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from pipeline.config.data import TokenizerConfig
from pipeline.data.tokenize.engines import HARD_TEXTS
from pipeline.data.tokenize.tokenizer import encode
from pipeline.data.tokenize.tokenizer_training import split_pattern
from pipeline.errors import UserError

CHECKED = [*HARD_TEXTS, "The quick brown fox jumps over the lazy dog.", "Über 1.234 Tännchen stehen im Wald,\nund 56 davon sind grün."]
"""Texts on which the two libraries must agree."""


def read(source: Path, wanted: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a file.

    Args:
        source: NAME.tiktoken or NAME.model.
        wanted: its split pattern (tiktoken's files hold none), end token and special tokens.

    Raises:
        UserError: the file is of neither kind or damaged, its library is not installed, or the ids differ.
    """
    readers = {".tiktoken": _read_tiktoken, ".model": _read_sentencepiece}
    if source.suffix not in readers:
        raise UserError.of("tokenizer.source", source, "must end in .tiktoken or .model", "name such a file")
    try:
        tokenizer, reference = readers[source.suffix](source, wanted)
    except ImportError as error:
        fix = f"pip install {'tiktoken' if source.suffix == '.tiktoken' else 'sentencepiece protobuf'} transformers"
        raise UserError.of("tokenizer.source", source, f"cannot be read: {error}", fix) from error
    except UserError:
        raise
    except Exception as error:  # the libraries raise nothing more precise
        raise UserError.of("tokenizer.source", source, f"cannot be read: {error}", "fetch it again") from error
    tokenizer.encode_special_tokens = True
    added = [f"a {token.content} b" for token in tokenizer.get_added_tokens_decoder().values()]
    for text in [*CHECKED, *added]:
        if encode(tokenizer, [text])[0].tolist() != reference(text):
            rule = f"has other ids in its own library than as a Hugging Face tokenizer, for {text[:40]!r}"
            raise UserError.of(
                "tokenizer.source", source, rule, "set tokenizer.split and digits as it was trained with, or convert it yourself"
            )
    return tokenizer


Reference = Callable[[str], list[int]]


def _read_tiktoken(source: Path, wanted: TokenizerConfig) -> tuple[Tokenizer, Reference]:
    """Ranks of byte sequences, which say the order of the merges too."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern, special = split_pattern(wanted.split, wanted.digits), [wanted.end_of_document, *wanted.special_tokens]
    tokenizer = TikTokenConverter(str(source), pattern=pattern, extra_special_tokens=special).converted()
    tokenizer.post_processor = None
    original = tiktoken.Encoding(source.stem, pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(str(source)), special_tokens={})
    return tokenizer, original.encode_ordinary


def _read_sentencepiece(source: Path, wanted: TokenizerConfig) -> tuple[Tokenizer, Reference]:
    """A Unigram or BPE model with its normalization and control symbols."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    from pipeline.data.tokenize import tokenizer_sentencepiece

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(source.read_bytes())
    tokenizer = tokenizer_sentencepiece.convert(proto)
    tokenizer.add_special_tokens([wanted.end_of_document, *wanted.special_tokens])
    return tokenizer, SentencePieceProcessor(model_proto=source.read_bytes()).encode
