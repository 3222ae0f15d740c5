"""LoRA adapters in PEFT's format: PEFT computes our logits with our adapter, and we its logits with its adapter."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint import peft_format, peft_settings
from pipeline.checkpoint.lora_adapter import Adapter, Factors, base_hash, check_base
from pipeline.common.errors import UserError
from pipeline.config.lora import LoraConfig
from pipeline.layers.lora import LoRALinear, LoraSpec, add_adapters, merged
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.generation.conftest import pair  # noqa: F401 - a fixture
from tests.models.small_decoders import CONFIGS

#: GPT: three layers in a transposed tensor; BLOOM: interleaved in one; OPT: biases; DeepSeek: latent projections, without the feed-forward
#: layers, since PEFT takes their names for those of the experts.
NAMES = ["llama-grouped", "gpt", "bloom", "opt", "gemma3", "deepseek"]
#: Families whose embeddings and norms are trained, too: untied, tied with position embeddings and biases, tied with other norms.
WITH_MODULES = ("llama", "gpt", "gemma3")
LORA = LoraConfig(
    rank=4,
    alpha=8,
    rank_pattern={"*.0.attention.query": 2, "*.1.attention.value": 0, "*.mlp.up": 3},
    alpha_pattern={"*.attention.key": 5.0},
)


def adapted(config: Any) -> tuple[torch.nn.Module, Adapter]:
    """A model with random weights and adapters, and the adapters."""
    model = random_model(config)
    lora = replace(LORA, targets=["blocks.*.attention.*"], rank_pattern={}) if config.family == "deepseek_v3" else LORA
    add_adapters(model, lambda name: LoraSpec(lora.rank_of(name), lora.alpha_of(name)) if lora.rank_of(name) else None)
    generator = torch.Generator().manual_seed(1)
    layers = {}
    modules = LoraConfig(rank=1, modules_to_save=["embed*", "*norm*"] if config.family in WITH_MODULES else [])
    saved = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if modules.saves(name):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
                saved[name] = parameter.detach()
        for name, module in model.named_modules():
            if isinstance(module, LoRALinear):
                for part in (module.lora.a, module.lora.b):
                    part.copy_(torch.randn(part.shape, generator=generator) * 0.2)
                layers[name] = Factors(module.lora.a.detach(), module.lora.b.detach(), LORA.alpha_of(name))
    return model.eval(), Adapter(layers, base_hash(InMemory(random_model(config)), config, saved), Path(), saved)


def merge(weights: dict[str, torch.Tensor], adapter: Adapter) -> None:
    """Add an adapter to the weights of a model."""
    for layer, factors in adapter.layers.items():
        weights[f"{layer}.weight"].copy_(merged(weights[f"{layer}.weight"], factors.a, factors.b, factors.scale))


def tokens(config: Any) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", NAMES)
def test_peft_computes_our_logits(name, pair, tmp_path):  # noqa: F811 - the fixture
    import peft  # takes seconds

    config, plain, stock = pair(name)
    model, ours = adapted(config)
    peft_format.write_peft(tmp_path, ours, config, dropout=0.1, base_name="base")
    batch = tokens(config)
    with torch.no_grad():
        expected = model(batch)
        before = {name: value.clone() for name, value in stock.state_dict().items()}
        wrapped = peft.PeftModel.from_pretrained(stock, tmp_path).eval()
        try:
            torch.testing.assert_close(wrapped(batch).logits, expected, rtol=1e-4, atol=1e-5)
        finally:
            wrapped.unload().tie_weights()
            stock.load_state_dict(before)
        assert (plain(batch) - expected).abs().max() > 0.01, "the adapter has an effect"
        found = peft_format.read_peft(tmp_path, config, "stage.adapter")
        check_base(found, InMemory(plain), config, "stage.adapter")
        assert found.saved.keys() == ours.saved.keys()
        weights = InMemory(plain).weights
        for name, value in found.saved.items():
            weights[name].copy_(value)
        merge(weights, found)
        torch.testing.assert_close(plain(batch), expected, rtol=1e-4, atol=1e-5)
        plain.load_state_dict(random_model(config).state_dict())


@pytest.mark.parametrize("name", ["llama-grouped", "gpt", "bloom"])
@pytest.mark.parametrize("rslora", [False, True])
def test_we_compute_the_logits_of_an_adapter_of_peft(name, rslora, pair, tmp_path):  # noqa: F811 - the fixture
    """One that PEFT initialized, with its own choice of target modules, and patterns of ranks."""
    import peft  # takes seconds

    config, plain, stock = pair(name)
    patterns = {"layers.1.self_attn.q_proj": 6} if name == "llama-grouped" else {}
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=7,
        use_rslora=rslora,
        init_lora_weights=False,
        rank_pattern=patterns,
        fan_in_fan_out=name == "gpt",
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(stock, settings).eval()
    batch = tokens(config)
    try:
        with torch.no_grad():
            expected = wrapped(batch).logits
        wrapped.save_pretrained(tmp_path)
    finally:
        wrapped.unload()
    found = peft_format.read_peft(tmp_path, config, "stage.adapter")
    assert found.base == ""
    check_base(found, InMemory(plain), config, "stage.adapter")
    model = random_model(config).eval()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        assert (model(batch) - expected).abs().max() > 0.01
        merge(weights, found)
        torch.testing.assert_close(model(batch), expected, rtol=1e-4, atol=1e-5)
    lora = peft_format.configured(LoraConfig(), found)
    assert {layer: lora.rank_of(layer) for layer in found.layers} == {layer: factors.rank for layer, factors in found.layers.items()}


@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_changed_its_base(kind, pair, tmp_path):  # noqa: F811 - the fixture
    """It is refused as it is, since the changed base is not in it; converted by PEFT, it gives PEFT's logits on the unchanged base."""
    import peft  # takes seconds

    config, _, stock = pair("llama-grouped")
    batch, before = tokens(config), {name: value.clone() for name, value in stock.state_dict().items()}
    wrapped = peft.get_peft_model(stock, peft.LoraConfig(r=3, lora_alpha=7, init_lora_weights=kind, task_type="CAUSAL_LM")).eval()
    try:
        wrapped.peft_config["default"].init_lora_weights = True
        wrapped.save_pretrained(tmp_path / "initial")
        wrapped.peft_config["default"].init_lora_weights = kind
        with torch.no_grad():
            for name, weight in wrapped.named_parameters():
                if ".lora_" in name:
                    weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
            expected = wrapped(batch).logits
        wrapped.save_pretrained(tmp_path / "plain")
        wrapped.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    finally:
        wrapped.unload()
        stock.load_state_dict(before)
    with pytest.raises(UserError, match=rf'(?s)init_lora_weights="{kind}": .*path_initial_model_for_weight_conversion'):
        peft_format.read_peft(tmp_path / "plain", config, "stage.adapter")
    found = peft_format.read_peft(tmp_path / "converted", config, "stage.adapter")
    model = random_model(config).eval()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        merge(weights, found)
        torch.testing.assert_close(model(batch), expected, rtol=1e-4, atol=1e-4)


