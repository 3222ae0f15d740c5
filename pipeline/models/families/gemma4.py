"""Gemma 4 (Google 2026, https://ai.google.dev/gemma/docs/core/model_card_4): heads of global layers are wider than those of local ones.

Gemma4ForCausalLM of transformers, and the language model of Gemma4ForConditionalGeneration, which is imported alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import Constant, Init, scaled_residual
from pipeline.models import rope
from pipeline.models.config_json_keys import GLOBAL, LOCAL, as_object, layer_types, number
from pipeline.models.decoder_mapping import INPUT_NORM, LAYER, MLP, NO_PADDING, decoder_mapping, decoder_table, sliding_window
from pipeline.models.families import gemma3
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import BlockTensors, KeyGroup, StockTensor, Table, positive, refusal, tensors
from pipeline.models.shared_sizes import RotaryDecoderConfig, WindowConfig, marked
from pipeline.models.wrapper import Wrapper


@dataclass(frozen=True)
class Gemma4Config(
    RotaryDecoderConfig, WindowConfig, family="gemma4", vocab_size=262144, norm_eps=1e-6, tie_embeddings=True, rope_theta=1e6
):
    """Local layers with a sliding window and, at an interval and at the end, global ones with heads of another width; GeGLU."""

    query_key_norm: ClassVar[bool] = True

    head_width: int | None = knob(256, "width of a head of the local layers; hidden/heads when null", at_least=2)
    global_head_width: int = knob(512, "width of a head of the global layers", at_least=2)
    global_kv_heads: int | None = knob(None, "key and value heads of the global layers; as in the local ones when null", at_least=1)
    attention_k_eq_v: bool = knob(False, "the values of the global layers are the output of the key projection")
    partial_rotary_factor: float = knob(0.25, "share of the dims of a head of the global layers that are rotated", above=0, at_most=1)
    rope_local_theta: float = knob(10000.0, "base of the rotary frequencies of the local layers, which are not scaled", above=1)
    kv_shared_layers: int = knob(0, "last layers that use the keys and values of the last layer of their kind before them", at_least=0)
    double_wide_mlp: bool = knob(False, "the feed-forward of these layers is twice as wide")
    layer_input_width: int = knob(256, "width of the embeddings that every layer has of the tokens; 0 for none", at_least=0)
    final_logit_softcapping: float | None = knob(None, "bound c of the logits z: c tanh(z / c); null for none", above=0)

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has no window; the last one has none."""
        return layer == self.layers - 1 or super().is_global(layer)

    def is_shared(self, layer: int) -> bool:
        """Whether a layer has no keys and values of its own."""
        return layer >= self.layers - self.kv_shared_layers

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return the number of key and value heads of a layer, and the width of its heads."""
        return (self.global_kv_heads or self.kv_heads, self.global_head_width) if self.is_global(layer) else (self.kv_heads, self.head_dim)

    @property
    def beside_hidden_states(self) -> str:
        """What blocks read beside the output of the block before them; empty for nothing. See config/rules/parallel.py."""
        inputs = [f"inputs of each layer (model.layer_input_width={self.layer_input_width})"] if self.layer_input_width else []
        keys = [f"keys of earlier layers (model.kv_shared_layers={self.kv_shared_layers})"] if self.kv_shared_layers else []
        return " and ".join([*inputs, *keys])

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = super().violations()
        kinds, own = ({self.is_global(layer) for layer in range(end)} for end in (self.layers, max(0, self.layers - self.kv_shared_layers)))
        if self.kv_shared_layers and own != kinds:
            rule = "leaves no layer with keys and values of its own before these layers, of each kind (local, global) that the model has"
            violations.append(Violation("model.kv_shared_layers", self.kv_shared_layers, rule, "share those of fewer layers"))
        if self.global_head_width % 2:
            rule = "is odd; rotary embeddings rotate pairs of dims"
            violations.append(Violation("model.global_head_width", self.global_head_width, rule, "choose an even number"))
        if self.global_kv_heads is not None and (self.heads % self.global_kv_heads or not self.attention_k_eq_v):
            rule = f"must divide model.heads={self.heads}, and requires model.attention_k_eq_v=true, as in the Hugging Face class"
            violations.append(
                Violation("model.global_kv_heads", self.global_kv_heads, rule, "choose a divisor with model.attention_k_eq_v=true")
            )
        if self.rope_scaling not in ("none", "linear"):
            rule = f"is not supported by model.family={self.family}: its frequencies are divided by a factor"
            violations.append(Violation("model.rope_scaling", self.rope_scaling, rule, "set it to none or linear"))
        return violations


def _build(config: Gemma4Config) -> Model:
    from functools import partial

    from torch import nn

    from pipeline.layers.layer_inputs import EmbeddingWithLayerInputs, LayerInput, LayerInputs
    from pipeline.layers.mlp import GatedMLP
    from pipeline.layers.rope_scaling import RopeScaling
    from pipeline.layers.rotary import Rotary
    from pipeline.layers.shared_keys import SharedKeyAttention, SharedKeyBlock, SharedKeyStack
    from pipeline.models.decoder import decoder, local_windows

    norm = partial(nn.RMSNorm, eps=config.norm_eps)
    width, factor = config.layer_input_width, math.sqrt(config.hidden)
    windows = local_windows(config)

    def attention(layer: int) -> nn.Module:
        kv_heads, head_width = config.heads_of(layer)
        return SharedKeyAttention(
            *(config.hidden, config.heads, kv_heads, head_width),
            value_eps=config.norm_eps,
            keys_are_values=config.attention_k_eq_v and config.is_global(layer),
            reuses_keys=config.is_shared(layer),
            head_norm=partial(norm, head_width),
            **windows(layer),
        )

    def block(layer: int) -> dict[str, Any]:
        keeps_keys = config.kv_shared_layers > 0 and not config.is_shared(layer)
        return {"layer_input": LayerInput(config.hidden, width, norm) if width else None, "keeps_keys": keeps_keys}

    def mlp(layer: int) -> nn.Module:
        wide = config.double_wide_mlp and config.is_shared(layer)
        return GatedMLP(config.hidden, config.ffn_hidden * (2 if wide else 1), bias=False, activation="gelu_tanh")

    embed: Any = {"factor": factor}
    if width:
        inputs = LayerInputs(config.vocab_size, config.hidden, config.layers, width, norm)
        embed = EmbeddingWithLayerInputs(config.vocab_size, config.hidden, factor=factor, layer_inputs=inputs)
    pairs = int(config.partial_rotary_factor * config.global_head_width // 2)
    scaling = RopeScaling(**rope.scaling(config))
    return decoder(
        config,
        norms="both",
        attention=attention,
        mlp=mlp,
        block=block,
        block_class=SharedKeyBlock,
        embed=embed,
        head={"softcap": config.final_logit_softcapping},
        stack=SharedKeyStack,
        rotary=Rotary(config.global_head_width, config.max_positions, config.rope_theta, scaling, pairs=pairs),
    )


def initial_std(config: Gemma4Config, name: str) -> Init:
    """GPT-2's recipe, since Google published none; its factor of the scores, 1 / sqrt(head_dim), is in the norms of queries and keys."""
    if name.endswith(("query_norm.weight", "key_norm.weight")):
        return Constant(config.heads_of(int(name.split(".")[1]))[1] ** -0.25)
    return Constant(1.0) if name.endswith("layer_scalar") else scaled_residual(config, name)


