"""What tools/doctor finds in the process that ranks will be: PyTorch, folders that it sees, limits, variables and the network."""

from __future__ import annotations

import json
import locale
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.launch import site
from pipeline.parallel import open_files
from tools.slurm_checks import Row, refused, row

#: Seconds for all checks of tools/doctor, which run beside each other after the modules are loaded.
SECONDS = 25.0
ROOT = Path(__file__).resolve().parents[1]
#: Prints which of its arguments do not exist.
FIND = "import json, pathlib, sys, torch; print(json.dumps([name for name in sys.argv[1:] if not pathlib.Path(name).exists()]))"
#: Variables of debugging that make training slow.
SLOW = ("CUDA_LAUNCH_BLOCKING", "NCCL_IB_DISABLE", "NCCL_NET_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


def existing(path: str | Path) -> Path:
    return next(folder for folder in (Path(path).absolute(), *Path(path).absolute().parents) if folder.is_dir())


def imports(config: RunConfig) -> Iterator[Row]:
    """PyTorch and the folders of the run as ranks find them: with the libraries of modules, within the container of cluster.launch."""
    cluster, most = config.cluster, 0.8 * SECONDS
    command = [*cluster.launch, cluster.python or ("python" if cluster.launch else sys.executable), "-c", FIND]
    if shutil.which(command[0]) is None or site.other_architecture(cluster):  # other rows say so
        return
    paths = [config.run_dir, config.data.shards, config.data.tokens, config.tokenizer.path] if cluster.launch else []
    writable = [folder for folder in dict.fromkeys(map(existing, paths)) if os.access(folder, os.W_OK)]
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-")).name for folder in writable]
        try:
            done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=most, check=False, cwd=ROOT)
        except subprocess.TimeoutExpired:
            fix = "try again on an idle machine; if it stays so slow, tools/pack lets ranks load it from a local disk"
            yield row("imports", f"import torch takes more than {most:.0f} s", "warning", fix)
            return
    where = f" within {cluster.launch[0]}" if cluster.launch else ""
    bad = "failure" if not cluster.launch or "SLURM_JOB_ID" in os.environ else "warning"  # nodes may have what a login node lacks
    failed = done.returncode or not done.stdout
    text = f"import torch{where}: {' '.join(done.stderr.strip().splitlines()[-1:]) or f'no output, exit code {done.returncode}'}"
    path = os.environ.get("LD_LIBRARY_PATH")
    fix = f"unset LD_LIBRARY_PATH, or unload the module that sets it: {path}" if path else "tools/install"
    fix = "correct cluster.launch and cluster.python; the container needs PyTorch" if cluster.launch else fix
    yield row("imports", text if failed else f"torch{where}", failed and bad, fix)
    if cluster.launch and not failed:
        unseen = ", ".join(str(Path(name).parent) for name in json.loads(done.stdout.splitlines()[-1]))
        text = f"{unseen}: not there{where}" if unseen else f"the same{where}"
        yield row("container", text, unseen and bad, f"bind it in cluster.launch, as by --bind {unseen}")


