"""The driver without a GPU, compiled and called without torch; and what is told where it cannot be built."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.machinery
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.config import hardware
from pipeline.rehearsal import driver, driver_source
from pipeline.rehearsal.device_record import DeviceRecord, EntryKind, demangled

MIB = 1 << 20
SMALL = dataclasses.replace(hardware.load("h100"), memory_gb=64 * MIB / 1e9)
NOT_SUPPORTED, OUT_OF_MEMORY = 801, 2
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler `cc`")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """A GPU with 64 MiB, and one function that is not known."""
    target = tmp_path_factory.mktemp("driver") / "small" / driver.LIBRARY
    driver.compile_library(driver_source.source(SMALL, {"cudaNew"}, "13.0"), target)
    return target


@pytest.fixture
def library(compiled, tmp_path) -> ctypes.CDLL:
    """A copy, which begins without memory and counts."""
    return ctypes.CDLL(str(shutil.copy(compiled, tmp_path)))


@pytest.fixture
def record(library) -> DeviceRecord:
    return DeviceRecord(library)


def allocate(library: ctypes.CDLL, size: int) -> int:
    """Return the address, 0 if the device has no memory."""
    p = ctypes.c_void_p()
    code = library.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(size))
    assert (code == OUT_OF_MEMORY) == (p.value is None)
    return p.value or 0


def stream(library: ctypes.CDLL) -> ctypes.c_void_p:
    created = ctypes.c_void_p()
    assert library.cudaStreamCreateWithFlags(ctypes.byref(created), 1) == 0
    return created


def copy(library: ctypes.CDLL, to: object, source: object, size: int) -> None:
    assert library.cudaMemcpyAsync(to, source, ctypes.c_size_t(size), 4, None) == 0


def free_bytes(library: ctypes.CDLL) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    assert total.value == 64 * MIB
    return free.value


@needs_compiler
def test_memory_ends_and_comes_back(library, record):
    first, second = allocate(library, 40 * MIB), allocate(library, 3 * MIB)
    assert second >= first + 40 * MIB
    assert free_bytes(library) == 20 * MIB, "3 MiB take two pages"
    assert not allocate(library, 20 * MIB + 1)
    assert library.cudaGetLastError() == OUT_OF_MEMORY
    assert library.cudaGetLastError() == 0
    assert library.cudaFree(ctypes.c_void_p(first)) == 0
    assert library.cudaFree(ctypes.c_void_p(first)) != 0, "it is free"
    record.hold(10 * MIB)
    assert free_bytes(library) == 50 * MIB
    assert not allocate(library, 52 * MIB)
    assert allocate(library, 50 * MIB)
    assert record.used() == 54 * MIB
    record.hold(-10 * MIB)
    assert free_bytes(library) == 20 * MIB, "more than the GPU has"


@needs_compiler
def test_virtual_memory_costs_what_is_created(library):
    base, handles = ctypes.c_uint64(), [ctypes.c_uint64() for _ in range(5)]
    assert (
        library.cuMemAddressReserve(
            ctypes.byref(base), ctypes.c_size_t(1 << 40), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0)
        )
        == 0
    )
    codes = [library.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(20 * MIB), None, ctypes.c_ulonglong(0)) for handle in handles]
    assert codes == [0, 0, 0, OUT_OF_MEMORY, OUT_OF_MEMORY]
    assert library.cuMemRelease(handles[0]) == 0
    assert free_bytes(library) == 24 * MIB


@needs_compiler
def test_calls_are_counted_and_unknown_ones_are_named(library, record, capfd):
    assert record.unknown() == []
    assert [library.cudaNew(), library.cudaNew()] == [NOT_SUPPORTED] * 2
    library.cuInit(0)
    assert record.counts() == {"cudaNew": 2, "cuInit": 1}
    assert record.unknown() == ["cudaNew"]
    assert capfd.readouterr().err.count("has no answer for cudaNew") == 1
    record.reset_counts()
    assert not record.counts()


@needs_compiler
def test_the_record_has_the_order_of_the_calls(library, record):
    class Dim3(ctypes.Structure):
        _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    name, kernel = ctypes.c_char_p(b"_Z3addPfi"), ctypes.create_string_buffer(1)
    library.__cudaRegisterFunction(None, kernel, None, name, -1)
    side, event, p = stream(library), ctypes.c_void_p(), ctypes.c_void_p(allocate(library, 1024))
    library.cudaEventCreate(ctypes.byref(event))
    library.cudaLaunchKernel(kernel, Dim3(7, 1, 1), Dim3(32, 4, 1), None, ctypes.c_size_t(0), side)  # before the start: not recorded
    record.start()
    library.cudaLaunchKernel(kernel, Dim3(7, 2, 1), Dim3(32, 4, 1), None, ctypes.c_size_t(0), side)
    library.cudaEventRecord(event, side)
    library.cudaStreamWaitEvent(None, event, 0)
    library.cudaMemsetAsync(p, 0, ctypes.c_size_t(256), None)
    library.cudaEventSynchronize(event)
    record.stop()
    library.cudaDeviceSynchronize()
    entries = record.take()
    assert [EntryKind(kind) for kind in entries["kind"]] == [
        EntryKind.KERNEL,
        EntryKind.EVENT_RECORD,
        EntryKind.STREAM_WAIT,
        EntryKind.FILL,
        EntryKind.HOST_WAIT,
    ]
    assert entries["stream"].tolist() == [side.value, side.value, 0, 0, side.value]
    assert entries["shape"][0].tolist() == [7, 2, 1, 128]
    assert record.name(entries[0]) == "add(float*, int)"
    assert set(entries["object"][[1, 2, 4]]) == {event.value}
    assert (entries["object"][3], entries["size"][3], record.call_name(entries[3])) == (p.value, 256, "cudaMemsetAsync")
    assert (np.diff(entries["time"]) >= 0).all()
    assert len(record.take()) == 0


@needs_compiler
def test_a_full_record_loses_the_oldest(library, record):
    record.start(at_most=4096)
    for size in range(1, 4101):
        library.cudaMemsetAsync(None, 0, ctypes.c_size_t(size), None)
    entries = record.take()
    assert (entries["size"][0], entries["size"][-1], len(entries), record.lost) == (5, 4100, 4096, 4)


@needs_compiler
def test_products_have_their_sizes(library, record):
    handle, layouts, description = ctypes.c_void_p(), [ctypes.c_void_p() for _ in range(3)], ctypes.c_void_p()
    record.start()
    library.cublasCreate_v2(ctypes.byref(handle))
    library.cublasSgemm_v2(handle, 0, 0, 5, 6, 7, None, None, 5, None, 7, None, None, 5)
    for layout, (rows, columns) in zip(layouts, [(7, 5), (7, 6), (5, 6)], strict=True):
        library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), 14, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
    library.cublasLtMatmulDescCreate(ctypes.byref(description), 0, 0)
    library.cublasLtMatmulDescSetAttribute(description, 3, ctypes.byref(ctypes.c_int(1)), ctypes.c_size_t(4))  # A is transposed
    a, b, c = layouts
    library.cublasLtMatmul(
        None, description, None, None, a, None, b, None, None, c, None, c, None, None, ctypes.c_size_t(0), stream(library)
    )
    entries = record.take()
    assert entries["shape"].tolist() == [[5, 6, 7, 1]] * 2
    assert (entries["size"][1], entries["stream"][1] != 0) == (14, True)


@needs_compiler
def test_small_values_come_back_until_their_memory_is_free(library, record):
    p, text = allocate(library, MIB), ctypes.create_string_buffer(b"12345678", 8)
    there = ctypes.create_string_buffer(b"????????", 8)
    copy(library, ctypes.c_void_p(p), text, 8)
    copy(library, ctypes.c_void_p(p + 512), ctypes.c_void_p(p), 8)  # on the device
    copy(library, there, ctypes.c_void_p(p + 514), 4)
    assert there.raw == b"3456????"
    library.cudaMemsetAsync(ctypes.c_void_p(p + 512), 0, ctypes.c_size_t(8), None)
    copy(library, there, ctypes.c_void_p(p + 512), 4)
    assert there.raw == b"\0\0\0\0????"
    record.plant(p + 1024, b"planted")
    copy(library, there, ctypes.c_void_p(p + 1024), 7)
    assert there.raw == b"planted?"
    library.cudaFree(ctypes.c_void_p(p))
    copy(library, there, ctypes.c_void_p(p), 8)
    assert there.raw == bytes(8)


@needs_compiler
def test_host_waits_are_told(library, record):
    p, there, pinned = allocate(library, MIB), ctypes.create_string_buffer(8), ctypes.c_void_p()
    library.cudaHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(64), 0)
    record.start()
    told: list[int] = []
    with record.on_host_wait(told.append):
        copy(library, pinned, ctypes.c_void_p(p), 8)
        assert told == []
        copy(library, there, ctypes.c_void_p(p), 8)  # to pageable memory
        assert len(told) == 1
        library.cudaStreamSynchronize(None)  # nothing was queued since
        assert len(told) == 1
        library.cudaMemsetAsync(ctypes.c_void_p(p), 0, ctypes.c_size_t(8), None)
        library.cudaStreamSynchronize(None)
        library.cudaDeviceSynchronize()
    library.cudaDeviceSynchronize()
    entries = record.take()
    assert told == np.flatnonzero(entries["kind"] == EntryKind.HOST_WAIT)[:3].tolist()
    assert entries["shape"][entries["kind"] == EntryKind.COPY].tolist() == [[2, 0, 0, 0], [2, 1, 0, 0]]


@needs_compiler
def test_events_have_the_time_of_the_host(library):
    events, elapsed = [ctypes.c_void_p() for _ in range(2)], ctypes.c_float()
    for event in events:
        library.cudaEventCreate(ctypes.byref(event))
        library.cudaEventRecord(event, None)
        assert library.cudaEventQuery(event) == 0
    assert library.cudaEventElapsedTime(ctypes.byref(elapsed), *events) == 0
    assert 0 < elapsed.value < 60_000


@needs_compiler
def test_a_library_is_moved_to_its_place_once(compiled):
    before = compiled.stat().st_ino
    driver.compile_library("int other;", compiled)  # a process that was slower
    assert compiled.stat().st_ino == before
    assert (compiled.parent / driver.NVML).samefile(compiled)
    assert [path.name for path in compiled.parent.parent.iterdir()] == [compiled.parent.name]


def test_a_child_process_finds_the_library(monkeypatch, tmp_path):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/site")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    variables = driver.environment(tmp_path / driver.LIBRARY)
    assert variables["LD_PRELOAD"] == str(tmp_path / driver.LIBRARY)
    assert variables["LD_LIBRARY_PATH"] == f"{tmp_path}:/opt/site"


def test_a_process_without_the_library_is_told():
    with pytest.raises(RuntimeError, match=r"driver\.environment"):
        DeviceRecord()


def installed(monkeypatch, folder: Path, version: str) -> None:
    """A torch with a version.py and without libraries."""
    (folder / "lib").mkdir()
    (folder / "version.py").write_text(version)
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch" else None)


def test_a_torch_without_cuda_is_told(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    with pytest.raises(UserError, match=r"2\.13\.0\+cpu: must be a build with CUDA(.|\n)*dry_run=true(.|\n)*stage=plan"):
        driver.build(SMALL)


def test_another_cuda_is_told(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, "__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\n")
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    with pytest.raises(UserError, match=r"this one is for 12\.8(.|\n)*dry_run=true(.|\n)*stage=plan"):
        driver.build(SMALL)


def test_a_missing_compiler_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"cc=not found(.|\n)*dry_run=true(.|\n)*stage=plan"):
        driver.compile_library("", tmp_path / "new" / driver.LIBRARY)


@needs_compiler
def test_a_source_that_does_not_compile_is_told(tmp_path):
    with pytest.raises(UserError, match=r"must compile the driver: .*error"):
        driver.compile_library("int f(void) { return unknown_name; }", tmp_path / "new" / driver.LIBRARY)


def test_names_of_kernels_are_those_of_the_program():
    assert demangled("_ZN2at6native4copyEi") == "at::native::copy(int)"
    assert demangled("triton_red_fused_0") == "triton_red_fused_0"
