"""stage=submit: job texts against a golden file, refusals, records and snapshots, with commands of Slurm that record what they get."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.common import locks, ranks
from pipeline.common.errors import UserError
from pipeline.config import command_line, compose
from pipeline.config.stages import Certify
from pipeline.launch import in_use, snapshot, stage_chain, submission
from tests.helpers import ROOT, pipeline
from tests.world import configured

GOLDEN = Path(__file__).parent / "golden"
STAGES = "submit.stages=[shard,train_tokenizer,tokenize,certify,pretrain,evaluate,convert]"
#: sbatch numbers the jobs from 7 on and keeps their scripts; it rejects the partition nope, and all jobs after the first if told so.
SBATCH = """#!/bin/bash
script=$(cat)
case "$script" in *partition=nope*) echo "sbatch: error: invalid partition specified: nope" >&2; exit 1;; esac
[ "$1" != --test-only ] || { echo "sbatch: Job 1 to start" >&2; exit 0; }
number=$((7 + $(ls FOLDER | grep -c job-)))
[ ! -e FOLDER/full ] || [ $number = 7 ] || { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }
{ echo "partition of the shell: ${SBATCH_PARTITION-none}"; echo "$script"; } > FOLDER/job-$number
echo $number
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with commands of Slurm: job-NUMBER are the submitted scripts, queue is the output of squeue, canceled that of scancel."""
    folder = tmp_path / "slurm commands"
    folder.mkdir()
    texts = {
        "sbatch": SBATCH.replace("FOLDER", f"'{folder}'"),
        "squeue": f"#!/bin/bash\ncat '{folder}/queue'\n",
        "sinfo": "#!/bin/bash\nexit 1\n",
        "scancel": f"#!/bin/bash\necho $@ >> '{folder}/canceled'\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in [name for name in os.environ if re.match("SLURM_|SBATCH_|RANK$|WORLD_SIZE$", name)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with batch scripts and an environment, as that of a checkout."""
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    (tmp_path / ".venv").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submitted(slurm: Path) -> dict[int, str]:
    """The scripts that sbatch got: id -> text."""
    return {int(path.name.removeprefix("job-")): path.read_text() for path in sorted(slurm.glob("job-*"))}


def queue(slurm: Path, *jobs: int) -> None:
    """Let squeue list jobs."""
    (slurm / "queue").write_text("".join(f"{number}\x1fname\x1f/\x1f(null)\n" for number in jobs))


def golden(name: str, text: str, root: Path) -> None:
    """Compare job texts with a golden file, with the folder of the test, the time and the content of conf/ replaced."""
    text = re.sub(r"snapshots/[\dT-]+", "snapshots/TIME", re.sub(r"\.conf-\w+", ".conf-CONTENT", text))
    text = text.replace(str(root), "/home/me/tannschen")
    text = re.sub(r"(--job-name=\w+-\w+)-[0-9a-f]{8}\b", r"\1-FOLDER", text)
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def composed(*arguments: str) -> list[stage_chain.Link]:
    """The jobs of a chain."""
    compose.register()
    given = ["stage=submit", *arguments]
    found, config = compose.diagnose(command_line.parse(given))
    assert not found
    return stage_chain.links(compose.to_run_config(config), command_line.parse(given).arguments)


def test_the_jobs_of_a_chain(checkout: Path) -> None:
    text = pipeline(
        "stage=submit", STAGES, "experiment=demo", "cluster=juwels", "cluster.account=fir", "cluster.nodes=2", "dry_run=true",
        "training.global_batch_size=32", "submit.overrides.evaluate=[cluster.nodes=1,stage.batches=4]",
        "submit.overrides.pretrain=[parallel.tensor=2]", "cluster.check_memory=false", "run_dir=runs/demo",
    )  # fmt: skip
    golden("chain.sbatch", text[text.index("#!/bin/bash") :], checkout)
    assert not (checkout / "runs").exists()


def test_the_jobs_of_a_sweep(checkout: Path) -> None:
    text = pipeline(
        "-m", "stage=train_tokenizer", "tokenizer.vocab_size=4096,8192", "cluster=devcluster", "hydra/launcher=slurm", "dry_run=true",
        "run_dir=runs/tokenizers",
    )  # fmt: skip
    golden("sweep.sbatch", text[text.index("#!/bin/bash") :], checkout)


