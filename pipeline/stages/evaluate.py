"""evaluate: loss and bits per byte of a checkpoint on the validation split, in any layout."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pipeline.checkpoint import native, save
from pipeline.checkpoint.adapter import open_merged
from pipeline.config.layout import Layout
from pipeline.config.lora import LoraConfig
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.data.load.objectives import registry
from pipeline.errors import UserError
from pipeline.files import atomic_file
from pipeline.launch.ranks import Ranks
from pipeline.parallel import mesh as meshes
from pipeline.stages.pretrain import check_vocabulary
from pipeline.training import loop, verification
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write run_dir/evaluation.json: step, loss (nats per target), bits per byte (null if not every token is a target).

    The validation split may be another one than that of training, with another sequence length.

    Raises:
        UserError: the checkpoint or the validation split is missing, or they do not match.
    """
    stage = config.stage
    assert isinstance(stage, Evaluate)
    data = registry.open_validation(config, (ranks.rank, ranks.world_size))
    if data is None:
        rule = "has a validation split shorter than training.sequence_length"
        raise UserError.of("data.tokens", config.data.tokens, rule, "run stage=shard with a larger data.validation_fraction")
    check_vocabulary(config, data)
    minutes = config.training.timeout_minutes
    device = meshes.init_distributed(ranks.rank, ranks.world_size, ranks.local_rank, ranks.rendezvous(), minutes)
    try:
        # Rank 0 chooses the newest checkpoint for all: other ranks may see an older listing of the folder.
        path = meshes.on_rank_0(lambda: native.find(Path(config.run_dir), stage.checkpoint))
        checkpoint = open_merged(path, stage.adapter)
        config.lora = LoraConfig()
        save.check_same_model(checkpoint, config)
        trainer = Trainer(config, meshes.build_mesh(Layout.of(config, ranks.world_size), device, minutes))
        state = loop.load(trainer, checkpoint)
        loss, bits = loop.validate(config, trainer, data, state.step, None, stage.batches)
        verification.finish([data])
        if ranks.rank == 0:
            result = {"checkpoint": str(checkpoint.path), "step": state.step, "validation_loss": loss, "bits_per_byte": bits}
            with atomic_file(Path(config.run_dir) / "evaluation.json", "w") as handle:
                json.dump(result, handle, indent=1)
            per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
            log.info("step %d: validation loss %.4f nats per target%s", state.step, loss, per_byte)
    finally:
        meshes.destroy_process_group()
