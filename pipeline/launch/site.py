"""What conf/cluster/NAME.yaml sets in a job: modules, lines of bash, variables, and how the ranks are started.

A rendered job runs the modules and lines itself, before the batch script of the stage, which needs its Python. A job of plain
`sbatch slurm/STAGE.sbatch cluster=NAME` knows its cluster only when the supervisor has composed the configuration: there the supervisor
runs them, and takes over the variables that they set. In both, the supervisor sets cluster.environment, completes it by the defaults of
ranks on GPUs (slurm/site.sh raises the limits), and starts the ranks.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.config import hardware
from pipeline.config.cluster import ClusterConfig
from pipeline.config.schema import RunConfig
from pipeline.config.stages import GPU_STAGES, TRAINING_STAGES

#: Where the flight recorder writes, below run_dir: a file for each rank, whose name ends with the rank.
FLIGHT_RECORDER = "flight_recorder/rank_"
#: Variable of a job whose text has run the modules and lines of a cluster: its name.
READY = "PIPELINE_SITE"


@dataclass(frozen=True)
class Default:
    """The default of a variable.

    Attributes:
        value: set if neither the variable nor one of `others` is.
        reason: why it is not left to PyTorch or NCCL.
        others: earlier and later names of the same setting.
    """

    value: str
    reason: str
    others: tuple[str, ...] = ()


#: What every rank on a GPU starts with.
DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Default(
        "3", "a rank whose collective fails or times out ends at once; aborting its communicators first can hang"
    ),
    "TORCH_FR_BUFFER_SIZE": Default(
        "2000", "PyTorch records the last collectives of a rank (flight recorder), by default none", ("TORCH_NCCL_TRACE_BUFFER_SIZE",)
    ),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": Default("1", "the record is written when a collective times out"),
    "NCCL_DEBUG": Default("WARN", "NCCL says why it fails, in the log of the job; by default it only returns an error code"),
}
#: What ranks on GPUs of NVIDIA start with besides; PyTorch does not support it on others.
NVIDIA_DEFAULTS = {
    "PYTORCH_CUDA_ALLOC_CONF": Default(
        "expandable_segments:True",
        "memory that is free, but in pieces, is used: buffers of buckets, micro-batches and warm-ups of the length have many sizes",
        ("PYTORCH_ALLOC_CONF",),
    ),
}


def complete(environment: MutableMapping[str, str], config: RunConfig) -> None:
    """Set the defaults that are missing in the environment of a job. Stages and clusters without GPUs have none.

    Args:
        environment: of the supervisor, which the ranks inherit.
    """
    cluster = config.cluster
    if config.stage.name not in GPU_STAGES or not cluster.gpus_per_node:
        return
    amd = cluster.hardware is not None and hardware.load(cluster.hardware).device.startswith("AMD")
    defaults = DEFAULTS | ({} if amd else NVIDIA_DEFAULTS)
    if config.stage.name in TRAINING_STAGES:
        file = Path(config.run_dir).absolute() / FLIGHT_RECORDER
        defaults["TORCH_FR_DUMP_TEMP_FILE"] = Default(str(file), "the record is in the run directory", ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",))
    add(environment, defaults)


def add(environment: MutableMapping[str, str], defaults: Mapping[str, Default]) -> None:
    """Set the variables that neither the environment nor another name of the same setting has."""
    for name, default in defaults.items():
        if not any(environment.get(variable) for variable in (name, *default.others)):
            environment[name] = default.value


def shell_lines(cluster: ClusterConfig, stage: str) -> list[str]:
    """Return the lines of bash that a rendered job of a stage begins with, and how its ranks are started as a comment."""
    lines = _setup_lines(cluster)
    ready = [f"export {READY}={shlex.quote(cluster.name)}"] if lines else []
    start = [*(cluster.srun if stage in GPU_STAGES else []), *cluster.launch]
    ready += [f"# each rank: srun {shlex.join(start)} python -m pipeline"] if start else []
    return [*lines, *(f"export {name}={shlex.quote(value)}" for name, value in cluster.environment.items()), *ready]


def _setup_lines(cluster: ClusterConfig) -> list[str]:
    return [*([f"module load {shlex.join(cluster.modules)}"] if cluster.modules else []), *cluster.setup]


def prepare(config: RunConfig | None) -> None:
    """Set up the environment of this process, from which the ranks inherit it.

    Args:
        config: of the job; None where nothing is composed.

    Raises:
        UserError: a module or a line of cluster.setup fails.
    """
    if config is None:
        return
    cluster = config.cluster
    if _setup_lines(cluster) and os.environ.get(READY) != cluster.name:
        os.environ.update(variables_after(cluster) | {READY: cluster.name})
    if config.stage.name in GPU_STAGES and cluster.fabric and os.environ.get("FI_PROVIDER") == "tcp":
        del os.environ["FI_PROVIDER"]  # slurm/sites/local.sh sets it for MPI, and NCCL over libfabric would use TCP as well
    os.environ.update(cluster.environment)
    complete(os.environ, config)


def variables_after(cluster: ClusterConfig) -> dict[str, str]:
    """The variables of a shell that has run the modules and lines; the Python of an active virtual environment stays the first one."""
    script = ["set -eo pipefail", "exec 3>&1 1>&2", *_setup_lines(cluster)]
    script += ['if [ -n "${VIRTUAL_ENV:-}" ]; then PATH="$VIRTUAL_ENV/bin:$PATH"; fi', "env -0 >&3"]
    done = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, check=False)
    if done.returncode or b":ERROR:" in done.stderr:  # modules 3 return 0 for a module that is not there
        said = " ".join(done.stderr.decode(errors="replace").split()[-40:])
        key, value = ("cluster.modules", cluster.modules) if cluster.modules else ("cluster.setup", cluster.setup)
        rule = f"cannot be set up on the node {platform.node()}: {said or f'exit code {done.returncode}'}"
        raise UserError.of(key, value, rule, "correct cluster.modules or cluster.setup; module avail lists what there is")
    sys.stderr.buffer.write(done.stderr)
    return dict(item.split("=", 1) for item in done.stdout.decode(errors="surrogateescape").split("\0") if "=" in item)


def srun_options(config: RunConfig | None, tasks_per_node: int | None) -> list[str]:
    """Return the srun options of the site for a step of ranks. Stages without GPUs have none, since their ranks start with MPI.

    Args:
        config: of the job; None where nothing is composed.
        tasks_per_node: ranks on each node of the job; None if the nodes have different numbers. A binding is for the ranks of a whole node.
    """
    if config is None or config.stage.name not in GPU_STAGES:
        return []
    whole = tasks_per_node in (None, config.cluster.tasks_per_node)
    return [option for option in config.cluster.srun if whole or not option.startswith(("--cpu-bind", "--cpu_bind", "--mem-bind"))]


def rank_command(config: RunConfig | None, arguments: Sequence[str], python: str = "python") -> list[str]:
    """Return the command of a rank, `python -m pipeline ARGUMENTS`.

    Args:
        config: of the job; None where nothing is composed.
        python: the interpreter, unless PIPELINE_PYTHON or cluster.python names one.
    """
    python = os.environ.get("PIPELINE_PYTHON") or python
    start = [python] if config is None else [*config.cluster.launch, config.cluster.python or python]
    return [*start, "-m", "pipeline", *arguments]


def other_architecture(cluster: ClusterConfig) -> str:
    """Return a line if this machine has other processors than the nodes, so that an environment made here does not run there."""
    here = platform.machine()
    if cluster.architecture in (None, here):
        return ""
    nodes = f"the nodes of cluster={cluster.name} are {cluster.architecture}"
    return f"this machine is {here}, and {nodes}: they need a Python environment of their own"
