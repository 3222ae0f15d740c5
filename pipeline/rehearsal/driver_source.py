"""The C source of a library that answers like one GPU: the functions of native/, and a stub for every other that torch imports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.config.hardware import Hardware

NATIVE = Path(__file__).parent / "native"
#: In the order in which they are joined: a part uses those before it.
PARTS = (
    "base.h",
    "device.c",
    "record.c",
    "copies.c",
    "memory.c",
    "allocator.c",
    "streams.c",
    "kernels.c",
    "modules.c",
    "blas.c",
    "dnn.c",
    "nccl.c",
    "nvml.c",
)
#: prefix of a function -> code with which an unknown one fails: "not supported" of that library.
REFUSALS = {"cublas": 15, "cudnn": 3000, "nccl": 5, "nvml": 3, "__cuda": 801, "cu": 801}
#: Prefixes of functions that are not replaced: of libraries that load without a device and that a training does not use, ...
UNUSED_LIBRARIES = ("cusparse", "cufft", "curand", "cusolver", "cuFile", "cupti", "nvrtc")
#: ... and those that return a version or a text.
TEXTS_OF_CUDNN = ("cudnnGetVersion", "cudnnGetCudartVersion", "cudnnGetProperty", "cudnnGetErrorString", "cudnnGetLastErrorString")
TEXTS_OF_NCCL = ("ncclGetVersion", "ncclGetErrorString", "ncclGetLastError")
REAL = UNUSED_LIBRARIES + TEXTS_OF_CUDNN + TEXTS_OF_NCCL
#: What a user can do where the driver cannot be built.
STILL = "dry_run=true checks the configuration and stage=plan says memory and time, both without CUDA"
#: CUDA version whose structures native/ has.
CUDA_MAJOR = 13


@dataclass(frozen=True)
class Generation:
    """What GPUs of a compute capability have in common.

    Attributes:
        threads: most threads of a multiprocessor.
        shared_kb: shared memory of a multiprocessor, KiB.
        l2_mb: level 2 cache, MiB.
    """

    threads: int
    shared_kb: int
    l2_mb: int


#: Compute capability -> generation. Figures: CUDA C++ Programming Guide, table of technical specifications; cache: data sheets.
GENERATIONS = {
    "7.0": Generation(2048, 96, 6),
    "8.0": Generation(2048, 164, 40),
    "8.6": Generation(1536, 100, 6),
    "8.9": Generation(1536, 100, 96),
    "9.0": Generation(2048, 228, 50),
    "10.0": Generation(2048, 228, 126),
}


def constants(hardware: Hardware, cuda_version: str) -> str:
    """Return the definitions that make the library one GPU.

    Args:
        cuda_version: of torch, such as "13.0".

    Raises:
        UserError: no compute capability is known for the GPU (an AMD GPU has none), or it is not one of GENERATIONS.
    """
    generation = GENERATIONS.get(hardware.capability)
    if generation is None or not hardware.device_name:
        rule = f"must be a GPU of NVIDIA, with `device_name` and a `capability` of {', '.join(GENERATIONS)}"
        fix = f"choose another GPU of conf/hardware/, or add these keys to its file; for {hardware.name}, {STILL}"
        raise UserError.of("cluster.hardware", hardware.name, rule, fix)
    major, minor = hardware.capability.split(".")
    cuda_major, cuda_minor = cuda_version.split(".")[:2]
    values = {
        "DEVICE_NAME": f'"{hardware.device_name}"',
        "MAJOR": major,
        "MINOR": minor,
        "MULTIPROCESSORS": hardware.multiprocessors,
        "MEMORY_BYTES": f"{memory_bytes(hardware)}ul",
        "THREADS": generation.threads,
        "SHARED_BYTES": generation.shared_kb << 10,
        "L2_BYTES": generation.l2_mb << 20,
        "CUDA_VERSION": 1000 * int(cuda_major) + 10 * int(cuda_minor),
    }
    return "".join(f"#define {name} {value}\n" for name, value in values.items())


def memory_bytes(hardware: Hardware) -> int:
    """Bytes that can be allocated: the memory of the GPU, rounded down to a page of 2 MiB."""
    return int(hardware.memory_gb * 1e9) >> 21 << 21


def known(parts: str) -> set[str]:
    """The functions that the parts of native/ define: each counts its calls under its name, or is one of a macro that does."""
    named = set(re.findall(r'(?:COUNT\("|(?:NOTHING|LAUNCH|OCCUPANCY|DOT)\()((?:__)?(?:cu|nccl|nvml)\w+)', parts))
    letters = re.findall(r"^GEMM\((\w),", parts, re.MULTILINE)
    return named | {f"cublas{letter}{name}" for letter in letters for name in ("gemm_v2", "gemmStridedBatched", "gemmBatched", "gemv_v2")}


def stubs(names: set[str]) -> str:
    """Return the functions that fail and tell their names, for functions that are not known.

    Raises:
        ValueError: a name belongs to no library that is replaced.
    """
    return "".join(f"UNKNOWN({name}, {refusal(name)})\n" for name in sorted(names))


def refusal(name: str) -> int:
    """Return the code of "not supported" in the library of a function.

    Raises:
        ValueError: the name belongs to no library that is replaced.
    """
    for prefix, code in REFUSALS.items():
        if name.startswith(prefix):
            return code
    raise ValueError(f"{name} belongs to no library that is replaced")


def source(hardware: Hardware, imported: set[str], cuda_version: str) -> str:
    """Return the C source of the library.

    Args:
        imported: functions that torch and Triton use, known or not.
        cuda_version: of torch.

    Raises:
        UserError: the GPU is none of NVIDIA's, see `constants`.
    """
    parts = "".join((NATIVE / name).read_text() for name in PARTS)
    return constants(hardware, cuda_version) + parts + stubs(imported - known(parts))
