"""Pages of mapped files are given back, and nothing is lost."""

from pathlib import Path

import torch

from pipeline.common.host_memory import release


def mapped_bytes() -> int:
    """Memory of this process that is of files, on a disk or in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssFile:", "RssShmem:")))


def test_a_tensor_of_a_mapped_file_is_released_and_read_again(tmp_path):
    value = torch.randn(4 << 20)
    torch.save({"weight": value}, tmp_path / "file")
    mapped = torch.load(tmp_path / "file", mmap=True)["weight"]
    assert torch.equal(mapped, value)
    before = mapped_bytes()
    release(mapped)
    assert before - mapped_bytes() > value.nbytes // 2
    assert torch.equal(mapped, value)


def test_other_memory_keeps_its_values(tmp_path):
    value = torch.arange(1 << 20)
    torch.save(value, tmp_path / "file")
    read = torch.load(tmp_path / "file")
    release(read)
    assert torch.equal(read, value)
    release(read[::2])
    release(torch.empty(0))
    assert torch.equal(read, value)