def test_every_setting_of_peft_is_read_or_refused():
    """Each field of the installed release is known, and those of other methods are refused with any value."""
    import peft  # takes seconds

    fields = {item.name for item in dataclasses.fields(peft.LoraConfig)}
    assert fields <= peft_settings.KNOWN, f"{fields - peft_settings.KNOWN} must be read, refused or without effect in peft_settings.py"
    others = fields - peft_settings.READ - peft_settings.INERT - {"peft_type"}
    assert others >= {"use_dora", "kasa_config", "init_lora_weights", "target_parameters"}
    for name in (*others, "of_a_newer_release"):
        value = "lora_ga" if name == "init_lora_weights" else {"rank": 1}
        with pytest.raises(UserError, match=f"has {name}="):
            peft_settings.check({"peft_type": "LORA", name: value}, Path("adapter"), "stage.adapter")
    default = json.loads(json.dumps(peft.LoraConfig(target_modules=["q_proj"]).to_dict(), default=list))
    for kind in (True, False, None, "gaussian", "eva", "orthogonal", "mica"):
        peft_settings.check({**default, "init_lora_weights": kind, "of_a_newer_release": False}, Path("adapter"), "stage.adapter")
    for kind in ("pissa_niter_16", "corda", "loftq", "of_a_newer_release"):
        with pytest.raises(UserError, match=r"(?s)its training changed the weights of the base first.*merge"):
            peft_settings.check({**default, "init_lora_weights": kind}, Path("adapter"), "stage.adapter")


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    config = CONFIGS["llama-grouped"]
    _, ours = adapted(config)
    peft_format.write_peft(tmp_path, ours, config, dropout=0.0, base_name="")
    found = peft_format.read_peft(tmp_path, config, "stage.adapter")

    def refused(weights: Any, model: Any) -> str:
        with pytest.raises(UserError) as error:
            check_base(found, weights, model, "stage.adapter")
        return str(error.value)

    other = InMemory(random_model(config))
    name = "blocks.0.mlp.up.weight"
    other.weights[name] = other.weights[name] + 0.1
    assert "was trained with another base" in refused(other, config)
    assert "was trained with another base" in refused(InMemory(random_model(config)), replace(config, rope_theta=1e3))
    narrow = replace(config, ffn_hidden=64)
    assert "adapts blocks.0.mlp.gate of shape [80, 64]; that of the model is [64, 64]" in refused(InMemory(random_model(narrow)), narrow)

    def unreadable(said: str, **changes: Any) -> None:
        settings = json.loads((tmp_path / "adapter_config.json").read_text())
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(UserError, match=said):
            peft_format.read_peft(tmp_path, config, "stage.adapter")
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))

    unreadable("has use_dora=true, which is not supported", use_dora=True)
    unreadable("trains lm_head, which is not a module of model.family=llama with its weights in the adapter", modules_to_save=["lm_head"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}, tmp_path / "adapter_model.safetensors")
    unreadable("adapts lm_head, which is not a linear layer of model.family=llama")
    magnitudes = {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(64)}
    save_file(tensors | magnitudes, tmp_path / "adapter_model.safetensors")
    unreadable("lora_magnitude_vector, which is no factor of a linear layer")
    with pytest.raises(UserError, match="has no readable adapter_config"):
        peft_format.read_peft(tmp_path / "none", config, "stage.adapter")


@pytest.mark.parametrize("name", ["gpt", "gemma3"])
def test_an_embedding_that_was_trained_without_its_tied_head_is_refused(name, tmp_path):
    """PEFT's default: the head keeps the weights of the base (ensure_weight_tying=false)."""
    config = CONFIGS[name]
    peft_format.write_peft(tmp_path, adapted(config)[1], config, dropout=0.0, base_name="")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert peft_format.read_peft(tmp_path, config, "stage.adapter").saved
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    for untied in ({"ensure_weight_tying": False}, {}):  # releases before the key
        without = {key: value for key, value in settings.items() if key != "ensure_weight_tying"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(without | untied))
        with pytest.raises(UserError, match="trains the embedding without the output head"):
            peft_format.read_peft(tmp_path, config, "stage.adapter")
