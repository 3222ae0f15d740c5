"""What an imported model came with, in every family: from the import over training in another run directory to the exports."""

import copy
import dataclasses
import json
import logging
import shlex
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline import stages
from pipeline.checkpoint import native
from pipeline.common.ranks import Ranks
from pipeline.config import compose
from pipeline.models import config_classes, registry
from pipeline.training import finetuning
from pipeline.training import run as training_run
from pipeline.training.checkpoint_hooks import CheckpointHooks
from tests.helpers import free_port, one_in, pipeline
from tests.models.real_configs import CONFIGS, shrunk
from tests.world import composition
from tools.audit.family_cases import FAMILIES
from tools.audit.small_models import configuration, randomize

SPECIAL = ["<|endoftext|>", "<pad>", "</s>", "<|eot|>", "<|eom|>", "<s>", "<mask>", "<start>", "[CLS]", "[SEP]", "[MASK]"]
SPECIAL += [f"<extra_id_{number}>" for number in range(24)]
IDS = {"bos_token_id": 5, "eos_token_id": [2, 3, 4], "pad_token_id": 1}
GENERATION = {**IDS, "do_sample": True, "temperature": 0.6, "transformers_version": "4.44.0"}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}<|eot|>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
BOS = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TOKENIZER = {"bos_token": BOS, "eos_token": "<|eot|>", "pad_token": "<pad>", "chat_template": TEMPLATE}
#: Keys of config.json that an export may say otherwise: of the file, and of the dtype of its weights.
OF_THE_FILE = {"torch_dtype", "dtype", "auto_map", "architectures"}
#: Published models of tests/models/real_configs.py, and the families and classes of which it has none.
PUBLISHED = (
    *("gpt2-medium", "openai-gpt", "opt-350m", "bloom-560m", "llama-2-7b", "llama-3.1-8b", "mistral-nemo", "mixtral-8x7b", "qwen3-0.6b"),
    *("deepseek-v3-bf16", "bert-base-uncased", "roberta-base", "t5-small", "flan-t5-base", "opus-mt-en-de"),
)
OTHERS = (
    *(("apertus", "default"), ("gemma3", "window"), ("olmo2", "plain"), ("smollm3", "every second"), ("llama", "qwen2.5")),
    *(("bert", "masked"), ("roberta", "xlm-r"), ("roberta", "camembert")),
)
#: Model -> the keys of its config.json that an export states otherwise: its files have no module for multi-token prediction, or no head.
CORRECTED = {
    "deepseek-v3-bf16": {"num_nextn_predict_layers": 0},
    "flan-t5-base": {"tie_word_embeddings": True, "scale_decoder_outputs": False},
    "t5 without scaled outputs": {"tie_word_embeddings": True, "scale_decoder_outputs": False},
}


def contents() -> dict[str, dict[str, Any]]:
    """Name -> config.json of a small model of every class, with dropout and other keys that only training reads."""
    found = {name: {**shrunk(CONFIGS[name]), **IDS} for name in PUBLISHED}
    for family, variant in OTHERS:
        config = configuration(family, FAMILIES[family].variants[variant])
        found[f"{family} {variant}"] = {**registry.mapping_of(config).config_json(config), **IDS, "attention_dropout": 0.25}
    found["mixtral-8x7b"] |= {"router_aux_loss_coef": 0.03, "output_router_logits": True}
    found["t5 without scaled outputs"] = {**found["t5-small"], "scale_decoder_outputs": False}
    for content in found.values():
        content |= {key: 320 for key in ("vocab_size", "decoder_vocab_size") if key in content} | {"unsloth_version": "2024.9"}
        if content.get("is_encoder_decoder"):
            content["decoder_start_token_id"] = 7
    return found


CONTENTS = contents()


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 5)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|eot|>"}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory, shards, tokenizer_folder) -> Path:
    """Token shards, and a file of pairs."""
    folder = tmp_path_factory.mktemp("data")
    pipeline("stage=tokenize", f"data.shards={shards}", f"tokenizer.path={tokenizer_folder}", f"data.tokens={folder / 'tokens'}")
    (folder / "pairs.tsv").write_text("".join(f"{number} trees\t{number} Tannen\n" for number in range(40)))
    return folder