def test_settings_of_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    links = composed(
        "submit.stages=[certify,pretrain,convert]", "model=llama-tiny", "cluster.nodes=2", "cluster.tasks_per_node=4", "run_dir=runs/a b",
        "submit.overrides.pretrain=[model=gpt-tiny,parallel.tensor=2]", "submit.overrides.convert=[cluster.tasks_per_node=2]",
    )  # fmt: skip
    certify, pretrain, convert = links
    assert [link.config.model.family for link in links] == ["gpt", "gpt", "llama"]
    assert [link.world_size for link in links] == [8, 8, 4]
    assert [link.cluster.nodes * link.cluster.tasks_per_node for link in links] == [1, 8, 4]
    assert isinstance(certify.config.stage, Certify)
    assert certify.config.stage.world_size == 8
    assert certify.config.parallel == pretrain.config.parallel
    assert {"model=gpt-tiny", "run_dir='runs/a b'"} <= {*pretrain.arguments}
    assert "model=llama-tiny" not in pretrain.arguments
    assert "model=llama-tiny" in convert.arguments


@pytest.mark.long
def test_data_stages_on_the_nodes_of_the_training_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ("submit.stages=[tokenize,pretrain,convert]", "cluster=juwels", "cluster.nodes=2", "model=llama-tiny", "run_dir=runs/x")
    (said,) = stage_chain.idle_gpus(composed(*words))
    assert said.startswith("tokenize uses no GPU, and gets 2 nodes of the partition booster with GPUs; 'submit.overrides.tokenize=[")
    assert list(stage_chain.idle_gpus(composed(*words, "submit.overrides.tokenize=[cluster.nodes=1]"))) == []
    assert list(stage_chain.idle_gpus(composed(*(word for word in words if word != "cluster=juwels")))) == []


def test_evaluations_on_more_nodes_than_the_model_needs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ("submit.stages=[evaluate]", "cluster.nodes=4", "cluster.tasks_per_node=2", "model=llama-tiny", "run_dir=runs/x")
    (said,) = stage_chain.idle_gpus(composed(*words, "parallel.tensor=2"))
    assert said == (
        "evaluate gets 4 nodes, and one holds the model in this layout; 'submit.overrides.evaluate=[cluster.nodes=1]' asks for one"
    )
    assert list(stage_chain.idle_gpus(composed(*words, "parallel.tensor=4"))) == []
    assert list(stage_chain.idle_gpus(composed(*words, "parallel.tensor=2", "submit.overrides.evaluate=[cluster.nodes=1]"))) == []


def test_a_range_of_nodes_in_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["model=llama-tiny", "cluster.nodes=4", "cluster.spares=1", "run_dir=runs/range"]
    texts = stage_chain.rendered(composed("submit.stages=[pretrain,convert]", *words, "cluster.min_nodes=2"), Path("runs/range"))
    assert "#SBATCH --nodes=3-5\n" in texts[0]
    assert "#SBATCH --nodes=1\n" in texts[1]
    with pytest.raises(UserError, match=r"cluster.min_nodes=3: has no legal layout on 3 nodes .* \(in stage pretrain\)"):
        composed("submit.stages=[pretrain]", *words, "cluster.min_nodes=3")


