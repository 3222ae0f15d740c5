"""Import (stage=convert with stage.input): a run that starts from a Hugging Face folder."""

import errno
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from pipeline.checkpoint.reader import Checkpoint, find
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.conversion import huggingface_export
from pipeline.conversion import imported as kept
from pipeline.conversion.huggingface_import import (
    ImportedWeights,
    check_tokenizer,
    read_config,
    read_generation_config,
)
from pipeline.conversion.import_model import import_model
from pipeline.conversion.imported import copy_originals, original_of
from pipeline.conversion.stock_weights import StockWeights, weight_files
from pipeline.models import config_json, registry
from pipeline.stages import convert
from tests.helpers import pipeline
from tests.models.real_configs import CONFIGS, shrunk
from tests.world import configured

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 64}


def save_llama(folder: Path, **more) -> LlamaForCausalLM:
    """Save transformers' Llama with random weights, in several files."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, **more))
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


KEPT = {"bos_token_id": 3, "eos_token_id": [1, 2], "pad_token_id": 4, "unsloth_version": "2024.9"}
GENERATION = {**KEPT, "do_sample": True, "temperature": 0.6, "stop_strings": ["END"]}


def save_gpt(folder: Path) -> GPT2LMHeadModel:
    """Save transformers' GPT-2 with random weights, in one file."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_head=4, n_layer=2, n_positions=64))
    model.save_pretrained(folder)
    return model


def imported(folder: Path) -> ImportedWeights:
    """Return the weights of a folder, after check()."""
    content = read_config(folder)
    family, mapping = registry.find_mapping(content)
    weights = ImportedWeights(StockWeights(folder, mapping), config_json.read(mapping, family.config, content))
    weights.check()
    return weights


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer) -> tuple[Path, Path, LlamaForCausalLM, list[str]]:
    """Return a Hugging Face folder, the run directory it was imported into, its model, and the overrides that pretrain needs."""
    source, run_dir = tmp_path_factory.mktemp("stock"), tmp_path_factory.mktemp("run") / "imported-run"
    stock = save_llama(source)
    shutil.copyfile(tokenizer / "tokenizer.json", source / "tokenizer.json")
    edit_config(source, **KEPT)
    (source / "generation_config.json").write_text(json.dumps(GENERATION))
    output = pipeline("stage=convert", f"stage.input={source}", f"run_dir={run_dir}", "stage.shard_gigabytes=0.00003")
    overrides = shlex.split(output.partition("continue with stage=pretrain ")[2].split("\n")[0])
    return source, run_dir, stock, overrides[1:]


def test_the_checkpoint_holds_the_stock_weights(run):
    _, run_dir, stock, _ = run
    path = find(run_dir, "latest")
    checkpoint = Checkpoint(path)
    assert path.name == "step-00000000"
    assert len(list(path.glob("*.safetensors"))) > 2, "a single file would not test the size limit"
    assert torch.equal(checkpoint.tensor("blocks.1.attention.key.weight"), stock.model.layers[1].self_attn.k_proj.weight)
    assert torch.equal(checkpoint.tensor("head.weight"), stock.lm_head.weight)
    assert not checkpoint.tensor("head.weight", "exp_avg").any()


def test_the_export_is_the_imported_model(run, tokenizer, tmp_path):
    _, run_dir, stock, _ = run
    refused = pipeline("stage=convert", f"run_dir={run_dir}", f"tokenizer.path={tmp_path}/none", expect=2)
    assert f"set tokenizer.path={run_dir / 'imported'}, the tokenizer of the imported model" in refused
    pipeline("stage=convert", f"run_dir={run_dir}", f"tokenizer.path={tokenizer}")
    again = LlamaForCausalLM.from_pretrained(run_dir / "hf").state_dict()
    assert again.keys() == stock.state_dict().keys()
    assert all(torch.equal(again[name], value) for name, value in stock.state_dict().items())
    assert read_config(run_dir / "hf").items() >= KEPT.items()
    assert json.loads((run_dir / "hf" / "generation_config.json").read_text()) == GENERATION


