"""Export: the folder as transformers loads it."""

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, MarianMTModel
from transformers.modeling_layers import MtpModel

from pipeline.certification.reference import initialize
from pipeline.checkpoint.weights import InMemory as Weights
from pipeline.common.errors import UserError
from pipeline.conversion import huggingface_export
from pipeline.conversion.huggingface_import import ImportedWeights, read_config
from pipeline.conversion.stock_weights import StockWeights
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.models import config_json, registry
from pipeline.models.families.gpt import GPTConfig
from pipeline.models.families.transformer import TransformerConfig
from tests.models.small_decoders import CONFIGS, DEEPSEEK

TEXT = "Im Wald steht ein Tännschen, es hat von lauter Nadeln ein grünes Kleid. 123 <|x|>\n\tif x == 3:"


class InMemory(Weights):
    """The weights of a model with the interface of a checkpoint."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        super().__init__(self.weights)

    def read(self, runs):
        for run in runs:
            box = self.weights[run.name][tuple(slice(*side) for side in run.box)]
            values = run.tensors["weight"]
            values.copy_(box.flatten()[run.start : run.start + values.numel()])


def random_model(config):
    """Return a model with random weights large enough to affect the logits, including norms and biases."""
    model = registry.build(config)
    initialize(model, config, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT] * 5, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def export(folder: Path, model, config, tokenizer: Path, *, dtype=torch.float32, shard_bytes=10**9) -> Path:
    folder.mkdir(exist_ok=True)
    weights = InMemory(model)
    huggingface_export.check_weights(weights, config, "stage.checkpoint", folder)
    assert huggingface_export.write_weights(folder, weights, config, dtype=dtype, shard_bytes=shard_bytes) == sum(
        p.numel() for p in model.parameters()
    )
    end_id = TextEncoder(tokenizer, "<|endoftext|>").end_of_document
    huggingface_export.write_configs(folder, config, dtype=dtype, end_of_document_id=end_id)
    huggingface_export.copy_tokenizer(tokenizer, folder, end_of_document="<|endoftext|>", max_positions=config.max_positions)
    return folder


def load(folder: Path):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {key: value for key, value in report.items() if value} == {}
    return model.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_stock_class(name, tmp_path, tokenizer_folder):
    """Of full sequences, and of some of different lengths: padding is a separate document, and its logits are not compared."""
    config = CONFIGS[name]
    model = random_model(config)
    stock = load(export(tmp_path, model, config, tokenizer_folder))
    sizes = ((3, config.max_positions), (3, 32))
    tokens, padded = (torch.randint(config.vocab_size, size, generator=torch.Generator().manual_seed(7)) for size in sizes)
    valid = torch.arange(32) < torch.tensor([32, 21, 1])[:, None]
    with torch.no_grad():
        ours, theirs = model(tokens), stock(tokens).logits
        ours_padded, theirs_padded = model(padded, documents=valid.int() - 1), stock(padded, attention_mask=valid.long()).logits
    assert stock.dtype == torch.float32
    assert ours.std() > 0.1, "differences would not show"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_padded[valid], theirs_padded[valid], rtol=1e-5, atol=1e-5, msg=lambda text: f"padded: {text}")
    assert torch.isfinite(ours_padded).all()


def test_mtp_modules_are_exported_and_imported(tmp_path, tokenizer_folder):
    """They follow the last layer, in a file that transformers does not read. Released files also contain copies of embedding and head."""
    config = replace(DEEPSEEK, mtp_depth=2)
    model = random_model(config)
    export(tmp_path, model, config, tokenizer_folder)
    file = tmp_path / "mtp.safetensors"
    weights, main = load_file(file), load_file(tmp_path / "model.safetensors")
    assert "model.layers.4.eh_proj.weight" in weights
    for layer in (3, 4):
        weights[f"model.layers.{layer}.embed_tokens.weight"] = main["model.embed_tokens.weight"].clone()
        weights[f"model.layers.{layer}.shared_head.head.weight"] = main["lm_head.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    content = read_config(tmp_path)
    family, mapping = registry.find_mapping(content)
    found = ImportedWeights(StockWeights(tmp_path, mapping), config_json.read(mapping, family.config, content))
    assert len(found.check()) == 4
    expected = InMemory(model)
    assert sorted(found.names()) == sorted(expected.names())
    assert all(torch.equal(found.tensor(name), expected.tensor(name)) for name in expected.names())
    stock, tokens = load(tmp_path), torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), stock(tokens).logits, rtol=1e-5, atol=1e-5)


def test_transformers_computes_the_exported_mtp_module(tmp_path, tokenizer_folder):
    """Its MtpModel reads the module as layer 46, where GLM-4.5-Air has it, and returns the same hidden states."""
    config = replace(CONFIGS["glm4-moe"], layers=46, dense_layers=46, hidden=16, ffn_hidden=16, mtp_depth=1)
    model = random_model(config)
    stock = load(export(tmp_path, model, config, tokenizer_folder))
    further, text = MtpModel.from_pretrained(stock), torch.randint(300, (1, 13), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        hidden = stock.model(text[:, :-1]).last_hidden_state
        theirs = further.forward_layer(0, hidden, torch.arange(12)[None], None, input_ids=text[:, 1:])
        ours = model.head.depths[0](model.embed(text[:, 1:]), hidden, model.attention_context({}))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_bias_of_the_logits_is_exported(tmp_path):
    """MarianMTModel has it as a buffer with a further dim."""
    config = TransformerConfig(layers=2, hidden=32, heads=4, ffn_hidden=48, vocab_size=60, max_positions=40, output_bias=True)
    model = random_model(config)
    huggingface_export.write_weights(tmp_path, InMemory(model), config, dtype=torch.float32, shard_bytes=10**9)
    huggingface_export.write_configs(tmp_path, config, dtype=torch.float32, end_of_document_id=0)
    stock = MarianMTModel.from_pretrained(tmp_path)
    assert torch.equal(stock.final_logits_bias[0], model.head.bias)
    content = read_config(tmp_path)
    family, mapping = registry.find_mapping(content)
    found = ImportedWeights(StockWeights(tmp_path, mapping), config_json.read(mapping, family.config, content))
    assert found.config == config
    assert torch.equal(found.tensor("head.bias"), model.head.bias)


def test_banded_attention_cannot_be_exported():
    """GPT2LMHeadModel has full attention only, so it would compute other logits."""
    config = GPTConfig(banded_window=16)
    with pytest.raises(UserError, match=r"model\.banded_window=16: is not supported by GPT2LMHeadModel"):
        huggingface_export.write_configs(Path("unwritten"), config, dtype=torch.float32, end_of_document_id=0)


def test_shards_hold_what_one_file_holds(tmp_path, tokenizer_folder):
    config = CONFIGS["llama-grouped"]
    model = random_model(config)
    whole = load(export(tmp_path / "whole", model, config, tokenizer_folder)).state_dict()
    folder = export(tmp_path / "sharded", model, config, tokenizer_folder, shard_bytes=50_000)
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    largest = max(tensor.nbytes for tensor in whole.values())
    assert all((folder / file).stat().st_size < max(50_000, largest) + 8192 for file in files)
    sharded = load(folder).state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[key], sharded[key]) for key in whole)


class MeasuredWeights(InMemory):
    """Counts the bytes of its live tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.live = self.peak = 0

    def tensor(self, name):
        value = super().tensor(name).clone()
        self._count(value.nbytes)
        weakref.finalize(value, self._count, -value.nbytes)
        return value

    def _count(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


@pytest.mark.parametrize("name", ["gpt", "mixtral"])
def test_memory_holds_one_tensor(name, tmp_path):
    """Weights are read one by one and freed when they are written, so memory does not depend on the size of the model or of a file."""
    config = CONFIGS[name]
    source = MeasuredWeights(random_model(config))
    huggingface_export.write_weights(tmp_path, source, config, dtype=torch.float32, shard_bytes=10**9)
    sizes = [value.nbytes for value in source.weights.values()]
    assert sum(sizes) > 3 * max(sizes)
    assert source.peak <= 2 * max(sizes)


def test_bf16_export_rounds_every_weight_once(tmp_path, tokenizer_folder):
    config = CONFIGS["llama"]
    model = random_model(config)
    stock = load(export(tmp_path, model, config, tokenizer_folder, dtype=torch.bfloat16))
    assert stock.dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert torch.equal(stock.lm_head.weight, model.head.weight.bfloat16())


def test_tokenizer_and_generation(tmp_path, tokenizer_folder):
    config = CONFIGS["llama"]
    folder = export(tmp_path, random_model(config), config, tokenizer_folder)
    original, stock = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    assert stock(TEXT)["input_ids"] == original.encode(TEXT).ids
    assert stock.decode(stock(TEXT)["input_ids"]) == TEXT
    assert stock.eos_token_id == original.token_to_id("<|endoftext|>")
    model = load(folder)
    assert model.generation_config.eos_token_id == stock.eos_token_id
    prompt = stock("Im Wald", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] <= prompt["input_ids"].shape[1] + 3


@pytest.mark.parametrize("kind", sorted({registry.mapping_of(config).config_json(config)["model_type"] for config in CONFIGS.values()}))
def test_transformers_reads_the_tokens_of_tokenizer_json(kind, tmp_path, tokenizer_folder):
    """For all model types, since transformers has tokenizer classes of its own for some, which replace parts of tokenizer.json."""
    config = next(c for c in CONFIGS.values() if registry.mapping_of(c).config_json(c)["model_type"] == kind)
    huggingface_export.write_configs(tmp_path, config, dtype=torch.float32, end_of_document_id=0)
    huggingface_export.copy_tokenizer(tokenizer_folder, tmp_path, end_of_document="<|endoftext|>", max_positions=40)
    again = tmp_path / "again"  # the tokenizer of an export is that of another run
    again.mkdir()
    huggingface_export.copy_tokenizer(tmp_path, again, end_of_document="<|endoftext|>", max_positions=40)
    (again / "config.json").write_text((tmp_path / "config.json").read_text())
    ids = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode(TEXT).ids
    for folder in (tmp_path, again):
        for trusted in (None, True):
            assert AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)(TEXT)["input_ids"] == ids


def test_missing_unexpected_and_misshapen_weights_are_reported():
    config = CONFIGS["llama"]
    weights = InMemory(random_model(config))
    del weights.weights["norm.weight"]
    weights.weights["blocks.7.mlp.up.weight"] = torch.zeros(2, 3)
    weights.weights["head.weight"] = torch.zeros(2, 3)
    with pytest.raises(UserError) as caught:
        huggingface_export.check_weights(weights, config, "stage.checkpoint", Path("step"))
    text = str(caught.value)
    assert len(caught.value.violations) == 3
    assert "norm.weight is missing, [48] expected" in text
    assert "blocks.7.mlp.up.weight [2, 3] is not a weight" in text
    assert "head.weight is [2, 3], not [300, 48]" in text