def shell(config: RunConfig) -> Iterator[Row]:
    """What jobs inherit from the shell that submits them: limits (PropagateResourceLimits), proxies, encodings, umask."""
    cluster, files = config.cluster, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # A container has a Python of its own.
    programs = {"cluster.launch": cluster.launch[0]} if cluster.launch else {"cluster.python": cluster.python or sys.executable}
    lost = [f"{key}={name}" for key, name in programs.items() if shutil.which(name) is None]
    images = [image[1] for word in cluster.launch if (image := re.search(r"(?:^|=)([^:=]+\.(?:sif|sqsh|squashfs))(?=:|$)", word))]
    lost += [f"cluster.launch={name}" for name in images if not Path(name).exists()]
    fix = "correct it; if only other nodes have it, call tools/doctor in a job"
    yield row("programs", f"{', '.join(lost)}: not here" if lost else ", ".join(programs.values()), lost and "failure", fix)
    ranks = [
        name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ and "SLURM_JOB_ID" not in os.environ
    ]
    fix = f"unset {' '.join(ranks)}: a job takes them for the ranks of another launcher"
    yield row("variables", f"{', '.join(ranks) or 'none'} of another launcher", ranks and "failure", fix)
    kept_back = os.environ.get("SBATCH_EXPORT", "ALL").split(",")[0] != "ALL" and "SLURM_JOB_ID" not in os.environ
    text = "jobs do not get the variables of this shell (SBATCH_EXPORT)" if kept_back else "jobs get those of this shell"
    yield row("environment", text, kept_back and "warning", "unset SBATCH_EXPORT, or set what jobs need in cluster.environment")
    slow = [name for name in SLOW if os.environ.get(name, "0") != "0" and name not in cluster.environment]
    slow += ["GOMP_CPU_AFFINITY"] if "GOMP_CPU_AFFINITY" in os.environ else []  # for all ranks of a node the same cores
    yield row("debugging", ", ".join(slow) or "no variables", slow and "warning", f"unset {' '.join(slow)}: they make training slow")
    try:
        open_files.check_store(cluster.nodes * cluster.tasks_per_node, files)
        yield row("open files", f"hard limit {files:,}")
    except UserError as error:
        yield from refused("open files", error.violations)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"hard limit {locked / 1e6:,.0f} MB"
    fix = f"ask for ulimit -l unlimited in jobs (LimitMEMLOCK of slurmd): {cluster.fabric} locks the memory that it sends from"
    yield row("locked memory", text, text != "unlimited" and cluster.fabric and "warning", fix)
    dead = []
    for name in (names := [name for name in os.environ if re.fullmatch("https?_proxy", name.lower()) and os.environ[name]]):
        host, port = (re.findall(r"^(?:\w+://)?(?:[^@/]*@)?([^/]+?)(?::(\d+))?/?$", os.environ[name]) or [("", "")])[0]
        try:
            socket.create_connection((host, int(port or 80)), timeout=3).close()
        except OSError:
            dead.append(name)
    fix = f"cluster.setup=['unset {' '.join(dead)}'] for nodes without it: what asks for a URL waits for the proxy"
    yield row("proxies", f"{', '.join(dead)}: no answer" if dead else ", ".join(names) or "none", dead and "warning", fix)
    encodings = sorted({sys.getfilesystemencoding().lower(), locale.getencoding().lower()})
    yield row("locale", " and ".join(encodings), encodings != ["utf-8"] and "failure", "export LC_ALL=C.UTF-8, also in cluster.environment")
    mask = int(re.findall(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[0], 8)
    shared = mask & 0o040 and existing(config.run_dir).stat().st_mode & 0o2000
    why = "takes rights of the owner" if mask & 0o700 else "" if mask & 0o002 else "lets everybody change files"
    why = why or ("hides files from the group that shares run_dir" if shared else "")
    yield row("umask", f"{mask:04o} {why}", why and ("failure" if mask & 0o700 else "warning"), "umask 0027, or 0022")


def network(config: RunConfig) -> Iterator[Row]:
    """The interfaces that variables name, and the name of a node of a job under which the others reach it."""
    if "SLURM_JOB_ID" not in os.environ:
        return
    nets, adapters = [name for _, name in socket.if_nameindex()], [path.name for path in Path("/sys/class/infiniband").glob("*")]
    lost = []
    for name, here in {"GLOO_SOCKET_IFNAME": nets, "NCCL_SOCKET_IFNAME": nets, "NCCL_IB_HCA": adapters}.items():
        value = os.environ.get(name, "").removeprefix("=")
        if value and value[0] != "^" and not any(each.startswith(word.partition(":")[0]) for word in value.split(",") for each in here):
            lost.append(f"{name}={value}: there is only {', '.join(here) or 'nothing'}")
    fix = "correct it in cluster.environment, or unset it: ranks do not find each other"
    yield row("interfaces", "; ".join(lost) or ", ".join(nets), lost and "failure", fix)
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname()) + config.cluster.host_suffix
    try:
        socket.getaddrinfo(host, None)
        yield row("host name", f"{host} resolves")
    except OSError as error:
        fix = "correct cluster.host_suffix" if config.cluster.host_suffix else "ask the site about its name server"
        yield row("host name", f"{host}: {error.strerror}", "failure", fix)
