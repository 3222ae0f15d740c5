"""Jobs on a Slurm cluster of four nodes, which tools/devcluster starts on the local machine."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from pipeline.common.errors import UserError
from pipeline.config.cluster import ClusterConfig, QueueConfig
from pipeline.launch import job, live
from pipeline.launch import submission as submission
from tests.helpers import PYTHON, ROOT, SHARDS, pipeline, same_files

pytestmark = pytest.mark.slurm

DEVCLUSTER = str(ROOT / "tools" / "devcluster")
SLURM = ("hydra/launcher=slurm", "cluster=devcluster")


@pytest.fixture(scope="module", autouse=True)
def slurm() -> Iterator[None]:
    """Start the dev cluster and set the environment of its clients. A cluster that is already running is used and left running."""
    if os.geteuid() != 0:
        pytest.skip("requires root: tools/devcluster assigns a separate host name to each node")
    if not shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin") or not shutil.which(
        "munged", path=os.environ["PATH"] + ":/usr/sbin"
    ):
        pytest.skip("requires the packages slurm-wlm and munge")
    with open(Path(tempfile.gettempdir()) / "tannschen-tests-of-slurm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other worker may have tests of Slurm as well, and there is one cluster
        yield from _cluster()


def _cluster() -> Iterator[None]:
    """As `slurm`."""
    was_running = subprocess.run([DEVCLUSTER, "status"], capture_output=True, check=False).returncode == 0
    at_once = "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0"  # of seconds
    export = subprocess.run([DEVCLUSTER, "start", "--set", at_once], stdout=subprocess.PIPE, text=True, check=True).stdout
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", export.strip().partition("=")[2])
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.chdir(ROOT)
        yield
        queued = command("squeue", "--noheader")
        if not was_running:
            subprocess.run([DEVCLUSTER, "stop"], check=True)
        assert queued == "", "jobs of the tests are left"


def command(*words: str) -> str:
    """Run a Slurm command and return its output."""
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout


def sbatch(log: Path, *words: object) -> int:
    """Submit a job with sbatch and return its id."""
    return int(command("sbatch", "--parsable", f"--output={log}", *map(str, words)))


def tool(name: str, *words: object) -> str:
    """Run a program of tools/ and return what it prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / name, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def ended(number: int, seconds: float = 400) -> dict[str, str]:
    """Wait until a job has ended and return its fields from scontrol."""
    for _ in range(int(seconds * 4)):
        facts = dict(re.findall(r"(\w+)=(\S*)", command("scontrol", "show", "job", "--oneliner", str(number))))
        if facts["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            return facts
        time.sleep(0.25)
    raise AssertionError(f"job {number} still {facts['JobState']} after {seconds} s")


def succeeded(number: int, log: Path) -> str:
    """Wait for a job that must succeed and return its log, which must not contain control characters."""
    facts = ended(number)
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    assert facts["JobState"] == "COMPLETED", f"{facts}\n{text}"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text), repr(text)
    return text


def printed(run: Path) -> str:
    """What the evaluation jobs of a run printed."""
    return "\n".join(path.read_text() for path in (run / "evaluations").glob("*.out"))


def training_steps(run: Path) -> list[dict[str, Any]]:
    """Read the training lines of metrics.jsonl, without validations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.long
def test_the_doctor_on_a_login_node() -> None:
    """It finds nothing wrong with this Slurm; what it prints for the file of the site is right."""
    found = json.loads(tool("doctor", "--json", "cluster=devcluster"))
    assert {row["check"] for row in found["rows"] if row["status"] != "ok"} == set(), found
    assert {row["check"] for row in found["rows"]} > {"Slurm", "partitions", "sbatch", "GRES", "memory", "MPI"}
    assert {'queues: [{"partition": "batch", "max_nodes": 4}]', "gpus_per_node: 2", "cores: 4"} <= set(found["site"])


SAY_RANK = """
import socket
from pipeline.common.ranks import detect
here = detect()
print(socket.gethostname(), here.rank, here.world_size, here.local_rank, here.local_size, here.master_host, here.master_port)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "size, nodes, ranks", [(["--nodes=4", "--ntasks-per-node=2"], 4, 8), (["--nodes=3", "--ntasks=5"], 3, 5)], ids=["even", "uneven"]
)
def test_ranks_as_srun_starts_them(size: list[str], nodes: int, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY_RANK)
    number = sbatch(tmp_path / "log", *size, f"--wrap=srun python {tmp_path / 'say.py'}")
    rows = [line.split() for line in succeeded(number, tmp_path / "log").splitlines()]
    hosts = [row[0] for row in rows]
    found = {host: hosts.count(host) for host in hosts}
    assert found.keys() <= {"n1", "n2", "n3", "n4"}
    assert (len(found), len(rows)) == (nodes, ranks)
    assert sorted(int(row[1]) for row in rows) == list(range(len(rows)))
    assert {row[2] for row in rows} == {str(len(rows))}
    for host, count in found.items():
        assert sorted(int(row[3]) for row in rows if row[0] == host) == list(range(count))
        assert {int(row[4]) for row in rows if row[0] == host} == {count}
    assert {row[5] for row in rows} == {next(row[0] for row in rows if row[1] == "0")}
    assert len({row[6] for row in rows}) == 1


