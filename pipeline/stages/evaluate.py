"""evaluate: loss, perplexity and bits per byte of a checkpoint on the validation split and on its corpora, in any layout."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

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
    """Write run_dir/evaluation.json: step, loss (nats per target), perplexity, bits per byte (null if not every token is a target).

    With several corpora, "corpora" has the same for each of them.

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
    corpora = registry.objective_of(config).open_validation_corpora(config, (ranks.rank, ranks.world_size))
    corpora = corpora if len(corpora) > 1 else {}
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
        results = {
            name: _scores(*loop.validate(config, trainer, part, state.step, None, stage.batches))
            for name, part in {"": data, **corpora}.items()
            if part is not None
        }
        verification.finish([data, *corpora.values()])
        if ranks.rank == 0:
            whole = results.pop("")
            result: dict[str, Any] = {"checkpoint": str(checkpoint.path), "step": state.step, **whole}
            result |= {"corpora": {name: results.get(name) for name in corpora}} if corpora else {}
            with atomic_file(Path(config.run_dir) / "evaluation.json", "w") as handle:
                json.dump(result, handle, indent=1)
            log.info("step %d: %s", state.step, _text(whole))
            for name in corpora:
                text = _text(results[name]) if name in results else "no sequence of training.sequence_length"
                log.info("step %d, %s: %s", state.step, name, text)
    finally:
        meshes.destroy_process_group()


def _scores(loss: float, bits: float | None) -> dict[str, float | None]:
    """The scores of a validation split; the perplexity of a large loss is infinite, which JSON has no number for."""
    return {"validation_loss": loss, "perplexity": math.exp(loss) if loss < 700 else None, "bits_per_byte": bits}


def _text(scores: dict[str, float | None]) -> str:
    """Format scores for the log."""
    bits, perplexity = scores["bits_per_byte"], scores["perplexity"]
    parts = [f"validation loss {scores['validation_loss']:.4f} nats per target"]
    parts += [] if bits is None else [f"{bits:.4f} bits per byte"]
    return ", ".join([*parts, *([] if perplexity is None else [f"perplexity {perplexity:.4g}"])])
