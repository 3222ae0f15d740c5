"""stage=convert of checkpoints of Megatron-LM: written by megatron-core on two ranks, and split by hand from stock models."""

import pytest
import torch

from tests.checkpoint import foreign_folders
from tests.checkpoint.test_deepspeed_import import imported, logits


@pytest.fixture(scope="module")
def written(worlds, tmp_path_factory):
    """A folder with both formats, and the logits that megatron-core computes."""
    folder = tmp_path_factory.mktemp("megatron")
    return folder, worlds(2).run(foreign_folders.write_megatron, folder, 2)[0]


@pytest.mark.world
@pytest.mark.parametrize("kind", ["classic", "torch_dist"])
def test_the_imported_model_has_the_logits_of_megatron_core(written, kind, tmp_path):
    folder, expected = written
    checkpoint = imported(folder / kind, tmp_path, "model=gpt-tiny")
    torch.testing.assert_close(logits(checkpoint), expected, rtol=1e-6, atol=1e-6)
