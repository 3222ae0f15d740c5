"""The driver without a GPU: a library that answers like one GPU, so that the CUDA build of torch runs on a machine that has none.

Memory is address space, kernels do not run, and values are zero, but for small ones that the host copied to the device. What is real:
PyTorch's dispatch and choice of kernels, its caching allocator with peaks, retries and out-of-memory errors, streams and events, Python's
time, and every wait of the host for the device.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from pipeline.common.atomic_files import atomic_file, make_folder
from pipeline.common.errors import UserError
from pipeline.config.hardware import Hardware
from pipeline.rehearsal import driver_source
from pipeline.rehearsal.driver_source import STILL

#: File name, by which torch and Triton look for the driver.
LIBRARY = "libcuda.so.1"
#: Name by which they look for NVML, whose functions are in the same library.
NVML = "libnvidia-ml.so.1"


def build(hardware: Hardware) -> Path:
    """Return the library for a GPU, which is compiled if the cache does not have it.

    The cache is in $TANNSCHEN_CACHE, or $XDG_CACHE_HOME/tannschen, or ~/.cache/tannschen. Several processes may build at once.

    Raises:
        UserError: the installed torch has no CUDA, or another one than the driver knows; there is no C compiler or `nm`; the GPU is none of
            NVIDIA's.
    """
    folder, version, cuda = torch_libraries()
    text = driver_source.source(hardware, imported(folder), cuda)
    name = hashlib.sha256(f"{version}\n{text}".encode()).hexdigest()[:16]
    target = cache_folder() / "driver" / name / LIBRARY
    if not target.exists():
        compile_library(text, target)
    return target


def environment(library: Path) -> dict[str, str]:
    """Return the environment variables with which a child process uses the library.

    They are in addition to those of this process. Triton finds the library by TRITON_LIBCUDA_PATH. What it and Inductor compile is kept
    apart from that of a real GPU, since it was chosen by times that mean nothing.
    """
    folder = str(library.parent)
    before = {name: os.environ.get(name, "") for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    return {
        "LD_PRELOAD": " ".join(filter(None, (str(library), before["LD_PRELOAD"]))),
        "LD_LIBRARY_PATH": ":".join(filter(None, (folder, before["LD_LIBRARY_PATH"]))),
        "TRITON_LIBCUDA_PATH": folder,
        "TRITON_CACHE_DIR": str(cache_folder() / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(library.parent / "inductor"),
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
    }


def cache_folder() -> Path:
    """The folder of what is compiled."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TANNSCHEN_CACHE") or Path(base) / "tannschen")


def torch_libraries() -> tuple[Path, str, str]:
    """Return (folder of torch's libraries, version of torch, version of CUDA). Does not import torch.

    Raises:
        UserError: it is a build without CUDA, or with a CUDA that the driver does not know.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError.of("torch", "not installed", "must be a build with CUDA", "install torch: see README")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text()
    version, cuda = _assigned(text, "__version__"), _assigned(text, "cuda")
    if not cuda or not (folder / "lib" / "libtorch_cuda.so").exists():
        raise UserError.of("torch", version, "must be a build with CUDA", f"use an environment with one; {STILL}")
    if int(cuda.split(".")[0]) != driver_source.CUDA_MAJOR:
        rule = f"must be built for CUDA {driver_source.CUDA_MAJOR}, whose structures the driver has; this one is for {cuda}"
        raise UserError.of("torch", version, rule, f"use an environment with such a build; {STILL}")
    return folder / "lib", version, cuda


def _assigned(text: str, name: str) -> str:
    """The string that a module assigns to a name; "" if it is another value."""
    match = re.search(rf"^{name}\b[^=]*= '([^']*)'", text, re.MULTILINE)
    return match[1] if match else ""


def imported(folder: Path) -> set[str]:
    """The functions of CUDA's libraries that torch and Triton use and that the driver replaces.

    The libraries have some GB, so that what is read from them is cached for as long as they do not change.
    """
    libraries = sorted(folder.glob("lib*.so"))
    changed = [(library.name, library.stat().st_size, library.stat().st_mtime_ns) for library in libraries]
    cached = cache_folder() / "symbols" / hashlib.sha256(f"{folder}{changed}".encode()).hexdigest()[:16]
    if not cached.exists():
        make_folder(cached.parent)
        with atomic_file(cached, "w") as handle:
            handle.write("\n".join(sorted(_imported_by(folder, libraries))))
    names = set(cached.read_text().split())
    return {name for name in names | triton_functions() if not name.startswith(driver_source.REAL)}


def _imported_by(folder: Path, libraries: list[Path]) -> set[str]:
    """The functions that torch's libraries import or look up."""
    names: set[str] = set()
    for library in libraries:
        names |= set(re.findall(r" U ((?:__cuda|cu|nccl)[A-Za-z]\w*)", tool("nm", "-D", "--undefined-only", str(library))))
    looked_up = (folder / "libc10_cuda.so").read_bytes()  # functions of the driver and of NVML, by name
    names |= {name.decode() for name in re.findall(rb"\0((?:cu|nvml)[A-Z][A-Za-z0-9]+(?:_v\d)?)(?=\0)", looked_up)}
    return names


def triton_functions() -> set[str]:
    """The functions of the driver's header that Triton brings: what it compiles may call any of them. None without Triton."""
    triton = importlib.util.find_spec("triton")
    header = Path(triton.origin).parent / "backends/nvidia/include/cuda.h" if triton and triton.origin else None
    if header is None or not header.exists():
        return set()
    text = header.read_text()
    renamed = dict(re.findall(r"#define (cu[A-Z]\w+) +(cu[A-Z]\w+_v\d)", text))
    return {renamed.get(name, name) for name in re.findall(r"CUDAAPI (cu[A-Z]\w+)\(", text)}


def tool(name: str, *arguments: str, text: str | None = None) -> str:
    """Run a program of the C toolchain and return its output.

    Raises:
        UserError: it is not installed.
        CalledProcessError: it failed.
    """
    if shutil.which(name) is None:
        raise UserError.of(name, "not found", "a C compiler `cc` and `nm` must be in PATH", f"install or load a compiler; {STILL}")
    return subprocess.run([name, *arguments], input=text, capture_output=True, text=True, check=True).stdout


def compile_library(text: str, target: Path) -> None:
    """Compile a source to a library; its folder is moved to its place when it is complete.

    Raises:
        UserError: there is no compiler, or it does not accept the source.
    """
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as parent:
        folder = Path(parent) / "library"
        folder.mkdir()
        options = ["-O1", "-w", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{LIBRARY}"]
        try:
            tool("cc", *options, "-x", "c", "-", "-o", str(folder / LIBRARY), "-ldl", text=text)
        except subprocess.CalledProcessError as error:
            first = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[:200])
            raise UserError.of("cc", shutil.which("cc"), f"must compile the driver: {first}", f"use another compiler; {STILL}") from error
        os.link(folder / LIBRARY, folder / NVML)  # one file: the dynamic linker loads it once
        try:
            folder.rename(target.parent)
        except OSError:
            if not target.exists():  # another process was not faster
                raise
