"""A training step has no host-device synchronization, under any ZeRO stage."""

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from pipeline.config import compose
from pipeline.config.layout import Layout
from pipeline.config.paths import CONF_DIR
from pipeline.parallel import mesh as meshes
from pipeline.training.trainer import Trainer
from tests.helpers import one_in
from tests.world import Observed, causal

#: Operations behind `.item()`, `if tensor`, indexing with a tensor or a boolean mask and the like.
SYNCHRONIZING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default}


@pytest.mark.parametrize("zero", one_in(2, [0, 1, 3]))
@pytest.mark.parametrize("model, dtype", [("llama-tiny", "bf16"), ("gpt-tiny", "fp32")])
def test_the_step_does_not_synchronize(model, dtype, zero):
    compose.register()
    overrides = [
        f"model={model}",
        f"precision={dtype}",
        f"parallel.zero_stage={zero}",
        "training.global_batch_size=2",
        "training.ema=0.9",
        "training.micro_batch_size=1",
    ]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        composed = hydra_compose("config", [*overrides, "training.sequence_length=16", "training.document_mask=true"])
    config = compose.to_run_config(composed)
    try:
        trainer = Trainer(config, meshes.build_mesh(Layout.of(config, 1), meshes.init_distributed(0, 1, 0, "")))
        tokens = torch.arange(34).view(2, 17)
        found = []
        with Observed(lambda operator, *_: found.append(operator)):
            for _ in range(2):
                trainer.train(*causal(tokens, torch.zeros(2, 16, dtype=torch.int32)))
            assert not SYNCHRONIZING.intersection(found)
            torch.arange(3)[torch.tensor(1)]
            assert SYNCHRONIZING.intersection(found), "a synchronization is detected"
    finally:
        meshes.destroy_process_group()
