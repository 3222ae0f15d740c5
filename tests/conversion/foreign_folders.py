"""Checkpoints of other tools, written by those tools on ranks of a world, or split by hand from a stock model."""

import argparse
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
#: The same model on our command line.
OVERRIDES = (
    *("model=llama-tiny", "model.vocab_size=64", "model.hidden=32", "model.ffn_hidden=48", "model.layers=4", "model.heads=4"),
    *("model.kv_heads=2", "model.max_positions=32", "model.init_std=0.2", "model.norm_eps=1e-5"),
)
#: And in Megatron-LM: the sizes that megatron-core has, and further arguments.
SIZES = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2}
ARGUMENTS = SIZES | {
    "group_query_attention": True,
    "kv_channels": 8,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.2,
    "params_dtype": torch.float32,
}
GPT = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 32, "initializer_range": 0.2}


def llama(**more: Any) -> LlamaForCausalLM:
    """Return transformers' Llama with random weights; norms are not all ones."""
    return _shuffled(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **more})))


def gpt() -> GPT2LMHeadModel:
    """Return transformers' GPT-2 with random weights and biases."""
    return _shuffled(GPT2LMHeadModel(GPT2Config(**GPT)))


def _shuffled(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def samples(vocabulary: int = 64) -> Tensor:
    """Return tokens, (2, 24)."""
    return torch.randint(0, vocabulary, (2, 24), generator=torch.Generator().manual_seed(2))


def of_rank(value: Tensor, rank: int, dim: int = 0) -> Tensor:
    """Return the share of one of two tensor-parallel ranks."""
    return value.chunk(2, dim)[rank]


def by_group(*parts: Tensor, groups: int) -> Tensor:
    """Return the rows of a rank: for each group of heads its queries, keys and values."""
    return torch.cat([part.chunk(groups)[group] for group in range(groups) for part in parts])


def gpt_block(state: dict[str, Tensor], block: int, rank: int) -> dict[str, Tensor]:
    """Return the tensors of a block of GPT-2 on a rank, as GPT-NeoX and early Megatron-LM have them; linear layers are transposed."""
    theirs = {name.split(f"h.{block}.")[1]: value.t() for name, value in state.items() if f"h.{block}." in name}
    found = {}
    for leaf in ("weight", "bias"):
        found[f"input_layernorm.{leaf}"] = theirs[f"ln_1.{leaf}"]
        found[f"post_attention_layernorm.{leaf}"] = theirs[f"ln_2.{leaf}"]
        qkv = [of_rank(part, rank) for part in theirs[f"attn.c_attn.{leaf}"].chunk(3)]
        found[f"attention.query_key_value.{leaf}"] = by_group(*qkv, groups=2)
        found[f"mlp.dense_h_to_4h.{leaf}"] = of_rank(theirs[f"mlp.c_fc.{leaf}"], rank)
    for name, of_class in (("attention.dense", "attn.c_proj"), ("mlp.dense_4h_to_h", "mlp.c_proj")):
        found |= {f"{name}.weight": of_rank(theirs[f"{of_class}.weight"], rank, 1), f"{name}.bias": theirs[f"{of_class}.bias"]}
    return found


class Code:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


#: Changes a folder so that it is refused.
Damage = Callable[[Path], object]


def removed(pattern: str) -> Damage:
    """Return a damage: files or folders are missing."""
    return lambda folder: [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in list(folder.glob(pattern))]


def shortened(name: str, count: int) -> Damage:
    """Return a damage: a file lacks its last bytes."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-count])


def copied(name: str, copy: str) -> Damage:
    """Return a damage: a file or folder is there twice."""
    return lambda folder: (shutil.copytree if (folder / name).is_dir() else shutil.copyfile)(folder / name, folder / copy)


def edited(pattern: str, change: Callable[[Any], object]) -> Damage:
    """Return a damage: files of torch.save have another content."""

    def damage(folder: Path) -> None:
        for path in folder.glob(pattern):
            state = torch.load(path, weights_only=False)
            change(state)
            torch.save(state, path)

    return damage


def with_code(name: str, key: str) -> Damage:
    """Return a damage: a file of torch.save runs code, which leaves a file `executed`."""
    return lambda folder: edited(name, lambda state: state.update({key: Code(folder / "executed")}))(folder)


@contextlib.contextmanager
def rank_variables() -> Iterator[None]:
    """The variables that DeepSpeed and Megatron-Core expect of a launcher."""
    names = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "DS_ACCELERATOR": "cpu"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


#: Folder -> ZeRO stage, dtype, changes of the model, whether the head is frozen.
ZERO: dict[str, tuple[int, str, dict[str, Any], bool]] = {
    "zero1-bf16-frozen": (1, "bf16", {}, True),
    "zero2-tied": (2, "fp32", {"tie_word_embeddings": True}, False),
    "zero3-frozen": (3, "fp32", {}, True),
}


def write_zero(folder: Path) -> None:
    """Train Llama for a step in DeepSpeed's engine and save it, with each of ZERO. Collective."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which is compiled when it is first used
    with rank_variables():
        for name, (stage, dtype, changes, frozen) in ZERO.items():
            torch.manual_seed(0)
            model = llama(**changes).train()
            model.lm_head.weight.requires_grad_(not frozen)
            settings = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "bf16": {"enabled": dtype == "bf16"},
            }
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=0.01)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
            tokens = samples()[dist.get_rank() : dist.get_rank() + 1]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            engine.save_checkpoint(str(folder / name))


@contextlib.contextmanager
def megatron(tensor: int) -> Iterator[None]:
    """Megatron-Core on CPUs: it moves the rotary table to a GPU, and counts random numbers of one. Collective."""
    import pytest
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with pytest.MonkeyPatch.context() as patch, rank_variables():
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def write_megatron(folder: Path, tensor: int) -> Tensor:
    """Save megatron-core's GPTModel as a file a rank and as torch_dist, with Megatron-LM's arguments; return its logits. Collective."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    with megatron(tensor):
        torch.manual_seed(3)
        config = TransformerConfig(
            **SIZES,
            normalization="RMSNorm",
            layernorm_epsilon=1e-5,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            init_method_std=0.2,
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            tensor_model_parallel_size=tensor,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=64,
            max_sequence_length=32,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            parallel_output=False,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))  # the same on every rank
        args = argparse.Namespace(**ARGUMENTS, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=1)
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
        rank = folder / "classic" / "iter_0000007" / f"mp_rank_{dist.get_rank():02d}"
        distributed = folder / "torch_dist" / "iter_0000007"
        rank.mkdir(parents=True)
        distributed.mkdir(parents=True, exist_ok=True)
        torch.save({**common, "model": model.state_dict_for_save_checkpoint()}, rank / "model_optim_rng.pt")
        dist_checkpointing.save({**common, **model.sharded_state_dict()}, str(distributed))
        for path in (folder / "classic", folder / "torch_dist"):
            (path / "latest_checkpointed_iteration.txt").write_text("7")
        tokens = samples()
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        with torch.no_grad():
            return model.eval()(tokens, torch.arange(length).expand_as(tokens), mask).float()