MODEL = ["model=llama-tiny", "model.vocab_size=304", "precision=fp32", "tracking=disabled"]
TRAINING = [
    "parallel.tensor=2", "parallel.pipeline=2", "parallel.zero_stage=2", "training.steps=4", "optimizer.warmup_steps=1",
    "training.global_batch_size=8", "training.micro_batch_size=2", "training.sequence_length=32", "training.validation_batches=1",
]  # fmt: skip


@pytest.mark.long
def test_a_job_array_shards_without_mpi(corpus: Path, shards: Path, tmp_path: Path) -> None:
    settings = ["slurm/shard.sbatch", f"data.input=[{corpus}]", *SHARDS, f"data.shards={tmp_path}/shards"]
    number = sbatch(tmp_path / "log-%a", "--array=1-3", *settings)
    for _ in range(1600):
        if not command("squeue", "--noheader", f"--jobs={number}").strip():
            break
        time.sleep(0.25)
    logs = [(tmp_path / f"log-{task}").read_text() for task in (1, 2, 3)]
    assert sum("shard: wrote" in log for log in logs) == 1, logs
    assert same_files(shards, tmp_path / "shards")


@pytest.mark.long
def test_chain(corpus: Path, tokens: Path, tokenizer: Path, shards: Path, tmp_path: Path) -> None:
    """The full pipeline as a chain of dependent jobs; multi-rank stages use 2 nodes x 2 tasks, and checkpoints are evaluated by one."""
    run = tmp_path / "run"
    folders = [f"data.shards={tmp_path}/shards", f"tokenizer.path={tmp_path}/tokenizer", f"data.tokens={tmp_path}/tokens", f"run_dir={run}"]
    wide = ["--nodes=2", "--ntasks-per-node=2"]
    evaluated = ["evaluation.every=2", "checkpoint.keep=1", 'evaluation.overrides=["parallel.tensor=1","parallel.pipeline=1"]']
    chain = {
        "shard": [*wide, "slurm/shard.sbatch", f"data.input=[{corpus}]", *SHARDS],
        "train_tokenizer": ["slurm/train_tokenizer.sbatch", "tokenizer.vocab_size=300", "tokenizer.report=false"],
        "tokenize": [*wide, "slurm/tokenize.sbatch"],
        "pretrain": [*wide, "slurm/pretrain.sbatch", *MODEL, *TRAINING, "parallel.zero_stage=0", *evaluated],  # without DeepSpeed's import
        "convert": ["slurm/convert.sbatch", *MODEL],
    }
    numbers: dict[str, int] = {}
    for stage, words in chain.items():
        after = [f"--dependency=afterok:{list(numbers.values())[-1]}", "--kill-on-invalid-dep=yes"] if numbers else []
        numbers[stage] = sbatch(tmp_path / f"{stage}.log", *after, *words, *folders)
    for stage, number in numbers.items():
        succeeded(number, tmp_path / f"{stage}.log")

    table = run / "evaluations" / "table.csv"
    for _ in range(400):
        rows = table.read_text().splitlines() if table.exists() else []
        if len(rows) == 3:
            break
        time.sleep(0.25)
    assert [row.partition(",")[0] for row in rows] == ["step", "2", "4"], printed(run)
    # Four ranks on two nodes write the same files as one process.
    assert same_files(shards, tmp_path / "shards")
    assert same_files(tokenizer, tmp_path / "tokenizer")
    assert same_files(tokens, tmp_path / "tokens")
    totals = json.loads((run / "manifest.json").read_text())["totals"]
    assert (totals["world_size"], sorted(set(totals["hosts"]))) == (4, ["n1", "n2"])
    assert [line["step"] for line in training_steps(run)] == [1, 2, 3, 4]
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "hf")
    assert len(transformers.AutoTokenizer.from_pretrained(run / "hf")) <= model.get_input_embeddings().num_embeddings == 304


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's own folder with an experiment of 200 documents, for --config-dir."""
    (tmp_path / "docs.jsonl").write_text("".join(f'{{"text": "document {n} about houses and ships"}}\n' for n in range(200)))
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    settings = ["# @package _global_", "defaults: [override /clean: none, _self_]", f"data: {{input: [{tmp_path}/docs.jsonl]}}"]
    settings += ["tokenizer: {vocab_size: 280, report: false}"]
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text("\n".join(settings))
    return tmp_path / "own"


