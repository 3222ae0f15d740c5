"""What a writer verifies of the bytes that it writes: they are those of the snapshot, finite, and not those of the previous save.

Imports no torch. An asynchronous save can write old values without any error, for example when the copy of a tensor shares its memory, or
is not made again (https://github.com/pytorch/pytorch/issues/144657). Two rules find this:

- The sum of the words of the live tensors must be that of the bytes that are written.
- A weight that equals the previous save bit for bit, although its last update was not lost in rounding, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.handover import LastUpdate
from pipeline.config.optimizer import OPTIMIZERS

#: Dtype of the words of elements of so many bytes.
WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int32}
#: A float32 has so many bits after the point; an update below 8 units in the last place may be lost in rounding.
_MANTISSA, _MARGIN = 23, 3
#: A weight whose bits return by chance would need luck of so many bits.
_BITS = 40
#: Elements that are examined at a time.
_CHUNK = 1 << 18


def word_sum(data: memoryview | npt.NDArray[np.uint8], item_size: int) -> int:
    """Sum the words of whole elements, modulo 2^32, so that a sum of chunks is the sum of their sums.

    Args:
        data: bytes.
        item_size: bytes of an element.
    """
    words = np.frombuffer(data, WORDS[item_size])
    return int(np.add.reduce(words, dtype=np.int32)) & 0xFFFFFFFF


def is_finite(values: npt.NDArray[np.floating]) -> bool:
    """Whether all values are finite. A sum is finite only if they are, and is faster than to look at each; it may overflow, too."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(values.sum())) or bool(np.isfinite(values).all())


def finite_bits(data: memoryview, dtype: str) -> bool:
    """Whether the numbers in `data` are finite.

    Args:
        data: bytes of whole elements.
        dtype: its name in safetensors.
    """
    if dtype in ("F32", "F64", "F16"):
        return is_finite(np.frombuffer(data, {"F32": np.float32, "F64": np.float64, "F16": np.float16}[dtype]))
    if dtype == "BF16":  # an exponent of ones only
        exponent = np.int16(0x7F80)
        return not bool((np.frombuffer(data, np.int16) & exponent == exponent).any())
    return True


def should_have_changed(weight: npt.NDArray[np.float32], state: Sequence[npt.NDArray[np.float32]], update: LastUpdate) -> bool:
    """Whether the last update changed a weight for certain: the state of the optimizer after it tells what it was.

    An element whose update is below the resolution of its weight (a small learning rate, an expert without tokens) does not count. One
    that is moved by 2^k units in the last place returns to its old bits by chance once in 2^k; all elements together must be so improbable
    that no run sees it.

    Args:
        weight: after the update.
        state: OptimizerKind.state, likewise.
        update: the update.
    """
    if update.lr == 0 or update.updates == 0:
        return False
    bits, change_of = 0.0, OPTIMIZERS[update.optimizer.name].change
    for start in range(0, len(weight), _CHUNK):
        w, *moments = (values[start : start + _CHUNK].astype(np.float64) for values in (weight, *state))
        change = np.abs(change_of(moments, update.optimizer, update.lr, update.updates, update.steps))
        resolution = np.maximum(np.abs(w), change) * 2.0**-_MANTISSA
        moved = (change > resolution * 2**_MARGIN) & (change > 1e-30)
        bits += float(np.log2(change[moved] / resolution[moved]).sum())
        if bits >= _BITS:
            return True
    return False


def chunks(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide `size` bytes: (first, last + 1) of each chunk of at most `most` bytes."""
    for start in range(0, size, most):
        yield start, min(start + most, size)
