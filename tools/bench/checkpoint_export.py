"""The exports of tools/bench_checkpoint, and the folders that they start from.

usage: checkpoint_export.py prepare CHECKPOINT FOLDER: writes the weights and moments as DeepSpeed's ZeRO 2 on two ranks, and a tokenizer
       checkpoint_export.py deepspeed FOLDER OUTPUT: DeepSpeed's way to a Hugging Face folder
       checkpoint_export.py compare FOLDER FOLDER: the exit code is 1 unless both have the same tensors
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path

RANKS = 2


def prepare(checkpoint: Path, folder: Path) -> None:
    """Write what DeepSpeed's engine writes: a partition of the flat weights and moments for each rank, and the weights in bf16."""
    import torch
    from tokenizers import Tokenizer, models

    from pipeline.checkpoint.reader import Checkpoint
    from pipeline.conversion import huggingface_export
    from pipeline.models import config_classes, registry

    source = Checkpoint(checkpoint)
    config = config_classes.from_dict(source.config["model"])
    rows = registry.stock_tensors(config)[0]
    tag = folder / "deepspeed/global_step1"
    tag.mkdir(parents=True)
    (folder / "deepspeed/latest").write_text("global_step1")
    shapes = OrderedDict((row.hf_name, torch.Size(row.shape([source.shape(name) for name in row.names]))) for row in rows)
    elements = sum(shape.numel() for shape in shapes.values())
    size = -(-elements // (2 * RANKS)) * 2  # DeepSpeed aligns partitions to two elements for each rank
    kinds = {kind: torch.zeros(RANKS * size) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    for kind, flat in kinds.items():
        parts = (row.to_hf([source.tensor(name, kind) for name in row.names]).flatten() for row in rows)
        first = 0
        for part in parts:
            flat[first : first + part.numel()] = part
            first += part.numel()
    for rank in range(RANKS):
        weight, *moments = (flat[rank * size : (rank + 1) * size].clone() for flat in kinds.values())
        optimizer = {"zero_stage": 2, "partition_count": RANKS, "single_partition_of_fp32_groups": [weight]}
        optimizer["base_optimizer_state"] = {"state": {0: dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))}}
        torch.save({"optimizer_state_dict": optimizer}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    splits = kinds["weight"][:elements].split([shape.numel() for shape in shapes.values()])
    module = OrderedDict((name, part.view(shapes[name]).bfloat16()) for name, part in zip(shapes, splits, strict=True))
    states = {"module": module, "buffer_names": [], "param_shapes": [shapes], "shared_params": {}, "ds_version": "0.19"}
    torch.save(states, tag / "mp_rank_00_model_states.pt")
    huggingface_export.write_configs(folder / "deepspeed", config, dtype=torch.float32, end_of_document_id=0)
    (folder / "tokenizer").mkdir()
    tokenizer = Tokenizer(models.BPE({"<|endoftext|>": 0, "a": 1}, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))


def deepspeed(source: Path, output: Path) -> None:
    """Load the ZeRO folder into the stock class, and save that."""
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model = load_state_dict_from_zero_checkpoint(model, str(source))
    model.save_pretrained(output)
    for path in output.iterdir():  # ours ends with fsync
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())


def compare(ours: Path, peer: Path) -> int:
    """Compare all tensors of two Hugging Face folders."""
    from contextlib import ExitStack

    import torch
    from safetensors import safe_open

    with ExitStack() as stack:
        found = []
        for folder in (ours, peer):
            opened = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
            found.append({name: file for file in opened for name in file.keys()})  # noqa: SIM118 - it is no dict
        same = all(torch.equal(found[0][name].get_tensor(name), found[1][name].get_tensor(name)) for name in found[0].keys() & found[1])
        return int(not same or found[0].keys() != found[1].keys())


if __name__ == "__main__":
    sys.exit({"prepare": prepare, "deepspeed": deepspeed, "compare": compare}[sys.argv[1]](*map(Path, sys.argv[2:])))
