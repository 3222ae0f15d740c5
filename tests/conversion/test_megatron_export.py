"""stage.format=megatron: Megatron-Core loads the folder into its GPTModel, whose logits are ours; on the CPU, no Transformer Engine."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.common.errors import UserError
from pipeline.conversion import megatron_export, megatron_layout
from pipeline.conversion.export_files import ExportWriter
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.helpers import free_port
from tests.models.small_decoders import CONFIGS

LLAMA = replace(CONFIGS["llama-grouped"], max_positions=40)
MODELS = {
    "llama": LLAMA,
    "llama-tied": CONFIGS["llama-tied"],
    "qwen2.5": CONFIGS["qwen2.5"],
    "qwen3": CONFIGS["qwen3"],
    "llama3": replace(LLAMA, rope_scaling="llama3", rope_factor=4.0, rope_original_positions=8192),
    "mixtral": replace(CONFIGS["mixtral"], window=None),
}


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """A world of one rank, as Megatron-Core needs, on a CPU: it moves the rotary table to a GPU, and counts random numbers of one."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setitem(os.environ, name, value)
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def gpt_model(folder: Path) -> nn.Module:
    """Megatron-Core's model, built from the arguments in a checkpoint and loaded from it."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = dist_checkpointing.load_common_state_dict(str(folder))["args"]
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization")
    names += ("attention_dropout", "hidden_dropout", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "params_dtype")
    names += ("moe_router_topk", "moe_router_pre_softmax") if args.num_experts else ()
    config = TransformerConfig(
        **{name: getattr(args, name) for name in names},
        num_moe_experts=args.num_experts,
        moe_router_load_balancing_type="none",
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=nn.functional.silu,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    state, missing, unexpected = dist_checkpointing.load(model.sharded_state_dict(), str(folder), strict="return_all")
    assert {key for key in missing if "pre_mlp_layernorm" not in key} == set()  # that one is of Transformer Engine's layers
    assert unexpected == set()
    model.load_state_dict({key: value for key, value in state.items() if key not in ("args", "checkpoint_version", "iteration")})
    return model.eval()


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", MODELS)
def test_megatron_core_computes_our_logits(name, tmp_path):
    config = MODELS[name]
    ours = random_model(config).eval()
    megatron_layout.check(config)
    parameters = megatron_export.write(
        tmp_path, InMemory(ours), config, dtype=torch.float32, shard_bytes=60_000, tokenizer="tokenizer", writer=ExportWriter()
    )
    assert parameters == sum(parameter.numel() for parameter in ours.parameters())
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert len(list((tmp_path / "release").glob("*.distcp"))) > 3
    theirs = gpt_model(tmp_path / "release")
    tokens = torch.randint(config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(7))
    mask = torch.ones(24, 24).triu(1).bool()[None, None]
    with torch.no_grad():
        expected, found = ours(tokens), theirs(tokens, torch.arange(24)[None].expand(2, -1), mask)
    assert expected.std() > 0.1, "differences would not show"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4 if config.family == "mixtral" else 1e-5)


def test_what_megatron_core_does_not_compute_is_refused():
    for config, said in (
        (CONFIGS["gpt"], "stage.format=megatron: is supported for model.family=llama, mistral, mixtral; this is gpt"),
        (CONFIGS["llama-biased"], "requires model.attention_bias=False; this is True"),
        (CONFIGS["llama-yarn"], "requires model.rope_scaling=llama3; this is yarn"),
        (replace(CONFIGS["mixtral"], window=8), "requires model.window=None; this is 8"),
    ):
        with pytest.raises(UserError, match=said):
            megatron_layout.check(config)