def save(content: dict[str, Any], tokenizer: Path, folder: Path) -> None:
    """Write the folder of a stock model with random weights."""
    folder.mkdir()
    stock_class = getattr(transformers, content["architectures"][0])
    (folder / "config.json").write_text(json.dumps(content))
    _, mapping = registry.find_mapping({"architectures": [stock_class.__name__], "model_type": content["model_type"]})
    torch.manual_seed(0)
    stock = stock_class(stock_class.config_class.from_pretrained(folder))
    randomize(stock, exclude=(*mapping.ignored_weights, *mapping.computed_weights)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "LICENSE.txt").write_text("terms")
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)


BATCH = ("training.sequence_length=32", "training.global_batch_size=2", "training.micro_batch_size=1", "training.steps=1")
COMMON = (*BATCH, "precision=fp32", "tracking=disabled", "optimizer.warmup_steps=0", "training.validation_batches=1", "data.verify=off")


def run(stage: str, model: Any = None, **settings: Any) -> Any:
    """Run a stage in this process; `__` stands for the dot of a key. Returns its configuration."""
    composed = copy.deepcopy(composition((f"stage={stage}", *COMMON)))
    for key, value in settings.items():
        OmegaConf.update(composed, key.replace("__", "."), value if isinstance(value, int | float | list | bool) else str(value))
    config = compose.to_run_config(composed)
    config = config if model is None else dataclasses.replace(config, model=model)
    ranks = Ranks(master_port=free_port())
    if stage in ("pretrain", "finetune"):
        config = finetuning.complete(config, 1) if stage == "finetune" else config
        training_run.run(config, ranks, lambda _: CheckpointHooks(), lambda *_: None)
    else:
        stages.run(config, ranks)
    return config


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def logits(folder: Path, content: dict[str, Any]) -> torch.Tensor:
    """The logits of the stock class for a few tokens."""
    stock = getattr(transformers, content["architectures"][0]).from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(40, 70)[None]
    decoder = {"decoder_input_ids": tokens} if content.get("is_encoder_decoder") else {}
    with torch.no_grad():
        result: torch.Tensor = stock(input_ids=tokens, **decoder)[0]
    return result


#: A decoder, and an encoder and decoder; the others are in the long tier.
FIRST = {"llama-3.1-8b", "t5 without scaled outputs"}


@pytest.mark.parametrize("name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.long) for name in CONTENTS])
def test_what_a_model_came_with(name, tokens, tokenizer_folder, tmp_path, caplog):
    """One step with a learning rate of nearly zero: the export is the imported folder."""
    content, (stock, base, new) = CONTENTS[name], (tmp_path / part for part in ("stock", "base", "new"))
    save(content, tokenizer_folder, stock)
    with caplog.at_level(logging.INFO, "pipeline"):
        run("convert", run_dir=base, stage__input=stock)
    printed = shlex.split(caplog.text.partition("continue with ")[2].partition("\n")[0])
    assert printed[1:4] == [f"run_dir={base}", f"tokenizer.path={base / 'imported'}", 'tokenizer.end_of_document="<|eot|>"']
    assert ('data.decoder_start="<start>"' in printed) == content.get("is_encoder_decoder", False)
    model = config_classes.from_dict(native.read_index(native.find(base, "latest")).config["model"])
    data = {"data__tokens": tokens / "tokens", "data__pairs__train": [str(tokens / "pairs.tsv")], "training__document_mask": False}
    data |= {"training__bias_update_speed": 0.0} if model.family in ("deepseek_v3", "glm4_moe") else {}
    config = run("pretrain", model, run_dir=new, checkpoint__initialize_from=base, optimizer__lr=1e-12, **data)
    assert config.tokenizer.path == str(base / "imported")
    assert config.tokenizer.end_of_document == "<|eot|>"
    assert config.data.decoder_start == ("<start>" if content.get("is_encoder_decoder") else None)
    run("convert", run_dir=new)
    exported = read(new / "hf" / "config.json")
    expected = {**content, **CORRECTED.get(name, {})}
    assert {key: value for key, value in exported.items() if key not in OF_THE_FILE} == {
        key: value for key, value in expected.items() if key not in OF_THE_FILE
    }
    assert read(new / "hf" / "generation_config.json") == GENERATION
    others = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "additional_chat_templates/tools.jinja", "LICENSE.txt")
    for file in others:
        assert (new / "hf" / file).read_bytes() == (stock / file).read_bytes(), file
    if "router_aux_loss_coef" in content:
        recorded = native.read_index(native.find(new, "latest")).config["training"]
        assert recorded["balance_loss"] == content["router_aux_loss_coef"] == 0.03
        assert "training.balance_loss=0.03" in printed
    torch.testing.assert_close(logits(new / "hf", content), logits(stock, content), rtol=1e-5, atol=1e-5)


