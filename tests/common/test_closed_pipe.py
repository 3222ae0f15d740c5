"""Programs whose output nobody reads any more."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

TOOLS = ["checkpoint", "memory", "plot", "status", "sweep", "wandb_sync", "watch"]


def test_a_program_ends_quietly_when_its_reader_has_gone():
    reader, writer = os.pipe()
    os.close(reader)
    program = "import sys; from pipeline.common.process_exit import quiet; sys.exit(quiet(lambda: print('x' * 100_000) or 0))"
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("tool", TOOLS)
def test_the_tools_that_print_tables_do(tool):
    assert "quiet(" in (ROOT / "tools" / tool).read_text(encoding="utf-8")