_INTERVAL = layer_types(default=6)


def _read_interval(content: dict[str, Any]) -> dict[str, Any]:
    """Return the interval of the global layers without the last one, which the class makes global."""
    if isinstance(kinds := content.get("layer_types"), list) and kinds:
        content = {**content, "layer_types": kinds[:-1], "num_hidden_layers": content.get("num_hidden_layers", 30) - 1}
    return _INTERVAL.read(content)


def _write_kinds(config: Gemma4Config) -> dict[str, Any]:
    return {"layer_types": [GLOBAL if config.is_global(layer) else LOCAL for layer in range(config.layers)]}


def _read_heads(content: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the heads. As in the class, per_layer_config, which transformers writes, takes the place of the global keys."""
    width, kv_heads = positive("head_dim", content.get("head_dim", 256)), content.get("num_key_value_heads", 4)
    global_kv_heads = content.get("num_global_key_value_heads") if content.get("attention_k_eq_v", False) else None
    of_global = {
        "head_dim": content.get("global_head_dim", 512),
        "num_key_value_heads": kv_heads if global_kv_heads is None else global_kv_heads,
    }
    if "per_layer_config" in content:
        stated, layers = as_object("per_layer_config", content["per_layer_config"]), content.get("num_hidden_layers", 30)
        of_layers = {str(layer).lstrip("0") or "0": as_object("per_layer_config", sizes) for layer, sizes in stated.items()}
        sizes = [of_layers.pop(str(layer), {}) for layer in range(layers)]
        is_global = [*marked(layers - 1, _read_interval(content)["sliding_window_pattern"]), True]
        if of_layers or sizes != [sizes[-1] if flag else {} for flag in is_global] or sizes[-1].keys() - of_global.keys():
            rule = f"must have {' and '.join(of_global)} of the layers with {GLOBAL}, the same of all of them, and nothing else"
            raise refusal("per_layer_config", stated, rule)
        of_global = {"head_dim": width, "num_key_value_heads": kv_heads} | sizes[-1]
    heads = positive("num_global_key_value_heads", of_global["num_key_value_heads"])
    of_global_width = positive("global_head_dim", of_global["head_dim"])
    return {"head_width": width, "global_head_width": of_global_width, "global_kv_heads": None if heads == kv_heads else heads}


def _write_heads(config: Gemma4Config) -> dict[str, Any]:
    sizes = {"global_head_dim": config.global_head_width, "num_global_key_value_heads": config.global_kv_heads}
    return {"head_dim": config.head_dim, **sizes}


#: Kind of layer -> its rope_type, and the further keys that have an effect with it.
_ROPE = {LOCAL: ("default", ("rope_theta",)), GLOBAL: ("proportional", ("rope_theta", "partial_rotary_factor", "factor"))}


def _write_rope(config: Gemma4Config) -> dict[str, Any]:
    factor = {"factor": config.rope_factor} if config.rope_scaling == "linear" else {}
    of_global = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor, **factor}
    of_kinds = {LOCAL: {"rope_theta": config.rope_local_theta}, GLOBAL: of_global}
    return {"rope_parameters": {kind: {"rope_type": _ROPE[kind][0], **of_kind} for kind, of_kind in of_kinds.items()}}


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields; without rope_parameters, those of the class."""
    if content.get("rope_scaling") is not None:
        raise refusal("rope_scaling", content["rope_scaling"], "is not a key of this class", "set rope_parameters in config.json")
    if content.get("rope_parameters") is None:
        return {}
    parameters = as_object("rope_parameters", content["rope_parameters"])
    if parameters.keys() != _ROPE.keys():
        raise refusal("rope_parameters", parameters, f"must have {LOCAL} and {GLOBAL}", "fix config.json")
    numbers: dict[str, dict[str, float]] = {}
    for kind, (rope_type, keys) in _ROPE.items():
        of_kind = as_object(f"rope_parameters.{kind}", parameters[kind])
        if of_kind.get("rope_type") != rope_type or "rope_theta" not in of_kind or of_kind.keys() - {"rope_type", *keys}:
            rule = f"must have rope_type={rope_type} and rope_theta, and no key beside {', '.join(keys)}"
            raise refusal(f"rope_parameters.{kind}", of_kind, rule)
        numbers[kind] = {key: number(f"rope_parameters.{kind}.{key}", of_kind.get(key, 1.0)) for key in keys}
    factor = numbers[GLOBAL]["factor"]
    return {
        "rope_theta": numbers[GLOBAL]["rope_theta"],
        "rope_local_theta": numbers[LOCAL]["rope_theta"],
        "partial_rotary_factor": numbers[GLOBAL]["partial_rotary_factor"],
        "rope_scaling": "none" if factor == 1 else "linear",
        "rope_factor": factor,
    }


def _read_others(content: dict[str, Any]) -> dict[str, Any]:
    """Verify that every token has an input of the layers, and that attention of text is causal (that of images may not be: vision)."""
    rows, tokens = content.get("vocab_size_per_layer_input", 262144), content.get("vocab_size", 262144)
    if content.get("hidden_size_per_layer_input", 256) and rows != tokens:
        raise refusal("vocab_size_per_layer_input", rows, f"is not supported other than vocab_size={tokens}")
    if (direction := content.get("use_bidirectional_attention")) not in (None, "vision"):
        raise refusal("use_bidirectional_attention", direction, "is not supported by this family; null and vision are")
    return {}


def _table(config: Gemma4Config) -> Table:
    block = "blocks.{i}"

    def attention(layer: int) -> BlockTensors:
        names = {"q_proj": "query", "o_proj": "output", "q_norm": "query_norm"}
        if not config.is_shared(layer):
            names |= {"k_proj": "key", "k_norm": "key_norm"}
            names |= {} if config.attention_k_eq_v and config.is_global(layer) else {"v_proj": "value"}
        entries = (tensors(f"{LAYER}.self_attn.{theirs}", f"{block}.attention.{ours}") for theirs, ours in names.items())
        return BlockTensors(tuple(entry for group in entries for entry in group), lambda _: [(layer, layer)])

    of_inputs = (
        *tensors("model.embed_tokens_per_layer", "embed.layer_inputs.embed.tokens"),
        *tensors("model.per_layer_model_projection", "embed.layer_inputs.project"),
        *tensors("model.per_layer_projection_norm", "embed.layer_inputs.norm"),
        *tensors(f"{LAYER}.per_layer_input_gate", f"{block}.layer_input.gate"),
        *tensors(f"{LAYER}.per_layer_projection", f"{block}.layer_input.project"),
        *tensors(f"{LAYER}.post_per_layer_input_norm", f"{block}.layer_input.norm"),
    )
    return decoder_table(
        *INPUT_NORM,
        *(attention(layer) for layer in range(config.layers)),
        *tensors(f"{LAYER}.post_attention_layernorm", f"{block}.post_attention_norm"),
        *tensors(f"{LAYER}.pre_feedforward_layernorm", f"{block}.mlp_norm"),
        *MLP,
        *tensors(f"{LAYER}.post_feedforward_layernorm", f"{block}.post_mlp_norm"),
        StockTensor(f"{LAYER}.layer_scalar", (f"{block}.layer_scalar",)),
        *(of_inputs if config.layer_input_width else ()),
    )


def _left_over_weights(config: Gemma4Config) -> tuple[str, ...]:
    """Return the tensors of keys and values that the released files have of layers without them."""
    shared = (layer for layer in range(config.layers) if config.is_shared(layer))
    return tuple(f"model.layers.{layer}.self_attn.{name}.weight" for layer in shared for name in ("k_proj", "v_proj", "k_norm"))


#: The class ties the head according to its own key, not to that of the language model.
WITH_IMAGES = Wrapper(
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    constants={"tie_word_embeddings": True},
    ignored_keys=(
        *("vision_config", "audio_config", "initializer_range", "vision_soft_tokens_per_image", "boi_token_id", "eoi_token_id"),
        *("image_token_id", "video_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id"),
    ),
    left_out=tuple(
        f"{prefix}{part}.*" for prefix in ("", "model.") for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    ),
)
MAPPING = decoder_mapping(
    "Gemma4ForCausalLM",
    "gemma4_text",
    wrappers=(WITH_IMAGES,),
    keys={
        "attention_k_eq_v": ("attention_k_eq_v", False),
        "num_kv_shared_layers": ("kv_shared_layers", 0),
        "use_double_wide_mlp": ("double_wide_mlp", False),
        "hidden_size_per_layer_input": ("layer_input_width", 256),
        "final_logit_softcapping": ("final_logit_softcapping", None),
    },
    activation={"hidden_activation": "gelu_pytorch_tanh"},
    constants={"attention_bias": False, "enable_moe_block": False},
    defaults={**gemma3.DEFAULTS, "num_hidden_layers": 30, "vocab_size": 262144, "max_position_embeddings": 131072},
    rope=KeyGroup(("rope_parameters", "rope_scaling"), _write_rope, _read_rope),
    head_width=None,
    nested=(
        *(NO_PADDING, KeyGroup(_INTERVAL.keys, _write_kinds, _read_interval), sliding_window(default=512, positions=131072)),
        KeyGroup(("head_dim", "global_head_dim", "num_global_key_value_heads", "per_layer_config"), _write_heads, _read_heads),
        KeyGroup(
            ("vocab_size_per_layer_input", "use_bidirectional_attention"),
            lambda config: {"vocab_size_per_layer_input": config.vocab_size},
            _read_others,
        ),
    ),
    # of experts, which enable_moe_block=false leaves out
    ignored_keys=("num_experts", "top_k_experts", "moe_intermediate_size"),
    left_over_weights=_left_over_weights,
    table=_table,
)

FAMILY = Family(config=Gemma4Config, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