def test_what_training_changes_is_exported(tokenizer_folder, tmp_path):
    """A longer context, and the labels of a classifier; nothing that contradicts them is kept."""
    lines = {"prompt": "a", "completion": "b", "text": "a"}
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({**lines, "label": label}) + "\n" for label in "xyxyxyzz"))
    rope = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 10000.0}
    rope["rope_parameters"] = {**rope["rope_scaling"], "rope_theta": 10000.0}
    labels = {"id2label": {"0": "x", "1": "y", "2": "z"}, "label2id": {"x": 0, "y": 1, "z": 2}}
    for name, more, settings, changed in (
        ("llama-2-7b", {}, {"training__context_factor": 2}, {"max_position_embeddings": 128, **rope}),
        ("bert-base-uncased", {"num_labels": 2}, {"training__objective": "classification"}, {**labels}),
    ):
        stock, base, new = (tmp_path / f"{name} {part}" for part in ("stock", "base", "new"))
        save({**CONTENTS[name], **more}, tokenizer_folder, stock)
        run("convert", run_dir=base, stage__input=stock)
        data = {"data__instructions__train": [str(tmp_path / "lines.jsonl")]}
        run("finetune", run_dir=new, checkpoint__initialize_from=base, **data, **settings)
        run("convert", run_dir=new)
        exported = read(new / "hf" / "config.json")
        expected = {**CONTENTS[name], **changed}
        assert {key: exported.get(key) for key in exported | expected if key not in OF_THE_FILE} == {
            key: expected.get(key) for key in exported | expected if key not in OF_THE_FILE
        }
        assert AutoConfig.from_pretrained(new / "hf").num_labels == (3 if "id2label" in changed else 2)


def save_ending(folder: Path, tokenizer: Path, end: int) -> dict[str, Any]:
    """Write a Llama that always predicts one token."""
    content = CONTENTS["llama-2-7b"]
    save(content, tokenizer, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        weight.copy_(torch.ones_like(weight) if "norm" in name or "embed" in name else torch.zeros_like(weight))
    weights["lm_head.weight"][end] = 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return content


@pytest.mark.parametrize("end, rank, settings", one_in(3, [(4, 2, True), (2, 0, True), (4, 0, False)]))
def test_generation_after_fine_tuning(end, rank, settings, tokenizer_folder, tmp_path):
    """It ends at each end token of the imported model, with adapters, and without generation_config.json; the GGUF file has them too."""
    stock, base, new = (tmp_path / part for part in ("stock", "base", "new"))
    save_ending(stock, tokenizer_folder, end)
    if not settings:
        (stock / "generation_config.json").unlink()
    run("convert", run_dir=base, stage__input=stock)
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 2)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    tuning = {"data__instructions__train": [str(tmp_path / "chats.jsonl")], "lora__rank": rank, "optimizer__lr": 1e-12}
    run("finetune", run_dir=new, checkpoint__initialize_from=base, **tuning)
    shutil.rmtree(base)
    run("generate", run_dir=new, stage__prompts=tmp_path / "prompts.jsonl", stage__max_tokens=5, stage__logprobs=True)
    assert read(new / "generated" / "completions.jsonl")["generated"]["token_ids"] == []
    run("convert", run_dir=new)
    exported = AutoModelForCausalLM.from_pretrained(new / "hf", dtype=torch.float32)
    assert exported.generate(torch.tensor([[5, 60]]), max_new_tokens=5, do_sample=False).tolist() == [[5, 60, end]]
    text = AutoTokenizer.from_pretrained(new / "hf")
    assert (text.bos_token, text.eos_token, text.pad_token) == ("<s>", "<|eot|>", "<pad>")
    run("convert", run_dir=new, stage__format="gguf")
    fields = gguf.GGUFReader(new / "gguf" / "model.gguf").fields
    found = {name: fields[f"tokenizer.{name}"].contents() for name in ("chat_template", "ggml.add_bos_token")}
    assert found == {"chat_template": TEMPLATE, "ggml.add_bos_token": True}
    roles = {role: fields[f"tokenizer.ggml.{name}_token_id"].contents() for role, name in ROLES.items()}
    assert roles == {"bos": 5, "eos": 3, "eot": 2, "eom": 4, "pad": 1}


ROLES = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "pad": "padding"}
