"""training.deterministic: its settings, what it refuses, and that two runs are equal in every bit."""

from __future__ import annotations

import json

import pytest

from pipeline.common.errors import UserError
from tests.helpers import python

#: Prints the settings of a process with training.deterministic, and the digests of two equal runs of tiny models in it.
PROGRAM = """
import hashlib, json, os, torch
from pipeline.parallel import mesh
from pipeline.training import determinism
from tests.training.layouts import MODELS
from tests.world import tiny, trainer, unsharded

determinism.enable()
mesh.init_distributed(0, 1, 0, "")

def digest(name):
    config, mine = trainer(*tiny(*MODELS[name].overrides, "training.deterministic=true"))
    for step in range(2):
        loss, _ = mine.train(*MODELS[name].batch(config, step), step=step)
    values = [loss, *(value for _, value in sorted(unsharded(mine).items()))]
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()

flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
flags += torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.mkldnn.deterministic
names = "llama", "t5", "deepseek"
variables = {name: os.environ.get(name) for name in determinism.VARIABLES}
print("FOUND", json.dumps([flags, variables, [[digest(name) for _ in range(2)] for name in names]]))
"""


def test_two_runs_are_equal_in_every_bit():
    """With a mask of documents, biases of positions, and experts; no operation on the CPU is refused."""
    code, printed = python("-c", PROGRAM, env={"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert code == 0, printed
    flags, variables, digests = json.loads(printed.partition("FOUND ")[2])
    assert flags == [True, False, True, False, True]
    assert variables == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
    assert all(first == second for first, second in digests)
    assert len({first for first, _ in digests}) == 3


def test_variables_with_which_runs_differ_are_refused_by_name():
    from pipeline.training import determinism

    given = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2", "NCCL_NVLS_ENABLE": "2"}
    before = given.copy()
    with pytest.raises(UserError) as caught:
        determinism.enable(given)
    assert [violation.key for violation in caught.value.violations] == list(given)
    assert "NCCL_NVLS_ENABLE=2: is not supported with training.deterministic=true" in str(caught.value)
    assert given == before
