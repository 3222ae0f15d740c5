"""The group cluster: a site as data. A file of conf/cluster/ describes one."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob


@dataclass(frozen=True)
class QueueConfig:
    """A partition with a QoS, and its limits. A limit that is not set is not known, or there is none."""

    partition: str | None = knob(None, "Slurm partition; default: that of the cluster")
    qos: str | None = knob(None, "Slurm quality of service; default: that of the user")
    min_nodes: int = knob(1, "fewest nodes of a job", unit="nodes", at_least=1)
    max_nodes: int | None = knob(None, "most nodes of a job", unit="nodes", at_least=1)
    max_time: str | None = knob(None, "longest wall-clock limit in Slurm format")
    max_submitted: int | None = knob(None, "most jobs of a user that wait or run", unit="jobs", at_least=1)
    max_running: int | None = knob(None, "most jobs of a user that run", unit="jobs", at_least=1)


@dataclass(frozen=True)
class ClusterConfig:
    """Slurm options of a job on one cluster."""

    name: str = knob("local", "name of the site")
    account: str | None = knob(None, "Slurm account (project budget)")
    partition: str | None = knob(None, "Slurm partition; default: that of the first of cluster.queues that fits")
    qos: str | None = knob(None, "Slurm quality of service; default: that of the first of cluster.queues that fits")
    queues: list[QueueConfig] = knob(
        [],
        "partitions and QoS of the site with their limits. A job gets the first one that fits its nodes and time; limits that Slurm itself "
        "tells replace them",
        item=QueueConfig,
    )
    nodes: int = knob(1, "nodes per job", unit="nodes", at_least=1)
    min_nodes: int | None = knob(
        None,
        "training: fewest nodes that a job starts with, cluster.nodes being the most; it continues on as many after the loss of others. "
        "The layout is chosen for the nodes that there are; default: cluster.nodes",
        unit="nodes",
        at_least=1,
    )
    layouts: dict[int, list[str]] = knob(
        {},
        "training: layouts by the number of nodes. From that number on, up to the next one, these settings replace those of the "
        'configuration, such as {4: ["parallel.tensor=2"]}',
    )
    choose_layout: str = knob(
        "configured",
        "training: layout for the nodes that there are: that of the configuration with cluster.layouts, or the planner's fastest one "
        "(stage=plan stage.search=true) for cluster.hardware",
        choices=("configured", "planner"),
    )
    tasks_per_node: int = knob(1, "ranks per node, one per GPU", unit="ranks", at_least=1)
    cpus_per_task: int = knob(1, "CPU cores per rank", unit="cores", at_least=1)
    cores: int | None = knob(None, "CPU cores of a node that jobs can use, as Slurm counts them", unit="cores", at_least=1)
    gpus_per_node: int = knob(0, "GPUs per node; 0 requests none", unit="GPUs", at_least=0)
    architecture: str | None = knob(None, "processors of the nodes", choices=("x86_64", "aarch64"))
    hardware: str | None = knob(
        None, "GPU of the nodes: a file of conf/hardware/, for stage=plan and MFU (default there: by the name of the GPU)"
    )
    correction: str | None = knob(
        None,
        "file with the corrections of planned times by measured runs on this cluster, which stage=plan stage.run=RUN_DIR writes; default: "
        "plans are those of conf/hardware/",
    )
    check_memory: bool = knob(
        True, "refuse a training job that does not fit in the memory of cluster.hardware (plan, dry run, Slurm launcher)"
    )
    network_gb_s: float = knob(0.0, "bandwidth between nodes for each GPU; 0: that of conf/hardware/", unit="GB/s", at_least=0)
    memory: str | None = knob(None, "memory per node in Slurm format (for example 480G)")
    time: str = knob("01:00:00", "wall-clock limit in Slurm format; longest: that of the first of cluster.queues that fits the nodes")
    maintenance: str | None = knob(None, "begin of the next maintenance, such as 2026-12-01T08:00, where Slurm has no reservation for it")
    spares: int = knob(
        0, "nodes of a job beyond those that its ranks need; one of them replaces a node that fails", unit="nodes", at_least=0
    )
    continuation: str = knob(
        "requeue",
        "how a run that is longer than its job continues: the job is put back into the queue, or each job submits the next one",
        choices=("requeue", "chain"),
    )
    max_retries: int = knob(
        3, "failures in a row without a further checkpoint after which a job is not started again", unit="failures", at_least=1
    )
    host_suffix: str = knob("", "suffix appended to the name of the first node to select its fast network (i on JUWELS)")
    sbatch: list[str] = knob([], "additional sbatch options, each in command-line form")
    modules: list[str] = knob([], "environment modules that a job loads (module load)")
    setup: list[str] = knob([], "lines of bash that a job runs after the modules, on its first node")
    environment: dict[str, str] = knob({}, "variables of the environment of all ranks")
    srun: list[str] = knob([], "srun options of the ranks of stages with GPUs, such as --cpu-bind and --mpi=none")
    launch: list[str] = knob([], "command before the Python of each rank, such as [apptainer, exec, --nv, image.sif]")
    python: str | None = knob(None, "Python of the ranks; default: that of the job. A container may have another one")
    required: list[str] = knob([], "options of this group without which the cluster refuses jobs, such as account")
    preflight: str = knob(
        "auto",
        "test the nodes of a training job before its ranks start, and leave out bad ones; auto: jobs with GPUs and several nodes",
        choices=("auto", "on", "off"),
    )
    preflight_seconds: float = knob(
        120.0, "preflight: time limit of one step, from its start to the last all-reduce", unit="s", at_least=10, at_most=3600
    )
    slow_factor: float = knob(
        1.3,
        "a node is slow whose matrix product or all-reduce inside (preflight), or forward passes (training), take more than this many "
        "times the median, or all-reduce with other nodes (preflight, at least 2 times); preflight leaves it out, training names it",
        above=1,
    )
    free_gb: float = knob(1.0, "preflight: free space that the file system of run_dir must have", unit="GB", at_least=0)
    fabric: str | None = knob(
        None, "preflight: network that NCCL must use between nodes, as its log names it, such as IB or AWS Libfabric; default: any"
    )
