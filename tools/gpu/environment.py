"""Section environment: software, devices, their connections, limits, cores beside the GPU, and variables of the launch profile."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import torch

from pipeline.config import hardware
from pipeline.launch import site
from pipeline.parallel import cpu_affinity
from pipeline.preflight import gpu_query
from pipeline.preflight.measure import versions
from tools.gpu.rows import Row, Setup, guarded

#: Files that a rank may need: sockets of the store, of gloo and of NCCL, data shards and checkpoints.
FILES = 4096
#: Packages that are used where they are installed.
OPTIONAL = ("triton", "torchao", "flash_attn_3", "transformers")
#: Seconds that nvidia-smi may take.
_PATIENCE = 60.0


def rows(setup: Setup) -> Iterator[Row]:
    yield Row("device", remark=setup.described())
    for name, version in _versions().items():
        yield Row(f"version of {name}", remark=version)
    if setup.cuda:
        for index in range(torch.cuda.device_count()):
            yield guarded(f"GPU {index}", _gpu, index)
    yield from _health(setup)
    yield guarded("topology", _topology, setup)
    yield from _limits()
    yield guarded("cores beside the GPU", _affinity, setup)
    for name, default in (site.DEFAULTS | site.NVIDIA_DEFAULTS).items():
        found = next((os.environ[each] for each in (name, *default.others) if os.environ.get(each)), "")
        same = found == default.value
        yield Row(name, remark=found if same else f"{found or 'not set'}; the launch profile sets {default.value}: {default.reason}")
    yield guarded("allocator", _allocator, setup)


def _versions() -> dict[str, str]:
    """Versions of what a job uses."""
    found: dict[str, Any] = {name: version for name, version in versions().items() if name != "commit" or version}
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    found |= {"CUDA": torch.version.cuda, "HIP": torch.version.hip, "cuDNN": cudnn}
    for name in OPTIONAL:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {name: "none" if version is None else str(version) for name, version in found.items()}


def _gpu(name: str, index: int) -> Row:
    """Name, capability and memory of a GPU, and the file of conf/hardware/ that describes it, which MFU and plans need."""
    properties = torch.cuda.get_device_properties(index)
    text = f"{properties.name}, capability {properties.major}.{properties.minor}, {properties.total_memory / 1e9:.1f} GB"
    known = hardware.of_device(properties.name)
    remark = f"{text}; planned as {known.name}" if known else f"{text}; not in conf/hardware/: no plans, no MFU"
    return Row(name, remark=remark)


def _health(setup: Setup) -> Iterator[Row]:
    """Yield the driver, and of each GPU its uncorrected errors of memory, other damage, and what slows it down."""
    found = gpu_query.query(_PATIENCE)
    if found is None:
        yield Row.skipped("driver", "nvidia-smi is not installed, and there is no GPU of AMD")
        return
    if "error" in found:
        yield Row.failed("driver", found["error"]) if setup.cuda else Row.skipped("driver", found["error"])
        return
    yield Row("driver", remark=found["driver"])
    for index, gpu in enumerate(found["gpus"]):
        problems = [*gpu["faults"], *gpu["throttled"]] + ([f"{gpu['ecc']} uncorrected errors of memory"] if gpu["ecc"] else [])
        yield Row.bounded(f"health of GPU {index}", len(problems), 0, "; ".join(problems) or gpu["name"])


def _topology(name: str, setup: Setup) -> Row:
    """The links between GPUs and network adapters, as nvidia-smi prints them, or rocm-smi those between GPUs."""
    commands = [words for words in (["nvidia-smi", "topo", "-m"], ["rocm-smi", "--showtopo"]) if shutil.which(words[0])]
    if not commands:
        return Row.skipped(name, "neither nvidia-smi nor rocm-smi is installed")
    done = subprocess.run(commands[0], capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=False)
    if done.returncode:
        text = " ".join((done.stdout + done.stderr).split())
        return Row.failed(name, text) if setup.cuda else Row.skipped(name, text)
    return Row(name, remark=done.stdout.strip())


def _limits() -> Iterator[Row]:
    """Yield the limits of the process: jobs raise the soft ones to the hard ones."""
    for name, limit in (
        ("open files", resource.RLIMIT_NOFILE),
        ("locked memory", resource.RLIMIT_MEMLOCK),
        ("stack", resource.RLIMIT_STACK),
    ):
        soft, hard = (None if size == resource.RLIM_INFINITY else size for size in resource.getrlimit(limit))
        remark = f"soft {'unlimited' if soft is None else f'{soft:,}'}, hard {'unlimited' if hard is None else f'{hard:,}'}"
        enough = limit != resource.RLIMIT_NOFILE or hard is None or hard >= FILES
        why = "" if enough else f"; large jobs need {FILES:,}: ask for a higher hard limit"
        yield Row(f"limit of {name}", "ok" if enough else "failed", None if hard is None else float(hard), None, remark + why)


def _affinity(name: str, setup: Setup) -> Row:
    """How many of the cores of this process are beside its GPU."""
    given = os.sched_getaffinity(0)
    if not setup.cuda:
        return Row.skipped(name, f"no GPU; {len(given)} cores")
    near = cpu_affinity.cores_beside(setup.device)
    if not near:
        return Row.skipped(name, f"/sys does not tell; {len(given)} cores")
    remark = f"of {len(given)} cores of this process, {len(near)} are beside the GPU in the machine"
    if not given & near:
        remark += ": copies between host and GPU are slower; bind ranks to their cores (cluster.srun=[--cpu-bind=...])"
    return Row(name, "ok" if given & near else "failed", float(len(given & near)), None, remark)


def _allocator(name: str, setup: Setup) -> Row:
    """The settings of PyTorch's allocator that are in effect."""
    if not setup.cuda:
        return Row.skipped(name, "no GPU")
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    return Row(name, remark=", ".join(f"{name}={value}" for name, value in settings.items() if value not in ("", None)))
