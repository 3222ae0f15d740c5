"""One data file: valid safetensors, written in one pass, and what its checksums find."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from pipeline.checkpoint import data_file
from pipeline.checkpoint.parts import NOT_STORED, Part, count_blocks
from pipeline.checkpoint.save import through_buffers


def part(name: str, count: int, kinds: dict[str, str], block_bytes: int = 64) -> Part:
    return Part(name, (count + 3,), ((0, count + 3),), 3, count, block_bytes, kinds)


TRAINED, FROZEN = {"weight": "F32", "exp_avg": "F32"}, {"weight": "BF16"}


def write(path: Path, parts: list[Part], buffer_bytes: int = 50) -> tuple[data_file.WrittenFile, dict[tuple[int, str], bytes]]:
    rng = np.random.default_rng(0)
    contents = {(number, kind): rng.bytes(p.bytes(kind)) for number, p in enumerate(parts) for kind in p.dtypes}

    def read(number: int, kind: str) -> Iterator[memoryview]:
        content = memoryview(contents[number, kind])
        for start in range(0, len(content), buffer_bytes):
            yield content[start : start + buffer_bytes]

    return data_file.write(path, parts, read), contents


def block_digests(content: bytes, block: int, before: int) -> list[int]:
    """Of blocks that are counted from `before` bytes before the content."""
    ends = [*range(block - before, len(content), block), len(content)]
    return [xxhash.xxh3_64_intdigest(content[a:b]) for a, b in zip([0, *ends], ends, strict=False) if a < b]


def test_what_is_written_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ""

    def noted(name: str) -> None:
        call = getattr(os, name)

        def note(*arguments: Any) -> Any:
            nonlocal calls
            calls += name[0]
            return call(*arguments)

        monkeypatch.setattr(os, name, note)

    for name in ("pwrite", "fsync", "close"):
        noted(name)
    write(tmp_path / "file", [part("a", 33, FROZEN), part("b", 40, TRAINED)])
    assert calls.startswith("p")
    assert "pc" not in calls, "a file is closed behind a write that is not flushed"


def test_a_file_is_safetensors_and_its_places_are_right(tmp_path: Path) -> None:
    parts = [part("a", 33, FROZEN), part("b", 40, TRAINED), part("c", 1, TRAINED), part("d", 0, TRAINED)]
    written, contents = write(tmp_path / "file", parts)
    assert written.kinds == ["weight", "exp_avg"]
    assert written.entry.bytes == (tmp_path / "file").stat().st_size
    raw = (tmp_path / "file").read_bytes()
    stored = load_file(tmp_path / "file")
    assert set(stored) >= {"weight/a[0:36]@3", "weight/b[0:43]@3", "exp_avg/b[0:43]@3", "block_digests"}
    digests = stored["block_digests"].numpy()
    assert written.entry.xxh3 == xxhash.xxh3_64_hexdigest(digests.tobytes())
    for (number, kind), content in contents.items():
        offset, block, checksum = (int(value) for value in written.places[number, written.kinds.index(kind)])
        assert raw[offset : offset + len(content)] == content
        expected = block_digests(content, 64, parts[number].before(kind))
        assert digests[block : block + len(expected)].tolist() == expected
        assert checksum == xxhash.xxh3_64_intdigest(np.array(expected, "<u8").tobytes())
    assert written.places[0, 1].tolist() == [NOT_STORED, 0, 0], "a frozen weight has no moments"


@given(st.integers(1, 40), st.integers(0, 39), st.integers(0, 200), st.lists(st.integers(1, 90)))
def test_checksums_do_not_depend_on_the_buffers(block: int, before: int, size: int, cuts: list[int]) -> None:
    content = memoryview(np.random.default_rng(size).bytes(size))
    hasher, start = data_file.BlockHasher(block, before % block), 0
    for cut in [*cuts, size]:
        hasher.update(content[start : start + cut])
        start += cut
    assert hasher.digests().tolist() == block_digests(content, block, before % block)
    assert count_blocks(size, block, before % block) == len(hasher.digests())


def test_a_flipped_byte_and_a_short_file_name_their_blocks(tmp_path: Path) -> None:
    written, contents = write(tmp_path / "file", [part("a", 100, TRAINED)])
    offset, size = int(written.places[0, 0, 0]), len(contents[0, "weight"])
    handle = os.open(tmp_path / "file", os.O_RDWR)
    digests = data_file.read_digests(handle, offset, size, 64, 12)
    os.pwrite(handle, b"?", offset + 130)
    assert np.flatnonzero(data_file.read_digests(handle, offset, size, 64, 12) != digests).tolist() == [2]
    os.ftruncate(handle, offset + 200)
    assert np.flatnonzero(data_file.read_digests(handle, offset, size, 64, 12) != digests).tolist() == [2, 3, 4, 5, 6]
    os.close(handle)


def test_a_source_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weight/a\[0:8\]@3: 16 bytes instead of 20"):
        data_file.write(tmp_path / "file", [part("a", 5, FROZEN | {"weight": "F32"})], lambda _number, _kind: [memoryview(bytes(16))])


@pytest.mark.parametrize("size", [1, 16, 17, 100])
def test_a_tensor_of_a_gpu_passes_through_two_buffers(size: int) -> None:
    """Its copies end when they are waited for: a copy that begins then would overwrite what the caller has not used."""
    waiting: list[int] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def record(self) -> None:
            waiting.append(self.number)

        def synchronize(self) -> None:
            waiting.remove(self.number)

    values = torch.randint(256, (size,), dtype=torch.uint8)
    buffers = [torch.empty(16, dtype=torch.uint8) for _ in range(2)]
    seen = b""
    for view in through_buffers(values, buffers, [Event(0), Event(1)]):
        assert len(waiting) <= 1, "one copy runs beside the caller"
        seen += bytes(view)
    assert seen == values.numpy().tobytes()
    assert waiting == []
