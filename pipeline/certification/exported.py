"""Part "state", the export: stock transformers computes the logits and the gradients of the small run's checkpoint."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from pipeline.certification import stock_gradients
from pipeline.certification.parts import PartReport
from pipeline.checkpoint import native
from pipeline.checkpoint.lora_merge import open_merged
from pipeline.common.errors import CheckFailed, UserError
from pipeline.config.schema import RunConfig
from pipeline.conversion import huggingface_export, stock_logits
from pipeline.models import registry


def report(config: RunConfig) -> PartReport:
    """Export the newest checkpoint of run_dir to Hugging Face's format, and compare logits and gradients of stock transformers and ours.

    Args:
        config: of the small run.
    """
    found = PartReport("state")
    compared = config.model.objective in stock_logits.OBJECTIVES
    if not compared or find_spec("transformers") is None:
        reason = "transformers is not installed" if compared else "the model is a classifier"
        found.not_covered.append(f"logits of an export: {reason}")
        return found
    weights = open_merged(native.complete(Path(config.run_dir))[-1], None)
    folder = Path(config.run_dir, "hf")
    folder.mkdir()
    try:
        architecture = registry.mapping_of(config.model).architecture
        huggingface_export.check_weights(weights, config.model, "stage.checkpoint", weights.path)
    except UserError as error:
        found.not_covered.append(f"logits of an export: {error.violations[0].rule}")
        return found
    if stock_logits.stock_class_of(config.model) is None:
        found.not_covered.append(f"logits of an export: this version of transformers has no {architecture}")
        return found
    try:
        huggingface_export.write_weights(folder, weights, config.model, dtype=torch.float32, shard_bytes=1 << 30)
        huggingface_export.write_configs(folder, config.model, dtype=torch.float32, end_of_document_id=0)
        stock_logits.compare(folder, weights, config.model, torch.float32)
        different = stock_gradients.differences(folder, weights, config.model)
    except CheckFailed as failed:
        found.failures.append(f"export: {failed}")
        return found
    except RuntimeError as error:  # kernels of transformers do not support all small sizes
        found.not_covered.append(f"logits of an export: transformers computes none at these sizes ({str(error).splitlines()[0]})")
        return found
    found.failures += [f"export: the gradient of {name} differs by {value:.1e} from that of {architecture}" for name, value in different]
    found.covered.append(f"exported; logits and gradients of {architecture} of stock transformers compared with those of the plain model")
    return found
