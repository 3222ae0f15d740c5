"""What the watchdog asks of the store of a large job: it must not grow with the square of the number of ranks."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from pipeline.common import ends
from pipeline.parallel import mesh as meshes
from pipeline.training import watchdog
from pipeline.training.watchdog import Watchdog, readers

SIZE = 64


class LeftError(Exception):
    """The watchdog has ended the process."""


class Store:
    """A store that counts requests."""

    def __init__(self):
        self.store, self.requests = HashStore(), Counter()

    def __getattr__(self, name):
        self.requests[name] += 1
        return getattr(self.store, name)


@pytest.fixture
def store(monkeypatch):
    """The store of a job of which one rank is this process: all others publish, and rank 9 has the fewest reports."""
    store = Store()
    monkeypatch.setattr(meshes, "store_connection", lambda: store)
    monkeypatch.setattr(watchdog.os, "_exit", lambda _: (_ for _ in ()).throw(LeftError))
    monkeypatch.setattr(watchdog.time, "sleep", lambda _: None)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda *_, **__: None)
    monkeypatch.setattr(watchdog, "_print_stacks", lambda _: None)
    return store


def publish(store, ticks):
    for rank in range(SIZE):
        state = {"rank": rank, "host": f"n{rank // 4}", "node": f"n{rank // 4}", "pid": rank, "reports": 3 - (rank == 9), "ticks": ticks}
        store.store.set(f"watchdog/{rank}", json.dumps(state | {"phase": "step 7"}))


@pytest.fixture
def watching(store, monkeypatch):
    """Returns a function: rank -> its watchdog, after the timeout."""

    def of(rank):
        meshes.init_fake(rank, SIZE)
        try:
            watched = Watchdog(10)
        finally:
            meshes.destroy_process_group()
        watched._store, watched._waited = store, 10 * 60 * 6 + 1
        watched._state["reports"] = 3
        # While it waits between two looks, the others publish again.
        monkeypatch.setattr(watched._ended, "wait", lambda _: publish(store, 1))
        return watched

    publish(store, 0)
    return of


@given(st.integers(1, 20_000))
def test_a_few_ranks_compare_all(size):
    assert 1 <= len(readers(size)) <= 8
    assert readers(size)[0] == 0


def test_a_rank_that_compares_reads_all_states_by_one_request(store, watching, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(ends.VARIABLE, str(tmp_path))
    with pytest.raises(LeftError):
        watching(readers(SIZE)[1])._find_slowest()
    assert store.requests["multi_get"] == 2
    assert "get" not in store.requests
    assert "the run waits for rank 9 (host n2, process 9) in phase 'step 7': it is the slowest" in caplog.text
    (end,), _ = ends.read(tmp_path)
    assert (end.rank, end.host) == (9, "n2")


def test_the_others_wait_for_the_result(store, watching, caplog):
    other = watching(3)
    other._find_slowest()
    assert set(store.requests) == {"check"}
    with pytest.raises(LeftError):
        watching(0)._find_slowest()
    named = caplog.text.count("the run waits for")
    with pytest.raises(LeftError):
        other._find_slowest()
    with pytest.raises(LeftError):  # a second rank that compares
        watching(readers(SIZE)[2])._find_slowest()
    assert caplog.text.count("the run waits for") == named == 1


def test_without_a_result_a_rank_compares_in_the_end(watching, caplog):
    alone = watching(3)
    alone._waited += 101
    with pytest.raises(LeftError):
        alone._find_slowest()
    assert "the run waits for rank 9" in caplog.text


def test_a_phase_with_patience_may_take_longer_than_the_timeout(watching, monkeypatch):
    """Ten minutes, and a patience of 6 for a checkpoint."""
    watched, compared = watching(1), []
    watched._state["reports"] = 0
    for seconds in (700, 3700):
        watched._waited, ended = seconds, iter([False, True])
        monkeypatch.setattr(watched._ended, "wait", lambda _, ended=ended: next(ended))
        monkeypatch.setattr(watched, "_find_slowest", lambda seconds=seconds: compared.append(seconds))
        watched._watch()
    assert compared == [3700]


def test_a_run_that_the_watchdog_ends_has_written_its_collectives(watching, tmp_path, monkeypatch):
    """As PyTorch would when the collective times out, a minute later."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/run/flight_recorder/rank_")
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"record", raising=False)
    with pytest.raises(LeftError):
        watching(0)._find_slowest()
    assert (tmp_path / "run/flight_recorder/rank_0").read_bytes() == b"record"