def test_stages_are_submitted_as_a_chain(own: Path, tmp_path: Path) -> None:
    """Its jobs get no variables of this process, and read the files of --config-dir as they were."""
    folders = [f"data.shards={tmp_path}/shards", f"tokenizer.path={tmp_path}/tokenizer", f"run_dir={tmp_path}/run"]
    words = ["submit.stages=[shard,train_tokenizer]", f"--config-dir={own}", "experiment=mine", "cluster=devcluster", "cluster.nodes=1"]
    words += ["cluster.tasks_per_node=1", "cluster.sbatch=[--export=NONE]", *folders]
    said = pipeline("stage=submit", *words)
    shutil.rmtree(own)
    numbers = {stage: int(number) for number, stage in re.findall(r"^job (\d+)  (\w+)", said, re.MULTILINE)}
    assert list(numbers) == ["shard", "train_tokenizer"]
    for stage, number in numbers.items():
        text = succeeded(number, tmp_path / "run" / f"slurm-{stage}-{number}.out")
    assert "(280 entries)" in text


@pytest.mark.long
def test_a_sweep_reads_the_users_own_files(own: Path, shards: Path, tmp_path: Path) -> None:
    words = ["stage=train_tokenizer", "tokenizer.vocab_size=270,290", f"data.shards={shards}", "tokenizer.path=${run_dir}/tokenizer"]
    pipeline("-m", *words, f"--config-dir={own}", "experiment=mine", f"run_dir={tmp_path}/sweep", "cluster.sbatch=[--export=NONE]", *SLURM)
    for entry in json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]:
        assert "0 entries)" in succeeded(entry["job"], Path(entry["log"]))
    assert len(list((tmp_path / "sweep" / "snapshots").glob("*/jobs/*.sbatch"))) == 2


@pytest.mark.long
def test_a_script_without_inherited_variables(own: Path, tmp_path: Path) -> None:
    """Its Python is that of .venv, which the file of the site activates; without one, the job says so."""
    (tmp_path / "checkout").mkdir()
    for name in ("slurm", "pipeline", "conf"):
        (tmp_path / "checkout" / name).symlink_to(ROOT / name)
    words = ["slurm/shard.sbatch", f"--config-dir={own}", "experiment=mine", f"data.shards={tmp_path}/shards"]
    options = [f"--chdir={tmp_path}/checkout", "--ntasks=1"]
    missing = sbatch(tmp_path / "missing", *options, "--export=PIPELINE_PYTHON=/none/python", *words)
    (tmp_path / "checkout" / ".venv").symlink_to(Path(sys.executable).parents[1])
    succeeded(sbatch(tmp_path / "log", *options, "--export=NONE", *words), tmp_path / "log")
    assert ended(missing)["ExitCode"] == "2:0"
    assert "/none/python is not a Python with the packages" in (tmp_path / "missing").read_text()


@pytest.mark.long
def test_slurm_is_asked_before_a_chain_is_submitted(tmp_path: Path) -> None:
    words = ["submit.stages=[shard,train_tokenizer]", "cluster=devcluster", f"run_dir={tmp_path}/run", f"data.shards={tmp_path}/shards"]
    for wrong, said in (
        ("cluster.partition=nope", "cluster.partition=nope: Slurm rejected the job: invalid partition specified: nope"),
        ("cluster.nodes=5", "Requested node configuration is not available (in stage shard)"),
    ):
        assert said in pipeline("stage=submit", *words, wrong, expect=2)
    assert not (tmp_path / "run" / "submission.json").exists()