def test_another_vocabulary_has_its_own_ids(run, tmp_path):
    """What the imported model says about ids applies only to its own tokenizer."""
    _, run_dir, _, _ = run
    imported_folder, other = run_dir / "imported", tmp_path / "other"
    original = original_of(imported_folder, imported_folder)
    assert original is not None
    assert original.content.items() >= KEPT.items()
    other.mkdir()
    tokenizer = Tokenizer.from_file(str(imported_folder / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(other / "tokenizer.json"))
    assert original_of(imported_folder, other) is None
    assert original_of(tmp_path, other) is None


@pytest.mark.long
@pytest.mark.world
def test_pretrain_continues_in_any_layout(run, tokens, tmp_path):
    """With the overrides that convert printed, in one process and in a parallel layout."""
    _, run_dir, stock, overrides = run
    losses = []
    for ranks, layout in ((0, ()), (4, ("parallel.tensor=2", "parallel.pipeline=2"))):
        folder = tmp_path / f"ranks-{ranks}"
        shutil.copytree(run_dir, folder)
        output = pipeline(
            *(
                "stage=pretrain",
                f"run_dir={folder}",
                *overrides,
                f"data.tokens={tokens}",
                *layout,
            ),
            *("training.steps=2", "training.sequence_length=32", "training.global_batch_size=8", "training.micro_batch_size=2"),
            *("precision=fp32", "optimizer.warmup_steps=1", "tracking=disabled", "training.validation_batches=1"),
            ranks=ranks,
        )
        assert "step-00000000: step 0, 0 samples" in output
        assert "changed since" not in output, "nothing was trained with the settings of the import"
        trained = Checkpoint(find(folder, "latest")).tensor("head.weight")
        torch.testing.assert_close(trained, stock.lm_head.weight, rtol=0, atol=2e-3)  # two steps of AdamW with lr 3e-4
        losses.append([json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines() if '"loss"' in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_second_import(run, tmp_path):
    """The same folder: nothing to do. Another folder: refused."""
    source, run_dir, _, overrides = run
    assert "nothing to do" in pipeline("stage=convert", f"stage.input={source}", f"run_dir={run_dir}")
    save_gpt(tmp_path / "gpt")
    message = pipeline("stage=convert", f"stage.input={tmp_path / 'gpt'}", f"run_dir={run_dir}", expect=2)
    assert f"run_dir={run_dir}: already contains an imported model, that of {source} (model=" in message
    assert "xxh3" not in message
    assert overrides[0] == f"tokenizer.path={run_dir / 'imported'}"
    assert overrides[1].startswith("model=llama")


def test_unsupported_features_are_reported_before_anything_is_written(tmp_path):
    folder = tmp_path / "stock"
    save_llama(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    edit_config(folder, hidden_act="relu", is_causal=False, mystery=3)
    output = pipeline("stage=convert", f"stage.input={folder}", f"run_dir={tmp_path / 'run'}", expect=2)
    assert "3 problems" in output
    assert "config.json hidden_act=relu" in output
    assert "config.json is_causal=False" in output
    assert "mystery" not in output
    assert "dynamic" in output
    assert not (tmp_path / "run").exists()


def test_missing_unexpected_and_misshapen_weights_are_reported(tmp_path):
    save_gpt(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["transformer.h.0.attn.c_attn.bias"]
    weights["transformer.h.2.ln_1.weight"] = torch.zeros(32)
    weights["transformer.wpe.weight"] = torch.zeros(63, 32)
    weights["transformer.ln_f.bias"] = torch.zeros(32, dtype=torch.int8)
    save_file(weights, file)
    with pytest.raises(UserError) as caught:
        imported(tmp_path)
    text = str(caught.value)
    assert len(caught.value.violations) == 4
    assert "transformer.h.0.attn.c_attn.bias [96] is missing" in text
    assert "transformer.h.2.ln_1.weight [32] is not a weight" in text
    assert "transformer.wpe.weight is [63, 32], not [64, 32]" in text
    assert "transformer.ln_f.bias is I8" in text


def test_tied_heads_may_be_in_the_file_and_must_be_equal(tmp_path):
    stock = save_gpt(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    matrix = weights.pop("transformer.wte.weight")
    save_file({**weights, "lm_head.weight": matrix}, file)  # files may contain the tied weight under this name only
    assert torch.equal(imported(tmp_path).tensor("embed.tokens.weight"), stock.transformer.wte.weight)
    save_file({**weights, "lm_head.weight": matrix, "transformer.wte.weight": matrix.clone()}, file)
    assert "head.weight" not in imported(tmp_path).names()
    save_file({**weights, "lm_head.weight": matrix + 1, "transformer.wte.weight": matrix}, file)
    with pytest.raises(UserError, match=r"lm_head.weight differs from transformer.wte.weight"):
        imported(tmp_path)


def test_the_constants_of_an_activation_must_be_those_of_the_family(tmp_path):
    """Released files have xIELU's beta and eps in bf16."""
    stock = ApertusForCausalLM(ApertusConfig(**SIZES, num_attention_heads=4, pad_token_id=None)).bfloat16()
    stock.save_pretrained(tmp_path)
    imported(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.act_fn.beta"
    weights = load_file(file)
    save_file({**weights, name: weights[name] + 0.25}, file)
    with pytest.raises(UserError, match=rf"{name} is 0.75, and the family has 0.5 there"):
        imported(tmp_path)
    del weights[name]
    save_file(weights, file)
    with pytest.raises(UserError, match=rf"{name} \[\] is missing"):
        imported(tmp_path)


@pytest.mark.parametrize(
    "kind, prefix, sizes",
    [
        ("gpt2", "transformer.", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
        ("openai-gpt", "transformer.", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
        ("bloom", "transformer.", {"hidden_size": 32, "n_head": 4, "n_layer": 2}),
        ("opt", "model.", {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_attention_heads": 4, "num_hidden_layers": 2}),
    ],
)
def test_files_of_the_inner_model(tmp_path, kind, prefix, sizes):
    """Tensor names in released files often lack the prefix of the class."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=300, **sizes)).save_pretrained(tmp_path)
    expected = imported(tmp_path)
    expected = {name: expected.tensor(name).clone() for name in expected.names()}
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix(prefix): value for name, value in load_file(file).items()}, file)
    found = imported(tmp_path)
    assert found.names() == list(expected)
    assert all(torch.equal(found.tensor(name), value) for name, value in expected.items())


def test_two_sources_of_one_weight(tmp_path):
    save_gpt(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "wte.weight": torch.zeros(300, 32)}, file)
    with pytest.raises(UserError, match=r"contains transformer\.wte\.weight twice: as \S*wte\.weight and as \S*wte\.weight"):
        imported(tmp_path)


def test_a_tied_t5_without_scaled_outputs(tmp_path):
    """transformers 5 ties every T5; its file has one tensor for embedding and head. So has the export, with the same logits."""
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
    stock = T5ForConditionalGeneration(T5Config(**sizes, tie_word_embeddings=False, pad_token_id=0)).eval()
    stock.save_pretrained(tmp_path / "hf")
    weights = imported(tmp_path / "hf")
    assert weights.config.tie_embeddings
    assert "head.weight" not in weights.names()
    (tmp_path / "again").mkdir()
    huggingface_export.write_weights(tmp_path / "again", weights, weights.config, dtype=torch.float32, shard_bytes=10**9)
    huggingface_export.write_configs(tmp_path / "again", weights.config, dtype=torch.float32, end_of_document_id=1, padding_id=0)
    assert "lm_head.weight" not in load_file(tmp_path / "again" / "model.safetensors")
    again = T5ForConditionalGeneration.from_pretrained(tmp_path / "again").eval()
    assert again.config.scale_decoder_outputs is stock.config.scale_decoder_outputs is False
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        expected = stock(tokens, decoder_input_ids=tokens).logits
        torch.testing.assert_close(again(tokens, decoder_input_ids=tokens).logits, expected, rtol=0, atol=0)
        ours = registry.build(weights.config)
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.tensor(name))
        torch.testing.assert_close(ours(tokens, decoder_tokens=tokens), expected, rtol=1e-5, atol=1e-5)


def test_the_weight_of_the_balance_loss_is_a_training_setting(tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "router_aux_loss_coef": 0.007}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(tmp_path / "hf")
    import_model(configured("stage=convert", f"run_dir={tmp_path}/run"), tmp_path / "hf", file_bytes=10**9)
    assert " training.balance_loss=0.007" in caplog.text, "a setting that pretrain needs"
    checkpoint = Checkpoint(find(tmp_path / "run", "latest"))
    assert checkpoint.config["training"]["balance_loss"] == 0.007
    for training, expected in (({"balance_loss": 0.007}, 0.007), ({"balance_loss": 0.0}, 0.0), ({"balance_loss": None}, 0.02)):
        model = imported(tmp_path / "hf").config
        huggingface_export.write_configs(tmp_path, model, dtype=torch.float32, end_of_document_id=1, training=training)
        assert AutoConfig.from_pretrained(tmp_path).router_aux_loss_coef == expected
    edit_config(tmp_path / "hf", router_aux_loss_coef="none")
    with pytest.raises(UserError, match=r"config\.json router_aux_loss_coef=none: must be a number of at least 0"):
        import_model(configured("stage=convert", f"run_dir={tmp_path}/other"), tmp_path / "hf", file_bytes=10**9)


def test_multi_token_prediction_that_the_files_lack(tmp_path):
    """transformers saves no MTP modules, and num_nextn_predict_layers=1 nevertheless."""
    small = {key: value for key, value in shrunk(CONFIGS["deepseek-v3-bf16"]).items() if key != "auto_map"}
    DeepseekV3ForCausalLM(DeepseekV3Config(**small)).save_pretrained(tmp_path)
    assert read_config(tmp_path)["num_nextn_predict_layers"] == 1
    assert imported(tmp_path).config.mtp_depth == 0


def test_a_model_under_another_type_is_compared_with_its_weights(tmp_path, caplog):
    """Kimi K2 is DeepSeek-V3 by another model_type, for which transformers does not join the tensors of the experts."""
    caplog.set_level("INFO", "pipeline")
    small = {key: value for key, value in shrunk(CONFIGS["deepseek-v3-bf16"]).items() if key != "auto_map"}
    DeepseekV3ForCausalLM(DeepseekV3Config(**small)).save_pretrained(tmp_path / "hf")
    edit_config(tmp_path / "hf", model_type="kimi_k2")
    import_model(configured("stage=convert", f"run_dir={tmp_path}/run"), tmp_path / "hf", file_bytes=10**9)
    assert "the logits of DeepseekV3ForCausalLM on" in caplog.text


def test_what_the_stock_class_raises_is_one_message(tmp_path):
    save_llama(tmp_path / "hf")
    edit_config(tmp_path / "hf", bos_token_id="first")
    with pytest.raises(UserError, match=r"stage\.input=\S+: cannot be loaded by LlamaForCausalLM: "):
        import_model(configured("stage=convert", f"run_dir={tmp_path}/run"), tmp_path / "hf", file_bytes=10**9)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'])
def test_a_broken_index(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=r"index\.json: is not readable"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\xff", "[" * 100_000])
def test_broken_configurations(tmp_path, content):
    readers = {"config.json": read_config, "generation_config.json": read_generation_config, "tokenizer.json": check_tokenizer}
    for name, read in readers.items():
        (tmp_path / name).write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError, match=f"has no readable {name}"):
            read(tmp_path)
    assert read_generation_config(tmp_path / "other") is None


def test_a_truncated_tokenizer_is_refused_before_anything_is_written(tmp_path):
    save_llama(tmp_path / "stock")
    (tmp_path / "stock" / "tokenizer.json").write_text('{"version": "1.0", "model": {')
    with pytest.raises(UserError, match=r"has no readable tokenizer\.json"):
        convert.run(configured("stage=convert", f"stage.input={tmp_path / 'stock'}", f"run_dir={tmp_path / 'run'}"), Ranks())
    assert not (tmp_path / "run").exists()


def test_the_settings_that_follow_can_be_pasted(tmp_path, caplog):
    """A run directory with a space is quoted for the shell and for Hydra, as the tokenizer's path is."""
    caplog.set_level("INFO", "pipeline")
    save_llama(tmp_path / "stock")
    import_model(configured("stage=convert", f"run_dir='{tmp_path / 'my run'}'"), tmp_path / "stock", file_bytes=10**9)
    assert f'run_dir="{tmp_path / "my run"}"' in shlex.split(caplog.messages[-1])


def test_a_disk_that_is_full_after_the_weights(tmp_path, monkeypatch):
    """When the tokenizer is copied; the same command completes the import."""
    save_llama(tmp_path / "stock")
    config = configured("stage=convert", f"stage.input={tmp_path / 'stock'}", f"run_dir={tmp_path / 'run'}")

    def full(*_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(kept, "copy_tokenizer_files", full)
        with pytest.raises(UserError, match="cannot be written: No space left on device"):
            convert.run(config, Ranks())
    convert.run(config, Ranks())
    assert (tmp_path / "run" / "imported" / "config.json").is_file()


def byte_level(folder: Path) -> list[int]:
    """GPT-2's files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    tokenizer.model.save(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return tokenizer.encode(TEXT).ids


def word_piece(folder: Path) -> list[int]:
    """BERT's file."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox", "##es", ".", "jump"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return [words.index(word) for word in ("the", "quick", "brown", "fox", "##es", "jump", ".")]


def pieces(folder: Path) -> list[int]:
    """T5's file."""
    options = {"vocab_size": 40, "hard_vocab_limit": False, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2}
    with open(folder / "spiece.model", "wb") as file:
        SentencePieceTrainer.train(sentence_iterator=iter([TEXT] * 20), model_writer=file, **options)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    return SentencePieceProcessor(model_file=str(folder / "spiece.model")).encode(TEXT)


TEXT = "the quick brown foxes jump."


@pytest.mark.parametrize("write", [byte_level, word_piece, pieces])
def test_a_tokenizer_without_tokenizer_json_is_converted(tmp_path, write):
    source, folder = tmp_path / "source", tmp_path / "imported"
    source.mkdir()
    ids = write(source)
    copy_originals(folder, source, source, {}, {})
    assert {path.name for path in source.iterdir()} < {path.name for path in folder.iterdir()}
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids == ids


@pytest.mark.parametrize("broken", ["no transformers", "no conversion"])
def test_a_tokenizer_that_cannot_be_converted_is_kept(tmp_path, broken, monkeypatch, caplog):
    source, folder = tmp_path / "source", tmp_path / "imported"
    source.mkdir()
    for name in ("source.spm", "target.spm", "vocab.json"):
        (source / name).write_text("damaged")
    if broken == "no transformers":
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        (source / "config.json").write_text(json.dumps({"model_type": "marian"}))
    copy_originals(folder, source, source, {}, {})
    assert {path.name for path in folder.iterdir()} >= {path.name for path in source.iterdir()}
    assert not (folder / "tokenizer.json").exists()
    assert "copied vocab.json, source.spm, target.spm, but not as tokenizer.json" in caplog.text
    assert "pip install transformers" in caplog.text


def test_causal_masks_saved_by_older_releases_are_ignored(tmp_path):
    save_gpt(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, file)
    assert imported(tmp_path).check() == ["transformer.h.0.attn.bias"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(dtype, tmp_path):
    stock = save_gpt(tmp_path).to(dtype)
    stock.save_pretrained(tmp_path)
    assert torch.equal(imported(tmp_path).tensor("norm.weight"), stock.transformer.ln_f.weight.float())
    assert torch.equal(imported(tmp_path).tensor("embed.positions.weight"), stock.transformer.wpe.weight.float())


def test_folders_without_a_model(tmp_path):
    with pytest.raises(UserError, match=r"no readable config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UserError, match=r"architectures=MambaForCausalLM: is not a class that can be imported"):
        registry.find_mapping(read_config(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"contains neither model\.safetensors"):
        StockWeights(tmp_path, registry.FAMILIES["gpt"].huggingface[0])