def test_problems_of_all_stages_are_reported_at_once(slurm: Path, tmp_path: Path) -> None:
    message = pipeline(
        "stage=submit", "submit.stages=[certify,evaluate,convert]", f"run_dir={tmp_path}/run", "stage.world_size=7", "training.stpes=3",
        "data.seed=-1", "cluster.nodes=3", "submit.overrides.evaluate=[optimzier.lr=1]", "submit.overrides.convert=[stage.format=zip]",
        expect=2,
    )  # fmt: skip
    assert message.startswith("5 problems"), message
    assert "fix: write 'submit.overrides.certify=[stage.world_size=7]'" in message
    assert "training.stpes=3: no such key (in all stages)\n    fix: did you mean training.steps" in message
    assert "data.seed=-1: must be at least 0 and at most 1e+18 (in all stages)" in message
    assert "optimzier.lr=1: no such key (in stage evaluate)" in message
    assert "stage.format=zip: must be one of" in message
    assert not submitted(slurm)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), [r"submit.stages=\[\]: is required"]),
        (
            (
                "submit.stages=[tokenise,plan,shard,shard]",
                "submit.overrides.shrad=[data.seed=1]",
                "submit.overrides.shard=[stage=tokenize,data.seed]",
            ),
            [
                "submit.stages=tokenise: must be one of .*\n    fix: did you mean tokenize",
                "submit.stages=plan: is no batch job",
                "submit.stages=shard: is named 2 times",
                "did you mean submit.overrides.shard",
                "submit.overrides.shard=stage=tokenize: is set for the whole chain",
                "submit.overrides.shard='data.seed': is not of the form key=value",
            ],
        ),
        (
            (
                *("submit.stages=[finetune,tokenize,train_tokenizer,shard]", "cluster.time=soon"),
                *("data.instructions.tokens=no/tokens", "data.instructions.train=[x.jsonl]"),
            ),
            [
                "is read by train_tokenizer before shard writes it .in stage train_tokenizer.",
                "cluster.time=soon: must have the form",
                "no/tokens: is read by finetune before tokenize writes it",
            ],
        ),
        (
            ("submit.stages=[shard]", "submit.stagse=1", "+data.sede=1"),
            ["did you mean submit.stages", "data.sede=1: no such key .in stage shard.\n    fix: did you mean data.seed"],
        ),
    ],
    ids=["nothing", "stages", "order", "keys"],
)
def test_what_is_refused(slurm: Path, tmp_path: Path, words: tuple[str, ...], said: list[str]) -> None:
    message = pipeline("stage=submit", f"run_dir={tmp_path}/run", f"data.shards={tmp_path}/shards", *words, expect=2)
    for text in said:
        assert re.search(text, message), message
    assert not submitted(slurm)
    assert not (tmp_path / "run").exists()


CHAIN = ("stage=submit", "submit.stages=[shard,train_tokenizer]", "cluster=devcluster", "data.input=[/data/raw]")


