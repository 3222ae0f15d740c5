"""The implementations that tools/bench_finetune compares. Run as a script with Options in JSON, measures one of them and prints JSON."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch

from pipeline.checkpoint import peft_format
from pipeline.checkpoint.lora_adapter import Adapter, Factors
from pipeline.config.schema import RunConfig
from pipeline.layers.lora import linear_layers
from pipeline.parallel.parallelize import DTYPES, adapter_std, init_piece
from pipeline.parallel.pieces import Piece
from tools.bench import train_implementations as train
from tools.jobs import initial_model


@dataclass(frozen=True)
class Options(train.Options):
    """The settings of one measured process.

    Attributes:
        rank: rank of the adapters.
    """

    rank: int


def overrides(options: Options) -> dict[str, Any]:
    """Return the settings of an implementation in addition to those of bench_train."""
    if options.implementation == "full":
        return {}
    return {"lora.rank": options.rank, "lora.quantize": "nf4" if options.implementation == "qlora" else "none"}


def peft_model(config: RunConfig, folder: Path) -> torch.nn.Module:
    """Return the stock class with the weights of ours, and PEFT's adapters on the same layers with the initial values of ours.

    The base is in the dtype of the run, the adapters are in fp32, as PEFT's defaults have it.
    """
    folder.mkdir()
    layers = {}
    for name, layer in linear_layers(initial_model(config)):
        rank, alpha = config.lora.rank_of(name), config.lora.alpha_of(name)
        shapes = {"a": (rank, layer.in_features), "b": (layer.out_features, rank)}
        pieces = (Piece(f"{name}.lora.{part}", shape) for part, shape in shapes.items())
        if rank:
            a, b = (init_piece(piece, adapter_std(piece), config.training.seed) for piece in pieces)
            layers[name] = Factors(a, b, alpha)
    peft_format.write_peft(folder, Adapter(layers, "", folder), config.model, dropout=config.lora.dropout, base_name="")
    return peft.PeftModel.from_pretrained(train.stock_model(config, DTYPES[config.precision.dtype]), folder, is_trainable=True)


def run(options: Options) -> dict[str, Any]:
    """Return tokens_per_second, memory in bytes and mean loss; for "machine" what train.measure_machine returns.

    Raises:
        UserError: as train.compose_config.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = train.compose_config(options, folder, overrides(options))
        if options.implementation == "machine":
            return train.measure_machine(config, options.now)
        train.write_tokens(config)
        timer = train.Timer(options)  # before the model is built: memory is measured from here
        model = peft_model(config, Path(folder) / "adapter") if options.implementation == "peft" else None
        loss = train.train_ours(config, timer) if model is None else train.train_with_trainer(config, timer, model)
        return {**timer.result, "loss": loss}


if __name__ == "__main__":
    sys.exit(train.main(Options, run))
