"""Classifiers of fastText (Joulin et al. 2016, arXiv:1607.01759) in numpy: reads .bin and .ftz files, classifies texts, writes .bin files.

A text is the mean of the rows of its words, of the n-grams of characters in its words and of its n-grams of words; an n-gram is hashed
(FNV-1a) to a row. A softmax, a Huffman tree of binary decisions or a binary decision for each label give the probabilities.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import repeat
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO

import numpy as np

from pipeline.common.errors import UserError

#: A file begins with these two numbers.
MAGIC, VERSION = 793712314, 12
#: Values of the kind of model and of the loss in a file.
SUPERVISED = 3
TREE, SOFTMAX = 1, 3
LABEL, END = "__label__", b"</s>"
#: Rows of the input matrix that are added at once: they fit into a cache.
CHUNK = 1 << 12
#: Words of which the sum of their rows is kept, of 64 columns or less: most words of a text are frequent ones.
WORDS_KEPT = 1 << 18

_PRIME, _BASIS = np.uint32(16777619), np.uint32(2166136261)
#: What FNV-1a of fastText adds for a byte: the byte, sign-extended.
_SIGNED = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int32).view(np.uint32)
_WORD_FACTOR = np.uint64(116049371)


class FastText:
    """A classifier. A large input matrix stays in the file, and processes on a node share its pages.

    Args:
        path: a file that `fasttext supervised` or `fasttext quantize` wrote.

    Attributes:
        labels: the labels, without their prefix.

    Raises:
        ValueError: it is no such file, or is cut; the text says why.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            if _numbers(file, "<2i") != (MAGIC, VERSION):
                raise ValueError(f"it does not begin as a file of fastText does, version {VERSION}")
            dim, _, _, _, _, self._word_ngrams, self._loss, model, self._bucket, self._minn, self._maxn, _ = _numbers(file, "<12i")
            file.read(8)
            if model != SUPERVISED:
                raise ValueError("it has vectors of words, and no labels")
            count, self._words, labels, _, pruned = _numbers(file, "<3i2q")
            entries = _entries(file, count)
            self._ids = {word: number for number, (word, _) in enumerate(entries[: self._words])}
            self.labels = [word.decode().removeprefix(LABEL) for word, _ in entries[self._words :]]
            if len(self.labels) != labels or not labels:
                raise ValueError(f"it has {labels} labels")
            #: The row of every hashed n-gram after those of the words, -1 for one without; None if all have one.
            self._rows_of_buckets: np.ndarray | None = None
            if pruned >= 0:
                buckets, rows = _array(file, "<i4", (pruned, 2)).T
                self._rows_of_buckets = np.full(self._bucket, -1, dtype=np.int64)
                self._rows_of_buckets[buckets] = rows
            quantized = _numbers(file, "<?")[0]
            self._input = _quantized(file) if quantized else _mapped(file)
            self._output = _quantized(file) if _numbers(file, "<?")[0] and quantized else np.array(_mapped(file))
            self._places: dict[bytes, int] = {}
            self._sums, self._counts = np.zeros((0, dim), np.float32), np.zeros(0, np.int64)
            self._children = _tree([times for _, times in entries[self._words :]]) if self._loss == TREE else []
            if self._input.shape[1] != dim or self._output.shape[1] != dim:
                raise ValueError(f"its matrices do not have {dim} columns")

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """Return the probability of every label, fp32 (texts, labels). They are 0 for a text of which nothing is known.

        A line break is a space: fastText reads lines.
        """
        hidden, known = self._hidden([_words(text) for text in texts])
        scores = hidden @ self._output.T
        if self._loss == TREE:
            probabilities = self._leaves(scores)
        elif self._loss == SOFTMAX:
            exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
            probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        else:
            probabilities = 1 / (1 + np.exp(-scores.astype(np.float64)))
        return np.where(known[:, None], probabilities, 0).astype(np.float32)

    def rows(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the input matrix whose mean each text is, int64 (rows,), and their texts in ascending order; for training."""
        split = [_words(text) for text in texts]
        words = [word for text in split for word in text]
        owners = np.repeat(np.arange(len(texts)), [len(text) for text in split])
        rows, of_word = self._rows_of_words(words)
        found, of_text = [rows], [owners[of_word]]
        if self._word_ngrams > 1:
            rows, owners = self._rows_of_ngrams(words, owners)
            found, of_text = [*found, rows], [*of_text, owners]
        order = np.argsort(np.concatenate(of_text), kind="stable")
        return np.concatenate(found)[order], np.concatenate(of_text)[order]

    def _hidden(self, texts: Sequence[list[bytes]]) -> tuple[np.ndarray, np.ndarray]:
        """The mean row of every text, (texts, dim), and whether it has one, (texts,)."""
        words = [word for text in texts for word in text]
        owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        numbers = self._numbers_of(words)
        counts = np.bincount(owners, self._counts[numbers], len(texts))
        hidden = _summed(self._sums, numbers, owners, len(texts))
        if self._word_ngrams > 1:
            rows, owners = self._rows_of_ngrams(words, owners)
            hidden += _summed(self._input, rows, owners, len(texts))
            counts += np.bincount(owners, minlength=len(texts))
        return hidden / np.maximum(counts, 1)[:, None].astype(np.float32), counts > 0

    def _numbers_of(self, words: Sequence[bytes]) -> np.ndarray:
        """The place of every word in _sums and _counts, of which the words that are new are computed."""
        numbers = np.fromiter(map(self._places.get, words, repeat(-1)), np.int64, len(words))
        unknown = np.flatnonzero(numbers < 0).tolist()
        new = list(dict.fromkeys(words[place] for place in unknown))
        if len(self._places) + len(new) > len(self._counts):
            unknown, new, self._places = list(range(len(words))), list(dict.fromkeys(words)), {}
            columns = self._output.shape[1]
            size = max(WORDS_KEPT * 64 // max(columns, 64), len(new))
            self._sums, self._counts = np.zeros((size, columns), np.float32), np.zeros(size, np.int64)
        if new:
            added = slice(len(self._places), len(self._places) + len(new))
            rows, owners = self._rows_of_words(new)
            self._sums[added], self._counts[added] = _summed(self._input, rows, owners, len(new)), np.bincount(owners, minlength=len(new))
            self._places |= {word: added.start + number for number, word in enumerate(new)}
            numbers[unknown] = [self._places[words[place]] for place in unknown]
        return numbers

    def _is_word(self, word: bytes) -> bool:
        return word in self._ids or not word.startswith(LABEL.encode())

    def _rows_of_words(self, words: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """The rows of words and of the n-grams of their characters, and the word of each in ascending order."""
        ids = np.array([self._ids.get(word, -1) for word in words], dtype=np.int64)
        rows, owners = ids[ids >= 0], np.flatnonzero(ids >= 0)
        if self._maxn >= max(1, self._minn):
            spelled = [number for number, word in enumerate(words) if word != END and self._is_word(word)]
            hashes, of_ngram = _character_ngrams([words[number] for number in spelled], self._minn, self._maxn)
            more, of_more = self._hashed(hashes.astype(np.uint64), np.array(spelled, dtype=np.int64)[of_ngram])
            rows, owners = np.concatenate([rows, more]), np.concatenate([owners, of_more])
        order = np.argsort(owners, kind="stable")
        return rows[order], owners[order]

    def _rows_of_ngrams(self, words: Sequence[bytes], owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of n-grams of words, and the text of each in ascending order."""
        chosen = [number for number, word in enumerate(words) if self._is_word(word)]
        hashes = _fnv([words[number] for number in chosen]).view(np.int32).astype(np.int64).view(np.uint64)
        sums, texts, parts = hashes, owners[chosen], []
        for more in range(1, self._word_ngrams):
            sums = sums[:-1] * _WORD_FACTOR + hashes[more:]
            same = texts[:-more] == texts[more:]
            parts.append(self._hashed(sums[same], texts[:-more][same]))
        rows, of_text = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(of_text, kind="stable")
        return rows[order], of_text[order]

    def _hashed(self, hashes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of n-grams as far as they have one, and the text of each."""
        buckets = (hashes % np.uint64(self._bucket)).astype(np.int64)
        if self._rows_of_buckets is None:
            return self._words + buckets, owners
        rows = self._rows_of_buckets[buckets]
        return self._words + rows[rows >= 0], owners[rows >= 0]

    def _leaves(self, scores: np.ndarray) -> np.ndarray:
        """The probabilities of the leaves of the tree, fp64 (texts, labels), from the scores of its inner nodes."""
        right = 1 / (1 + np.exp(-scores.astype(np.float64)))
        leaves = len(self.labels)
        logs = np.zeros((len(scores), 2 * leaves - 1))
        for node in reversed(range(leaves - 1)):
            left_child, right_child = self._children[node]
            logs[:, left_child] = logs[:, leaves + node] + np.log(1 - right[:, node] + 1e-5)  # fastText adds 1e-5
            logs[:, right_child] = logs[:, leaves + node] + np.log(right[:, node] + 1e-5)
        return np.exp(logs[:, :leaves])


@cache
def load(name: str, key: str) -> FastText:
    """Return a classifier, which a process reads once.

    Raises:
        UserError: it is missing, or no classifier of fastText.
    """
    try:
        return FastText(Path(name).expanduser())
    except (OSError, ValueError) as error:
        raise UserError.of(key, name, f"cannot be read: {error}", "name a classifier that fastText wrote (.bin or .ftz)") from error


def count_words(texts: Iterable[str], least: int) -> dict[bytes, int]:
    """Return the words that occur at least so often, the most frequent first, and how often they do."""
    counts = Counter(word for text in texts for word in _words(text) if not word.startswith(LABEL.encode()))
    return {word: times for word, times in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if times >= least}


def write(
    file: IO[bytes],
    words: Mapping[bytes, int],
    labels: Mapping[str, int],
    matrices: tuple[np.ndarray, np.ndarray],
    word_ngrams: int,
    characters: tuple[int, int],
) -> None:
    """Write a classifier with a softmax, as `fasttext supervised` does.

    Args:
        words, labels: how often each occurred; of `count_words`, and without their prefix.
        matrices: fp32 (words + hashed n-grams, dim), the input matrix, and (labels, dim), the output matrix.
        word_ngrams: words of the longest n-gram of words; 1 for none.
        characters: of the shortest and the longest n-gram of characters; 0 for none.
    """
    rows, dim = matrices[0].shape
    file.write(struct.pack("<2i", MAGIC, VERSION))
    # What training alone reads has the defaults of fastText: windows, epochs, least counts, negative samples, updates, sampling.
    file.write(struct.pack("<12id", dim, 5, 5, 1, 5, word_ngrams, SOFTMAX, SUPERVISED, rows - len(words), *characters, 100, 1e-4))
    file.write(struct.pack("<3i2q", len(words) + len(labels), len(words), len(labels), sum(words.values()), -1))
    for entries, kind in ((words, 0), ({(LABEL + label).encode(): times for label, times in labels.items()}, 1)):
        file.writelines(entry + b"\0" + struct.pack("<qb", times, kind) for entry, times in entries.items())
    for matrix in matrices:
        file.write(struct.pack("<?2q", False, *matrix.shape) + matrix.astype("<f4").tobytes())


def _numbers(file: IO[bytes], form: str) -> tuple[int, ...]:
    """Read numbers."""
    return struct.unpack(form, _read(file, struct.calcsize(form)))


def _read(file: IO[bytes], size: int) -> bytes:
    """Read bytes."""
    if len(content := file.read(size)) < size:
        raise ValueError("it is cut")
    return content


def _entries(file: IO[bytes], count: int) -> list[tuple[bytes, int]]:
    """Read words and labels, and how often each was counted."""
    entries, place = [], file.tell()
    with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        for _ in range(count):
            end = content.find(b"\0", place)
            if end < 0 or len(content) < end + 10:
                raise ValueError("it is cut")
            entries.append((content[place:end], int.from_bytes(content[end + 1 : end + 9], "little")))
            place = end + 10  # behind the count, and a byte that says whether it is a label
    file.seek(place)
    return entries


def _array(file: IO[bytes], dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read an array."""
    return np.frombuffer(_read(file, int(np.dtype(dtype).itemsize * np.prod(shape))), dtype).reshape(shape)


def _mapped(file: IO[bytes]) -> np.ndarray:
    """Map a matrix, and go on behind it."""
    rows, columns = _numbers(file, "<2q")
    place, size = file.tell(), 4 * rows * columns
    if min(rows, columns) < 1 or Path(file.name).stat().st_size < place + size:
        raise ValueError("it is cut")
    file.seek(size, 1)
    return np.memmap(file.name, "<f4", "r", place, (rows, columns))


def _quantized(file: IO[bytes]) -> np.ndarray:
    """Read a matrix whose rows, and maybe their norms, are product-quantized."""
    has_norms, rows, _, size = _numbers(file, "<?2qi")
    matrix = _decoded(file, _array(file, "u1", (rows, size // max(rows, 1))))
    return matrix * _decoded(file, _array(file, "u1", (rows, 1))) if has_norms else matrix


def _decoded(file: IO[bytes], codes: np.ndarray) -> np.ndarray:
    """Read the centroids of a product quantizer; return what codes (rows, parts) stand for, (rows, columns)."""
    columns, parts, width, last = _numbers(file, "<4i")
    centroids = _array(file, "<f4", (256 * columns,))
    tables = [centroids[256 * width * part :][: 256 * size].reshape(256, size) for part, size in enumerate([width] * (parts - 1) + [last])]
    return np.concatenate([table[codes[:, part]] for part, table in enumerate(tables)], axis=1)


def _summed(matrix: np.ndarray, rows: np.ndarray, owners: np.ndarray, count: int) -> np.ndarray:
    """The sum of the rows of each of `count` owners, fp32 (count, columns); the owners are in ascending order."""
    sums = np.zeros((count, matrix.shape[1]), dtype=np.float32)
    for start in range(0, len(rows), CHUNK):
        chunk = owners[start : start + CHUNK]
        first = np.flatnonzero(np.diff(chunk, prepend=-1))
        sums[chunk[first]] += np.add.reduceat(matrix[rows[start : start + CHUNK]], first, axis=0)
    return sums


def _tree(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The children (left, right) of the inner nodes of a Huffman tree; the leaves come first, in the order of falling counts."""
    leaves = len(counts)
    sizes = [*counts, *[10**15] * (leaves - 1)]
    leaf, node, children = leaves - 1, leaves, []
    for number in range(leaves, 2 * leaves - 1):
        pair = []
        for _ in range(2):
            if leaf >= 0 and sizes[leaf] < sizes[node]:
                pair.append(leaf)
                leaf -= 1
            else:
                pair.append(node)
                node += 1
        sizes[number] = sizes[pair[0]] + sizes[pair[1]]
        children.append((pair[0], pair[1]))
    return children


def _words(text: str) -> list[bytes]:
    """The words of a text with the mark of the end of a line, which ends it wherever it stands."""
    words = [*text.encode("utf-8", "replace").replace(b"\0", b" ").split(), END]
    return words[: words.index(END) + 1]


def _fnv(words: Sequence[bytes]) -> np.ndarray:
    """The hash of every word, uint32 (words,)."""
    content = np.frombuffer(b"".join(words), np.uint8)
    lengths = np.array([len(word) for word in words], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    hashes = np.full(len(words), _BASIS)
    for place in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > place)
        hashes[longer] = (hashes[longer] ^ _SIGNED[content[starts[longer] + place]]) * _PRIME
    return hashes


def _character_ngrams(words: Sequence[bytes], minn: int, maxn: int) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of the n-grams of the characters of "<word>", uint32 (n,), and the word of each, (n,). "<" and ">" alone are none."""
    content = np.frombuffer(b"".join(part for word in words for part in (b"<", word, b">")), np.uint8)
    ends = np.cumsum([len(word) + 2 for word in words], dtype=np.int64)
    begins = np.flatnonzero((content & 0xC0) != 0x80)  # of the characters
    sizes = np.diff(begins, append=len(content))
    of_word = np.searchsorted(ends, begins, side="right")
    last = np.searchsorted(begins, ends) - 1
    left = last[of_word] - np.arange(len(begins))  # characters behind this one in its word
    edge = (left == 0) | (np.diff(of_word, prepend=-1) > 0)
    hashes, starts = np.full(len(begins), _BASIS), np.arange(len(begins))
    ngrams: list[tuple[np.ndarray, np.ndarray]] = []
    for n in range(1, maxn + 1):
        starts = starts[left[starts] >= n - 1]
        added, values = starts + n - 1, hashes[starts]
        for byte in range(4):
            longer = np.flatnonzero(sizes[added] > byte)
            values[longer] = (values[longer] ^ _SIGNED[content[begins[added[longer]] + byte]]) * _PRIME
        hashes[starts] = values
        if n >= minn:
            kept = starts if n > 1 else starts[~edge]
            ngrams.append((hashes[kept], of_word[kept]))
    hashes_of, words_of = (np.concatenate(part) for part in zip(*ngrams, strict=True))
    return hashes_of, words_of
