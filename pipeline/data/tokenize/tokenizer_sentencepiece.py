"""SentencePiece: training of Unigram models with its trainer, and conversion of its models to Hugging Face tokenizers."""

from __future__ import annotations

import io
import re
import string
from collections.abc import Iterable
from typing import Any

from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pipeline.common.errors import UserError
from pipeline.data.tokenize.training_progress import UnigramProgress, sentencepiece_messages

SPACE = "▁"
"""The character that represents a space in pieces, U+2581."""

EXCLUDED_SCORE = -1000.0
"""Score (log-probability) of the entries that text must not be encoded as: lower than the sum of the scores of their characters.

SentencePiece excludes bytes, control symbols and the unknown piece from its search; `tokenizers` searches all entries. The score excludes
an entry only if the vocabulary contains the characters of its name.
"""

USER_DEFINED_SCORE = 1000.0
"""Score of the user-defined symbols: text that contains one is always encoded as it."""

_THREADS = 16
"""A constant: the trainer's sums, and so its pieces, depend on the number of threads and must not depend on the machine."""


def train_unigram(texts: Iterable[str], special: list[str], split_digits: bool, vocab_size: int) -> Tokenizer:
    """Train a unigram language model over pieces (Kudo 2018; Kudo & Richardson 2018). Lossless except for texts that contain U+2581.

    ASCII and the most frequent characters that cover 99.95 % of the text are entries; other characters are encoded as their UTF-8 bytes.
    Text is not normalized, and runs of whitespace may become pieces.

    Args:
        special: special tokens; they have the first ids.
        split_digits: encode every digit as a piece by itself.

    Raises:
        UserError: the characters of the text do not fit into the vocabulary, or the text is too short.
    """
    model, progress = io.BytesIO(), UnigramProgress(vocab_size)
    try:
        with sentencepiece_messages(progress.read):
            SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=model,
                model_type="unigram",
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                split_digits=split_digits,
                max_sentence_length=1 << 30,
                num_threads=_THREADS,
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                control_symbols=special,
                required_chars="".join(sorted({*string.printable.strip(), *"".join(special)} - {" "})),  # see EXCLUDED_SCORE
                minloglevel=0,  # UnigramProgress reads the log
            )
    except RuntimeError as error:
        raise _refusal(error, vocab_size) from error
    progress.end()
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    return convert(proto)


def _refusal(error: RuntimeError, vocab_size: int) -> UserError:
    """What to do about an error of SentencePiece's trainer."""
    if sizes := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
        needed = int(sizes[1])
        rule = f"is too small: the characters that cover 99.95 % of the text, 256 bytes and the special tokens need {needed:,} entries"
        fix = f"set it to about twice as many, {2 * needed:,}; or set tokenizer.kind=bpe, which needs no entries for characters"
        return UserError.of("tokenizer.vocab_size", vocab_size, rule, fix)
    rule = f"SentencePiece cannot train on this text: {error}"
    return UserError.of("tokenizer.kind", "unigram", rule, "use more text, or tokenizer.kind=bpe")


def convert(proto: Any) -> Tokenizer:
    """Convert a SentencePiece model to a Hugging Face tokenizer. Control symbols become special tokens, user-defined ones ordinary entries.

    Raises:
        ValueError: the model is neither Unigram nor BPE, or does not escape whitespace as a prefix of words.
    """
    trainer, normalizer, kinds = proto.trainer_spec, proto.normalizer_spec, proto.SentencePiece
    if not normalizer.escape_whitespaces or trainer.treat_whitespace_as_suffix or trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        raise ValueError("the model is neither Unigram nor BPE, or does not escape whitespace as a prefix of words")
    tokenizer = Tokenizer(_model(proto))
    prefix = normalizer.add_dummy_prefix
    steps: list[Any] = [normalizers.Precompiled(normalizer.precompiled_charsmap)] if normalizer.precompiled_charsmap else []
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    # If no piece contains a space after its first character, words can be encoded one by one, which is faster.
    if all(SPACE not in piece.piece[1:] for piece in proto.pieces):
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    tokenizer.add_special_tokens([piece.piece for piece in proto.pieces if piece.type == kinds.CONTROL])
    if trainer.model_type == trainer.BPE:
        users = [piece.piece for piece in proto.pieces if piece.type == kinds.USER_DEFINED]
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in users])
    return tokenizer


def _model(proto: Any) -> models.Model:
    """A Unigram model of the pieces and their scores, or a BPE model of the merges that they imply."""
    spec, pieces, kinds = proto.trainer_spec, proto.pieces, proto.SentencePiece
    if spec.model_type == spec.UNIGRAM:
        fixed = {kinds.USER_DEFINED: USER_DEFINED_SCORE} | dict.fromkeys(
            (kinds.UNKNOWN, kinds.CONTROL, kinds.UNUSED, kinds.BYTE), EXCLUDED_SCORE
        )
        vocab = [(piece.piece, fixed.get(piece.type, piece.score)) for piece in pieces]
        unknown = next(number for number, piece in enumerate(pieces) if piece.type == kinds.UNKNOWN)
        return models.Unigram(vocab, unk_id=unknown, byte_fallback=spec.byte_fallback)
    from transformers.convert_slow_tokenizer import generate_merges

    ids = {piece.piece: number for number, piece in enumerate(pieces)}
    others = [piece.piece for piece in pieces if piece.type != kinds.NORMAL]
    merges = generate_merges(ids, [(piece.piece, piece.score) for piece in pieces], skip_tokens=others)
    return models.BPE(ids, merges, unk_token=spec.unk_piece, fuse_unk=True, byte_fallback=spec.byte_fallback)
