"""Rank detection from the variables of each launcher, and the compressed lists of Slurm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks, detect, expand_hosts, expand_tasks

SRUN = {
    "SLURM_JOB_ID": "1207",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "2345",
}
MPIRUN = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize(
    "nodelist, hosts",
    [
        ("n1", ["n1"]),
        ("localhost", ["localhost"]),
        ("n[1-2,07],x", ["n1", "n2", "n07", "x"]),
        ("jwb[0009-0011]", ["jwb0009", "jwb0010", "jwb0011"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[0-1]c[3-4]x", ["r0c3x", "r0c4x", "r1c3x", "r1c4x"]),
        ("gpu-a[1,3]-ib,login.site", ["gpu-a1-ib", "gpu-a3-ib", "login.site"]),
    ],
)
def test_hosts(nodelist: str, hosts: list[str]) -> None:
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "n[1-2", "n[2-1]", "n[]", "n[1-]", "a,,b", "n[a-b]", "n[1--2]", "a b", ",a"])
def test_malformed_hosts_are_refused(nodelist: str) -> None:
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST"):
        expand_hosts(nodelist)


terms = st.tuples(
    st.from_regex(r"[a-z][a-z.-]{0,5}", fullmatch=True),
    st.integers(0, 3),  # zero-padded width
    st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 12)), min_size=1, max_size=4),  # (first, length - 1)
    st.from_regex(r"[a-z.-]{0,3}", fullmatch=True),
)


@given(st.lists(terms, min_size=1, max_size=4))
def test_expansion_undoes_compression(parts: list[tuple[str, int, list[tuple[int, int]], str]]) -> None:
    compressed, hosts = [], []
    for prefix, width, spans, suffix in parts:
        texts = [f"{first:0{width}d}" + (f"-{first + more:0{width}d}" if more else "") for first, more in spans]
        compressed.append(f"{prefix}[{','.join(texts)}]{suffix}")
        hosts += [f"{prefix}{number:0{width}d}{suffix}" for first, more in spans for number in range(first, first + more + 1)]
    assert expand_hosts(",".join(compressed)) == hosts


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5)), min_size=1, max_size=6))
def test_tasks(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert expand_tasks(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("counts", ["", "2(x)", "two", "2,", "-1", "2(x3"])
def test_malformed_tasks_are_refused(counts: str) -> None:
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_tasks(counts)


def test_without_a_launcher_there_is_one_rank() -> None:
    assert detect({"PATH": "/bin"}) == Ranks(0, 1, 0, 1, "127.0.0.1", 29500, "none")


def test_the_batch_script_itself_is_not_a_rank() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert detect(batch).world_size == 1


def test_srun() -> None:
    ranks = detect(SRUN)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_size) == (5, 8, 1, 2)
    assert (ranks.master_host, ranks.launcher) == ("n1", "srun")
    assert detect(SRUN, host_suffix="i").rendezvous() == f"tcp://n1i:{ranks.master_port}"


def test_a_shell_of_several_tasks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are those of the first of the tasks; a step that is started in it has them, too, but no terminal."""
    assert detect({**SRUN, "SLURM_PTY_PORT": "1"}).launcher == "srun"
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(UserError, match="shell of srun --pty, one of"):
        detect({**SRUN, "SLURM_PTY_PORT": "1"})


def test_srun_with_uneven_nodes() -> None:
    uneven = {**SRUN, "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_LOCALID": "0"}
    assert detect({**uneven, "SLURM_PROCID": "6", "SLURM_NODEID": "2"}).local_size == 2
    assert detect({**uneven, "SLURM_PROCID": "3", "SLURM_NODEID": "1"}).local_size == 3


def test_jobs_and_steps_use_different_ports() -> None:
    ports = {detect({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port for job in range(300) for step in range(16)}
    assert len(ports) == 300 * 16
    assert min(ports) >= 20000
    assert max(ports) < 32768  # first ephemeral port of Linux


def test_torchrun_takes_precedence_over_srun() -> None:
    expected = Ranks(3, 4, 1, 2, "h0", 2345, "torchrun")
    assert detect(TORCHRUN) == expected
    assert detect({**SRUN, **TORCHRUN}) == expected


def test_srun_takes_precedence_over_variables_left_in_the_shell() -> None:
    shell = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "other", "MASTER_PORT": "1"}
    assert detect({**SRUN, **shell}) == detect(SRUN)
    with pytest.raises(UserError, match=r"(?s)WORLD_SIZE=1: contradicts srun, which started rank 5 of 8.*unset MASTER_ADDR"):
        detect({**SRUN, **shell, "WORLD_SIZE": "1"})


@pytest.mark.parametrize("outer", [{}, SRUN])
def test_mpirun_takes_precedence_over_srun(outer: dict[str, str]) -> None:
    assert detect({**outer, **MPIRUN}) == Ranks(1, 4, 1, 4, "127.0.0.1", 29500, "mpirun")


def test_pmi_variables_of_srun_are_not_read_as_mpirun() -> None:
    assert detect({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}) == detect(SRUN)


def test_mpirun_on_several_hosts_requires_master_addr() -> None:
    ranks = detect(OPENMPI)
    assert (ranks.rank, ranks.world_size, ranks.local_size, ranks.launcher) == (2, 3, 1, "mpirun")
    with pytest.raises(UserError, match="MASTER_ADDR"):
        ranks.rendezvous()
    assert detect({**OPENMPI, "MASTER_ADDR": "h7"}).rendezvous() == "tcp://h7:29500"


@pytest.mark.parametrize(
    "environment, named",
    [
        ({**SRUN, "SLURM_PROCID": "8"}, ["rank 8 of 8"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, ["SLURM_STEP_TASKS_PER_NODE=2(x3)", "8 tasks", "4 nodes"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["2 of 2"]),
        ({**TORCHRUN, "RANK": "x", "WORLD_SIZE": ""}, ["RANK=x", "WORLD_SIZE="]),
        ({"TORCHELASTIC_RUN_ID": "none"}, ["MASTER_PORT", "RANK", "WORLD_SIZE"]),
    ],
)
def test_inconsistent_variables_are_reported(environment: dict[str, str], named: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        detect(environment)
    for text in named:
        assert text in str(refusal.value)