def test_a_chain_is_submitted_recorded_and_not_submitted_twice(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SLURM_JWT", "secret")
    printed = pipeline(*CHAIN, f"run_dir={run}")
    assert printed.splitlines()[-3:-1] == [
        f"job 7  shard            {run}/slurm-shard-7.out",
        f"job 8  train_tokenizer  {run}/slurm-train_tokenizer-8.out",
    ]
    texts = submitted(slurm)
    assert "dependency" not in texts[7]
    assert "#SBATCH --dependency=afterok:7\n#SBATCH --kill-on-invalid-dep=yes\n#SBATCH --partition=batch\n" in texts[8]
    assert "partition of the shell: none" in texts[7], "the variable would replace cluster.partition"
    record = json.loads((run / "submission.json").read_text())
    assert [(job["job"], job["stage"]) for job in record["jobs"]] == [(7, "shard"), (8, "train_tokenizer")]

    taken = Path(record["snapshot"])
    assert f"export PIPELINE_CONF={taken}/conf\nexport PIPELINE_SNAPSHOT={taken}\n" in texts[8]
    facts = json.loads((taken / "snapshot.json").read_text())
    assert facts["torch"]
    assert facts["packages"]["omegaconf"]
    assert facts["python"]["executable"] == sys.executable
    assert facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert "secret" not in (taken / "snapshot.json").read_text()
    assert "name: train_tokenizer" in (taken / "config" / "train_tokenizer.yaml").read_text()
    assert "#SBATCH --nodes=1" in (taken / "jobs" / "train_tokenizer.sbatch").read_text()
    assert (taken / "conf" / "config.yaml").read_bytes() == (ROOT / "conf" / "config.yaml").read_bytes()

    queue(slurm, 3, 8)
    message = pipeline(*CHAIN, f"run_dir={run}", expect=2)
    assert f"run_dir={run}: is that of jobs in the queue: 8 (name)" in message
    queue(slurm, 3)
    assert "job 9  shard" in pipeline(*CHAIN, f"run_dir={run}")
    assert len(list((run / "snapshots").glob("[0-9]*"))) == 2


def test_a_rejected_chain_leaves_nothing(slurm: Path, tmp_path: Path) -> None:
    message = pipeline(*CHAIN, f"run_dir={tmp_path}/run", "cluster.partition=nope", expect=2)
    assert "1 problem" in message
    assert "cluster.partition=nope: Slurm rejected the job: invalid partition specified: nope (in stages shard, train_tokenizer)" in message
    assert not submitted(slurm)
    (slurm / "full").touch()
    message = pipeline(*CHAIN, f"run_dir={tmp_path}/run", expect=2)
    assert "cluster.qos=None: Slurm rejected the job: QOSMaxSubmitJobPerUserLimit" in message
    assert (slurm / "canceled").read_text() == "7\n"
    assert not (tmp_path / "run" / "submission.json").exists()
    assert not list((tmp_path / "run" / "snapshots").glob("[0-9]*"))


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    """By a job that runs, or by one in the queue, whose command names it relatively to its folder."""
    run, stages = tmp_path / "run", ["shard", "train_tokenizer"]
    words = f"{ROOT}/slurm/shard.sbatch data.seed=1 run_dir=run"
    queued = [submission.QueuedJob(5, "shard", str(tmp_path), words), submission.QueuedJob(6, "other", str(tmp_path), f"{words}2")]
    with locks.claimed(run, "run_dir"):
        (locked,) = in_use.violations(run, stages, queued[1:])
        (waits,) = in_use.violations(run, stages, queued)
    assert "is being written by another job: job without a scheduler" in locked.rule
    assert waits.rule == "is that of jobs in the queue: 5 (shard)"
    assert list(in_use.violations(run, stages, queued[1:])) == []


@pytest.mark.usefixtures("slurm")
def test_slurm_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    message = pipeline(*CHAIN, f"run_dir={tmp_path}/run", "data.seed=-1", expect=2)
    assert "the command sbatch is not installed on this machine" in message
    assert "SLURM_CONF='': is empty" in message
    assert "data.seed=-1" in message


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", "cluster.account"),
        ("allocation failure: Invalid qos specification", "cluster.qos"),
        ("allocation failure: Requested node configuration is not available", "cluster"),
        ("sbatch: error: Batch job submission failed: Node count specification invalid", "cluster.nodes"),
        ("sbatch: unrecognized option '--foo'", "cluster.sbatch"),
        ("allocation failure: Requested time limit is invalid (missing or exceeds some limit)", "cluster.time"),
        ("allocation failure: Memory specification can not be satisfied", "cluster.memory"),
        ("sbatch: error: Invalid generic resource (gres) specification", "cluster.gpus_per_node"),
        ("sbatch: error: no such thing", "cluster"),
    ],
)
def test_the_key_of_a_rejection(said: str, key: str) -> None:
    assert submission.rejection(said, "#SBATCH --nodes=3\n").key == key


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("10:30", 630), ("01:00:00", 3600), ("7-12", 648_000), ("1-00:30:00", 88_200), ("UNLIMITED", math.inf)],
)
def test_times_of_slurm(time: str, seconds: float) -> None:
    assert ranks.slurm_seconds(time) == seconds


JOB = "#!/bin/bash\n#SBATCH --partition=batch\n#SBATCH --time=1:00:00\n"


def test_a_job_may_wait_for_nodes_that_are_drained(slurm: Path) -> None:
    """Slurm's test of a job, but not its submission, refuses one for which too few nodes are up."""
    refused = "echo Requested node configuration is not available >&2; exit 1"
    (slurm / "sbatch").write_text(re.sub("--test-only .*", f"--test-only ] || {{ {refused}; }}", (slurm / "sbatch").read_text(), count=1))
    assert "Requested node configuration is not available" in submission.rejected([JOB])[0].rule
    (slurm / "sinfo").write_text("#!/bin/bash\n[[ $* != *--states=drain* ]] || echo 3\n")
    assert submission.rejected([JOB]) == {}


