"""stage=tokenize from the command line: the content of token shards, determinism, reruns and errors."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from pipeline.common.artifact import MANIFEST
from pipeline.common.errors import UserError
from pipeline.data.load.prompts_and_answers import ExampleReader
from pipeline.data.tokenize.token_shards import share
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.evaluation import harness
from tests.data.library import here
from tests.helpers import RAW, pipeline, same_files
from tests.training.one_rank import run

EOD = "<|endoftext|>"
QUOTED = 'tokenizer.end_of_document="</s>"'  # Hydra requires quotes around <


def texts_of(folder: Path, name: str) -> list[str]:
    return [sample["txt"] for sample in webdataset.WebDataset(str(folder / name), shardshuffle=False).decode()]


def shard_of(folder: Path, name: str) -> tuple[dict, np.ndarray, np.ndarray]:
    """(metadata, lengths, tokens) of a token shard, read with tarfile and numpy."""
    with tarfile.open(folder / name) as archive:
        parts = {member.name.partition(".")[2]: archive.extractfile(member).read() for member in archive}
    assert set(parts) == {"json", "lengths.npy", "tokens.npy"}
    return json.loads(parts["json"]), np.load(io.BytesIO(parts["lengths.npy"])), np.load(io.BytesIO(parts["tokens.npy"]))


def test_tokens_are_the_documents_each_closed_by_the_end_token(shards, tokenizer, tokens):
    manifest = json.loads((tokens / MANIFEST).read_text())
    reference = AutoTokenizer.from_pretrained(tokenizer)
    end = manifest["totals"]["end_of_document"]
    assert reference.convert_ids_to_tokens(end) == EOD
    assert set(manifest["files"]) == {path.name for path in shards.glob("*.tar")}
    for name, noted in manifest["files"].items():
        about, lengths, ids = shard_of(tokens, name)
        texts = texts_of(shards, name)
        expected = [[*reference(text)["input_ids"], end] for text in texts]
        assert ids.tolist() == [token for document in expected for token in document]
        assert lengths.tolist() == [len(document) for document in expected]
        assert ids.dtype == np.dtype("<u2")
        # The offset in the manifest addresses the tokens without parsing the tar.
        raw = np.fromfile(tokens / name, dtype=noted["dtype"], count=noted["tokens"], offset=noted["offset"])
        assert np.array_equal(raw, ids)
        assert np.fromfile(tokens / name, "<u4", len(texts), offset=noted["lengths_offset"]).tolist() == lengths.tolist()
        assert (noted["split"], noted["corpus"]) == (about["split"], about["corpus"]) == (name.partition("-")[0], "default")
        counts = {"tokens": len(ids), "documents": len(texts), "text_bytes": sum(len(text.encode()) for text in texts)}
        assert {key: noted[key] for key in counts} == {key: about[key] for key in counts} == counts
    for split in ("train", "validation"):
        entries = [noted for name, noted in manifest["files"].items() if name.startswith(split)]
        total = manifest["totals"][split]
        assert total["tokens"] == sum(entry["tokens"] for entry in entries) > 0
        assert total["bytes"] == sum(entry["text_bytes"] for entry in entries)
        assert manifest["totals"]["corpora"] == {"default": {split: manifest["totals"][split] for split in ("train", "validation")}}


def test_any_number_of_ranks_writes_the_same_bytes(shards, tokenizer, tokens, tmp_path):
    pipeline("stage=tokenize", f"data.shards={shards}", f"tokenizer.path={tokenizer}", f"data.tokens={tmp_path}/t", ranks=4)
    assert same_files(tokens, tmp_path / "t")


def test_text_that_spells_the_end_token_stays_text(tokenizer, tmp_path):
    texts = [f"before {EOD} after", EOD, f"{EOD}{EOD}\n"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    here("stage=shard", *RAW, f"data.input=[{tmp_path}/*.txt]", f"data.shards={tmp_path}/s", "data.validation_fraction=0")
    here("stage=tokenize", f"data.shards={tmp_path}/s", f"tokenizer.path={tokenizer}", f"data.tokens={tmp_path}/t")
    _, lengths, ids = shard_of(tmp_path / "t", "train-00000.tar")
    end = AutoTokenizer.from_pretrained(tokenizer).eos_token_id
    assert np.flatnonzero(ids == end).tolist() == (np.cumsum(lengths) - 1).tolist()
    plain = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    written = [plain.decode(ids[stop - length : stop - 1].tolist()) for stop, length in zip(np.cumsum(lengths), lengths, strict=True)]
    assert sorted(written) == sorted(texts)


def foreign_tokenizer(folder: Path, special: bool = True) -> Path:
    """A tokenizer of another tool: single bytes only, ids above 65,535, with a post-processor, truncation and padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({**{char: 70_000 + n for n, char in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens(["</s>"])
    else:
        tokenizer.add_tokens([AddedToken("</s>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_special_tokens_truncation_and_padding_of_a_foreign_tokenizer_do_not_apply(shards, tmp_path):
    folder = foreign_tokenizer(tmp_path / "foreign")
    here("stage=tokenize", f"data.shards={shards}", f"tokenizer.path={folder}", f"data.tokens={tmp_path}/t", QUOTED)
    manifest = json.loads((tmp_path / "t" / MANIFEST).read_text())
    assert manifest["totals"]["dtype"] == "uint32"
    for name in manifest["files"]:
        _, lengths, ids = shard_of(tmp_path / "t", name)
        assert ids.dtype == np.dtype("<u4")
        assert ids.max() < manifest["totals"]["vocab_size"]
        assert lengths.tolist() == [len(text.encode()) + 1 for text in texts_of(shards, name)]


def test_an_end_token_that_cannot_be_one_is_refused(shards, tokenizer, tmp_path):
    settings = ("stage=tokenize", f"data.shards={shards}", f"data.tokens={tmp_path}/t")
    unknown = here(*settings, f"tokenizer.path={tokenizer}", QUOTED, expect=2)
    assert "tokenizer.end_of_document=</s>" in unknown
    assert f"one of its special tokens: {EOD}" in unknown
    ordinary = foreign_tokenizer(tmp_path / "foreign", special=False)
    forged = here(*settings, f"tokenizer.path={ordinary}", QUOTED, expect=2)
    assert "a document whose text contains it would end there" in forged
    assert not (tmp_path / "t").exists()


def test_every_engine_writes_the_same_bytes(shards, tokenizer, tokens, tmp_path):
    for engine in ("fastokens", "huggingface"):
        folder, settings = tmp_path / engine, (f"data.shards={shards}", f"tokenizer.path={tokenizer}")
        here("stage=tokenize", *settings, f"data.tokens={folder}", f"tokenizer.engine={engine}")
        assert same_files(tokens, folder), engine


def test_corpora_are_counted_separately_and_other_files_are_ignored(shards, tokenizer, tokens, tmp_path):
    manifest = json.loads((shards / MANIFEST).read_text())
    folder, other = tmp_path / "shards", "train-de-00000.tar"
    folder.mkdir()
    manifest["files"][other] = manifest["files"].pop("train-00001.tar") | {"corpus": "de"}
    manifest["files"]["report.json"] = {"bytes": 2, "xxh3": "0"}
    for name in manifest["files"]:
        if name.endswith(".tar"):
            (folder / name).write_bytes((shards / ("train-00001.tar" if name == other else name)).read_bytes())
    (folder / MANIFEST).write_text(json.dumps(manifest))
    here("stage=tokenize", f"data.shards={folder}", f"tokenizer.path={tokenizer}", f"data.tokens={tmp_path}/t")
    made, before = (json.loads((place / MANIFEST).read_text()) for place in (tmp_path / "t", tokens))
    assert other in made["files"]
    assert "report.json" not in made["files"]
    entry = before["files"]["train-00001.tar"]
    counts = {"shards": 1, "documents": entry["documents"], "bytes": entry["text_bytes"], "tokens": entry["tokens"]}
    empty = dict.fromkeys(counts, 0)
    assert made["totals"]["corpora"]["de"] == {"train": counts, "validation": empty}
    rest = {key: before["totals"]["train"][key] - counts[key] for key in counts}
    assert made["totals"]["corpora"]["default"] == {"train": rest, "validation": before["totals"]["validation"]}
    assert made["totals"]["train"] == before["totals"]["train"]


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_every_shard_has_one_rank_and_the_load_is_balanced(sizes, ranks):
    shares = [share(sizes, rank, ranks) for rank in range(ranks)]
    assert sorted(name for names in shares for name in names) == sorted(sizes)
    loads = [sum(sizes[name] for name in names) for names in shares]
    assert max(loads) <= sum(loads) / ranks + max(sizes.values(), default=0)


def test_missing_artifacts_name_the_stage_that_writes_them(shards, tokenizer, tmp_path):
    nothing = f"{tmp_path}/nothing"
    assert "run stage=shard" in here("stage=train_tokenizer", f"data.shards={nothing}", f"tokenizer.path={tmp_path}/t", expect=2)
    assert "run stage=shard" in here("stage=tokenize", f"data.shards={nothing}", f"tokenizer.path={tokenizer}", expect=2)
    settings = ("stage=tokenize", f"data.shards={shards}", f"data.tokens={tmp_path}/t")
    printed = pipeline(*settings, f"tokenizer.path={nothing}", expect=2, ranks=2)
    assert "run stage=train_tokenizer" in printed
    assert printed.count("1 problem") == 1  # not once per rank


def test_a_corrupt_text_shard_is_named_and_the_rerun_does_only_what_is_missing(shards, tokenizer, tokens, tmp_path):
    copy, folder = tmp_path / "shards", tmp_path / "tokens"
    copy.mkdir()
    for path in shards.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    bad = copy / "train-00002.tar"
    good = bad.read_bytes()
    bad.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    settings = ("stage=tokenize", f"data.shards={copy}", f"tokenizer.path={tokenizer}", f"data.tokens={folder}")
    printed = here(*settings, expect=2)
    assert f"{bad}: is corrupt" in printed
    assert not (folder / MANIFEST).exists()
    before = {name: (folder / name).stat().st_ino for name in ("train-00000.tar", "train-00001.tar")}

    bad.write_bytes(good)
    pipeline(*settings, ranks=2)
    assert same_files(tokens, folder)
    assert {name: (folder / name).stat().st_ino for name in before} == before

    bad.write_bytes(good[:5000])
    assert "nothing to do" in here(*settings)
    assert f"{bad}: is truncated" in here(*settings, f"data.tokens={tmp_path}/again", expect=2)


def test_tokens_of_another_tokenizer_and_text_are_refused(corpus, tokens, tmp_path):
    other = (f"data.shards={tmp_path}/shards", f"tokenizer.path={tmp_path}/tokenizer")
    here("stage=shard", *RAW, f"data.input=[{corpus}]", other[0])
    here("stage=train_tokenizer", *other, "tokenizer.vocab_size=280", "tokenizer.report=false")
    printed = here("stage=tokenize", *other, f"data.tokens={tokens}", expect=2)
    assert "was created with tokenizer.path=" in printed
    assert "was created with data.shards=" in printed


BOS = "<|bos|>"


@pytest.fixture(scope="module")
def with_bos(tokenizer, tmp_path_factory) -> Path:
    """The tokenizer with a token with which its post-processor begins texts, and token shards of either choice."""
    folder = tmp_path_factory.mktemp("with_bos")
    shutil.copytree(tokenizer, folder / "tokenizer")
    new = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    new.add_special_tokens([BOS])
    new.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, new.token_to_id(BOS))])
    new.save(str(folder / "tokenizer/tokenizer.json"))
    return folder


def test_documents_begin_with_the_token_of_the_tokenizer(shards, tokens, with_bos, tmp_path, caplog):
    """As tokenizer.bos says, and prompts, answers and exports of a run do as its tokens."""
    path, bos = f"tokenizer.path={with_bos}/tokenizer", Tokenizer.from_file(f"{with_bos}/tokenizer/tokenizer.json").token_to_id(BOS)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    for choice, found in (("auto", "document"), ("none", "none")):
        folder, run_dir = tmp_path / choice, tmp_path / f"run-{choice}"
        run("tokenize", tmp_path, path, f"data.shards={shards}", f"data.tokens={folder}", f"tokenizer.bos={choice}")
        totals = json.loads((folder / MANIFEST).read_text())["totals"]
        begin = [bos] if found == "document" else []
        assert totals["bos"] == (bos if begin else None)
        for name in json.loads((folder / MANIFEST).read_text())["files"]:
            _, lengths, ids = shard_of(folder, name)
            _, plain_lengths, plain = shard_of(tokens, name)
            documents = np.split(plain, np.cumsum(plain_lengths)[:-1])
            assert ids.tolist() == [token for document in documents for token in (*begin, *document.tolist())]
            assert lengths.tolist() == [len(document) + len(begin) for document in documents]
        other = "none" if begin else "document"
        with pytest.raises(UserError, match=f"was tokenized with tokenizer.bos={found}"):
            run("pretrain", run_dir, path, f"data.tokens={folder}", "training.steps=1", f"tokenizer.bos={other}")
        run("pretrain", run_dir, path, f"data.tokens={folder}", "training.steps=1")
        output = f"stage.output={run_dir}/generated"
        run("generate", run_dir, f"stage.prompts={tmp_path}/prompts.jsonl", output, "stage.max_tokens=1")
        (line,) = (run_dir / "generated/completions.jsonl").read_text().splitlines()
        expected = [*begin, *Tokenizer.from_file(f"{with_bos}/tokenizer/tokenizer.json").encode("ab", add_special_tokens=False).ids]
        assert json.loads(line)["generated"]["prompt_tokens"] == len(expected)
        run("convert", run_dir)
        exported = AutoTokenizer.from_pretrained(run_dir / "hf")
        assert exported("ab")["input_ids"] == expected
        text = harness.Text(TextEncoder(with_bos / "tokenizer", EOD, found))
        assert text.encode("ab") == expected
        assert text.beginning == exported.bos_token_id == json.loads((run_dir / "hf/config.json").read_text())["bos_token_id"]
        answered = ExampleReader(with_bos / "tokenizer", 0, 99, texts=TextEncoder(with_bos / "tokenizer", EOD, found).prompts)
        (example,) = answered.read([b'{"prompt": "ab", "completion": "c"}'])
        assert example.tokens[: len(expected)].tolist() == expected
    assert "earlier version" not in caplog.text
    manifest = json.loads((tmp_path / "none" / MANIFEST).read_text())
    del manifest["totals"]["bos"]  # as an earlier version wrote it
    (tmp_path / "none" / MANIFEST).write_text(json.dumps(manifest))
    run("pretrain", tmp_path / "old", path, f"data.tokens={tmp_path}/none", "training.steps=1")
    assert f"do not begin with token {bos}, as texts do" in caplog.text