@pytest.mark.long
def test_a_failure_ends_the_chain(tmp_path: Path) -> None:
    first = sbatch(
        tmp_path / "log",
        "--ntasks=1",  # a single rank requires no MPI, whose start-up under srun sometimes fails
        "slurm/shard.sbatch",
        f"data.input=[{tmp_path}/none]",
        f"data.shards={tmp_path}/s",
    )
    next_job = job.Job("next", "train_tokenizer", (f"data.shards={tmp_path}/s",), ROOT, f"{tmp_path}/next-%j.out")
    depends = [f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes"]
    second = submission.submit(job.render(next_job, ClusterConfig(name="devcluster", sbatch=depends)))
    facts = ended(first)
    assert facts["JobState"] == "FAILED"
    log = (tmp_path / "log").read_text()
    assert f"data.input={tmp_path}/none" in log.replace("[", "").replace("]", "")
    assert "Traceback" not in log
    assert ended(second)["JobState"] == "CANCELLED"
    assert not list(tmp_path.glob("next-*"))


@pytest.mark.long
def test_a_sweep_is_submitted_and_the_launcher_exits(tokens: Path, tmp_path: Path) -> None:
    """Two runs, held until the launcher has exited. Their folder name requires quoting for the shell, Slurm and Hydra."""
    sweep = tmp_path / "a sweep #1 100%"
    rates = [1e-4, 1e-3]
    printed = pipeline(
        "-m", "stage=pretrain", "optimizer.lr=1e-4,1e-3", f"data.tokens={tokens}", f"run_dir='{sweep}'", *MODEL, *TRAINING,
        "parallel.pipeline=1", "parallel.zero_stage=0", "cluster.nodes=2", "cluster.tasks_per_node=1", "cluster.sbatch=[--hold]", *SLURM,
    )  # fmt: skip
    record = json.loads((sweep / "sweep.json").read_text())["points"]
    assert len(record) == 2
    for entry in record:
        assert f"job {entry['job']}: {sweep / entry['run_dir']}" in printed
        command("scontrol", "release", str(entry["job"]))
    losses = []
    for index, (rate, entry) in enumerate(zip(rates, record, strict=True)):
        assert entry["run_dir"] == f"./{index}", "the folder can be moved"
        facts = ended(entry["job"])
        assert (facts["JobState"], facts["NumNodes"], facts["NumTasks"]) == ("COMPLETED", "2", "2"), Path(entry["log"]).read_text()
        steps = training_steps(sweep / str(index))
        assert max(line["lr"] for line in steps) == pytest.approx(rate)
        losses.append(steps[-1]["loss"])
    assert len(set(losses)) == 2


@pytest.mark.long
def test_a_sweep_submits_only_what_is_neither_queued_nor_finished(tokens: Path, tmp_path: Path) -> None:
    def submit(*rates: str) -> list[str]:
        printed = pipeline(
            "-m", "stage=pretrain", f"optimizer.lr={','.join(rates)}", f"data.tokens={tokens}", f"run_dir={tmp_path}/sweep",
            *MODEL, *TRAINING, "cluster.sbatch=[--hold]", *SLURM,
        )  # fmt: skip
        return [line.partition(":")[0] for line in printed.splitlines() if f"{tmp_path}/sweep/" in line]

    first = submit("1e-4", "3e-4")
    numbers = [int(line.removeprefix("job ")) for line in first]
    command("scancel", str(numbers[1]))
    ended(numbers[1])
    done = {"stage": "pretrain", "settings": {}, "files": {}, "totals": {"step": 4}}
    (tmp_path / "sweep" / "1" / "manifest.json").write_text(json.dumps(done))
    second = submit("1e-4", "3e-4", "1e-3")
    assert second[:2] == [f"queued as job {numbers[0]}", "finished"]
    numbers.append(int(second[2].removeprefix("job ")))
    assert "PIPELINE_CONF" in command("scontrol", "write", "batch_script", str(numbers[2]), "-")
    assert re.findall(r"^(\d) +optimizer\.lr=\S+ +(\w+)", tool("sweep", "status", tmp_path / "sweep"), re.MULTILINE) == [
        ("0", "pending"), ("1", "not"), ("2", "pending"),
    ]  # fmt: skip
    assert f"canceled 2 jobs: {numbers[0]} {numbers[2]}" in tool("sweep", "cancel", tmp_path / "sweep")
    for number in numbers[::2]:
        ended(number)
    assert re.findall(r"^(\d) +optimizer\S+ +(canceled|not started)", tool("sweep", "status", tmp_path / "sweep"), re.MULTILINE) == [
        ("0", "canceled"), ("1", "not started"), ("2", "canceled"),
    ]  # fmt: skip
    again = tool("sweep", "resubmit", tmp_path / "sweep", "--points", "1", "2").splitlines()
    assert [line.partition(": ")[2] for line in again] == [f"{tmp_path}/sweep/1", f"{tmp_path}/sweep/2"]
    assert again[0].startswith("finished")
    assert tool("sweep", "cancel", tmp_path / "sweep") == f"canceled 1 jobs: {again[1].partition(':')[0].removeprefix('job ')}\n"


def test_a_job_whose_time_ends_is_requeued_until_it_is_complete(tokens: Path, tmp_path: Path) -> None:
    """The signal that Slurm sends before the time limit, sent by hand. The job keeps its id, so a dependent job waits for the end."""
    run, log, python = tmp_path / "run", tmp_path / "log", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(PYTHON)} "$@"\n')
    python.chmod(0o755)
    steps = ["training.steps=200", "checkpoint.every=0", "parallel.zero_stage=0", f"data.tokens={tokens}", f"run_dir={run}"]
    size = ("--nodes=2", "--ntasks-per-node=1", f"--export=ALL,PIPELINE_PYTHON={python}")
    number = sbatch(log, *size, "slurm/pretrain.sbatch", *MODEL, *TRAINING, "parallel.tensor=1", "parallel.pipeline=1", *steps)
    after = sbatch(tmp_path / "after", f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes", "--wrap=true")
    for _ in range(2400):
        if (run / "metrics.jsonl").is_file() and len(training_steps(run)) > 5:
            break
        time.sleep(0.1)
    command("scancel", "--signal=USR1", str(number))
    text = succeeded(number, log)
    assert text.count("requeueing job") == 1
    assert text.count("the same command continues") == 1
    assert [line["step"] for line in training_steps(run)] == list(range(1, 201))
    assert json.loads((run / "manifest.json").read_text())["totals"]["job"] == str(number)
    assert ended(after)["JobState"] == "COMPLETED"


@pytest.mark.long
def test_a_mistake_exits_with_code_2_on_several_ranks(tmp_path: Path) -> None:
    """Variables of another job in the submitting shell would split the job into runs of one rank each."""
    variables = "--export=ALL,RANK=0,WORLD_SIZE=1,MASTER_ADDR=localhost,MASTER_PORT=29500"
    number = sbatch(tmp_path / "log", "--nodes=4", "--ntasks-per-node=1", variables, "slurm/pretrain.sbatch", f"run_dir={tmp_path}/run")
    facts, text = ended(number), (tmp_path / "log").read_text()
    assert facts["ExitCode"] == "2:0", text
    assert "WORLD_SIZE=1: contradicts srun" in text
    assert not (tmp_path / "run").exists()


def test_submission_from_another_folder_is_refused(tmp_path: Path) -> None:
    number = sbatch(tmp_path / "log", f"--chdir={tmp_path}", ROOT / "slurm" / "pretrain.sbatch")
    assert ended(number)["ExitCode"] == "2:0"
    assert (tmp_path / "log").read_text() == f"pretrain.sbatch: {tmp_path} has no slurm/site.sh: submit at the root of the repository, " \
        "or with sbatch --chdir\n"  # fmt: skip


def test_a_rejected_sweep_is_canceled_completely(tmp_path: Path) -> None:
    message = pipeline(
        "-m", "stage=shard", "cluster.partition=batch,nope", f"run_dir={tmp_path}", "cluster.sbatch=[--hold]", *SLURM, expect=2
    )
    assert "invalid partition specified: nope" in message
    assert "Traceback" not in message
    assert not (tmp_path / "sweep.json").exists()


def test_sbatch_errors_are_reported() -> None:
    with pytest.raises(UserError, match="invalid partition specified: nope"):
        submission.submit("#!/bin/bash\n#SBATCH --partition=nope\ntrue\n")


def test_limits_of_the_partitions_are_read() -> None:
    """As `scontrol` of this cluster prints them, for a site whose file says something else."""
    partitions = live.parse_partitions(command("scontrol", "show", "partition", "--oneliner"))
    assert partitions["batch"]["max_nodes"] == 4
    site = ClusterConfig(name="mine", queues=[QueueConfig("batch", max_nodes=64)])
    changed, said = live.with_limits(site, partitions, {})
    assert changed.queues[0].max_nodes == 4
    assert said == ["partition batch: max_nodes is 4 in Slurm, and 64 in cluster=mine; that of Slurm is used"]