def test_a_job_that_would_never_start_is_refused(slurm: Path) -> None:
    (slurm / "sinfo").write_text("#!/bin/bash\necho 'batch*|5:00'\necho 'long|1-00:00:00'\n")
    found = submission.rejected([JOB, JOB.replace("batch", "long")])
    assert found.keys() == {0}
    said = "cluster.time=1:00:00: exceeds the time limit of the partition batch, 5:00: the job would wait for ever"
    assert str(found[0]).startswith(said)


def test_an_interrupted_submission_cancels_its_jobs(slurm: Path) -> None:
    def interrupt(_: object) -> str:
        raise KeyboardInterrupt

    texts: list[Callable[..., str]] = [lambda _: "#!/bin/bash\n", interrupt]
    with pytest.raises(KeyboardInterrupt):
        submission.submit_all(texts)
    assert (slurm / "canceled").read_text() == "7\n"


@pytest.mark.parametrize(
    ("items", "read"),
    [
        ("a=1,b.c=x", ["a=1", "b.c=x"]),
        ("data.input=[/a,/b],'x=1'", ["data.input=[/a,/b]", "x=1"]),
        ('"a=1",b="two, words"', ["a=1", 'b="two, words"']),
        ("a={x:1,y:2}", ["a={x:1,y:2}"]),
    ],
)
def test_overrides_in_a_list_need_no_quotes(items: str, read: list[str]) -> None:
    words = command_line.parse(["stage=submit", "submit.stages=[shard]", f"submit.overrides.shard=[{items}]"]).overrides
    assert configured(*words).submit.overrides == {"shard": read}


def test_a_snapshot_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    folder = snapshot.path(tmp_path)
    assert folder == tmp_path / "snapshots" / "12"
    snapshot.write(folder, ["stage=shard"], {"shard": "a: 1\n"}, {})
    assert snapshot.path(tmp_path).name == "12-2", "a requeued job has the same id"
    with pytest.raises(FileNotFoundError):
        snapshot.write(snapshot.path(tmp_path), [], {}, {}, {"config.yaml": tmp_path / "none"})
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == ["12"]


def test_job_arrays_with_empty_variables() -> None:
    with pytest.raises(UserError, match="SLURM_ARRAY_TASK_COUNT=: must be an integer"):
        ranks.array_task({"SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_COUNT": "", "SLURM_ARRAY_TASK_MIN": "1"})


@pytest.mark.long
def test_a_sweep_is_throttled_extended_and_submitted_up_to_the_limit(checkout: Path, slurm: Path) -> None:
    os.chdir(checkout)
    words = ["-m", "stage=shard", "data.input=[x.jsonl]", "hydra/launcher=slurm", "run_dir=runs/a sweep"]
    (checkout / "x.jsonl").write_text("{}\n")
    seeds = ("data.seed=1,2,3", "hydra.launcher.at_once=2")
    said = pipeline(*words, *seeds)
    assert [line.partition(":")[0] for line in said.splitlines() if "data.seed" in line] == ["job 7", "job 8", "job 9"]
    texts = submitted(slurm)
    assert ["--dependency=afterany:7" in text for text in texts.values()] == [False, False, True]
    assert "--job-name=a_sweep-2\n" in texts[9]

    queue(slurm, 7, 8, 9)
    (slurm / "full").touch()  # job 10 is the last one that Slurm accepts
    (slurm / "sbatch").write_text((slurm / "sbatch").read_text().replace("$number = 7 ]", "$number = 10 ]"))
    said = pipeline(*words, "data.shard_megabytes=1,2", "data.seed=1,2")
    lines = {line.rpartition("  ")[2]: line.partition(":")[0] for line in said.splitlines() if "runs/a sweep/" in line}
    assert list(lines.values()) == ["job 10", "not submitted", "not submitted", "not submitted"]
    assert "Slurm accepts no more jobs of this user" in said
    points = json.loads((checkout / "runs/a sweep/sweep.json").read_text())["points"]
    assert [(point["number"], point["job"]) for point in points] == [*((n, 7 + n) for n in range(4)), (4, None), (5, None), (6, None)]
