"""The processes and artifacts that several test files use."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import warm
from tests.helpers import SHARDS, loaded, pipeline, with_manifest, write_corpus

if TYPE_CHECKING:
    from tests.world import World  # which loads torch

# How long an example takes depends on the machine. The examples of a test are the same in each run, so that a change is not refused by
# chance; tools/test --all chooses others.
hypothesis.settings.register_profile("tests", deadline=None, derandomize="TANNSCHEN_OTHER_EXAMPLES" not in os.environ)
hypothesis.settings.load_profile("tests")

pytest_plugins = ["tests.order"]

SERVER = pytest.StashKey[tuple[subprocess.Popen, tempfile.TemporaryDirectory]]()


def pytest_configure(config):
    """Start the server of warm processes: one for all workers of pytest-xdist."""
    gc.set_threshold(20_000, 20, 20)  # with the usual ones, a twentieth of the time goes to searches through all objects
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each gloo group of a test keeps some files until the process ends
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory()
        os.environ[warm.ADDRESS] = f"{folder.name}/socket"
        command = [sys.executable, warm.__file__, "--serve", os.environ[warm.ADDRESS]]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        config.stash[SERVER] = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL), folder
        while not Path(os.environ[warm.ADDRESS]).exists():
            assert config.stash[SERVER][0].poll() is None, "the server of warm processes ended"
            time.sleep(0.01)
        if config.getoption("tx", None):  # a worker of pytest-xdist is forked from the server as well: it need not import torch
            warm_python = f"popen//python={shlex.join([sys.executable, '-S', warm.__file__])}"
            config.option.tx = [spec.replace("popen", warm_python, 1) if spec == "popen" else spec for spec in config.option.tx]


def pytest_unconfigure(config):
    """Stop it."""
    if server := config.stash.get(SERVER, None):
        server[0].communicate()
        server[1].cleanup()


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """What no test may leave to the next one: the state of PyTorch's random numbers, and a composition of Hydra."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed looks for devices, a millisecond for each test
    yield
    if hydra := sys.modules.get("hydra.core.global_hydra"):
        hydra.GlobalHydra.instance().clear()


@pytest.fixture(autouse=True)
def root_logging() -> Iterator[None]:
    """A test that runs the command line in this process leaves no handler behind, whose stream pytest closes after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def once(tmp_path_factory, worker_id) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, make)`: a folder that `make(folder)` writes, once for all workers of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / f"{name}.done").exists():
                make(root / name)
                (root / f"{name}.done").touch()
        return root / name

    return folder


@pytest.fixture
def call_main(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Run a command line in this process; returns the exit code and what it printed."""

    def call(*words: object) -> tuple[int, str]:
        from hydra.core.global_hydra import GlobalHydra

        from pipeline import __main__

        monkeypatch.setattr(sys, "argv", ["pipeline", *map(str, words)])
        code = 0
        try:
            __main__.main()
        except SystemExit as end:
            code = int(end.code or 0)
        GlobalHydra.instance().clear()
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


@pytest.fixture
def call_tool(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Call a script of tools/ by its name, with arguments, in this process; returns the exit code and what it printed."""

    def call(name: str, *arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            code = loaded(name).main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


@pytest.fixture
def called(call_tool) -> Callable[..., str]:
    """As call_tool; returns what a script printed, after a check of its exit code."""

    def call(name: str, *arguments: object, expect: int = 0) -> str:
        code, printed = call_tool(name, *arguments)
        assert code == expect, printed
        return printed

    return call


@pytest.fixture(scope="session")
def corpus(once) -> Path:
    """A folder of JSON lines: 200 documents."""
    return once("corpus", write_corpus)


@pytest.fixture(scope="session")
def shards(once, corpus) -> Path:
    """Text shards of the corpus: several of training text, one of validation text."""
    return once("shards", lambda folder: pipeline("stage=shard", f"data.input=[{corpus}]", f"data.shards={folder}", *SHARDS))


@pytest.fixture(scope="session")
def tokenizer(once, shards) -> Path:
    """A tokenizer of 300 entries, learned from the shards."""
    settings = ("stage=train_tokenizer", f"data.shards={shards}", "tokenizer.vocab_size=300", "tokenizer.report=false")
    return once("tokenizer", lambda folder: pipeline(*settings, f"tokenizer.path={folder}"))


@pytest.fixture(scope="session")
def tokens(once, shards, tokenizer) -> Path:
    """Token shards of the text shards."""
    settings = ("stage=tokenize", f"data.shards={shards}", f"tokenizer.path={tokenizer}")
    return once("tokens", lambda folder: pipeline(*settings, f"data.tokens={folder}"))


@pytest.fixture(scope="session")
def two(tokens, tmp_path_factory) -> Path:
    """The token shards as two corpora, web and books."""

    def divide(manifest: dict[str, Any]) -> None:
        for shard, entry in manifest["files"].items():
            entry["corpus"] = "books" if shard == "train-00001.tar" else "web"

    return with_manifest(tokens, tmp_path_factory.mktemp("two") / "tokens", divide)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory) -> Iterator[Callable[[int], World]]:
    """`worlds(size)`: gloo ranks, started once for all tests that use that many."""
    from tests.world import World

    started: dict[int, World] = {}

    def world(size: int) -> World:
        if size not in started:
            started[size] = World(size, tmp_path_factory.mktemp("world"))
        return started[size]

    yield world
    for ranks in started.values():
        ranks.stop()


@pytest.fixture(scope="session")
def world(worlds) -> World:
    """Four gloo ranks."""
    return worlds(4)
