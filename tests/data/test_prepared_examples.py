"""stage=tokenize of fine-tuning data: shards of packed examples are those that files give directly, on any number of ranks."""

import gzip
import json
import lzma
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.common.artifact import MANIFEST
from pipeline.common.errors import UserError
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.classification import labels_of
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.packing import best_fit
from tests.conversion.test_huggingface_export import tokenizer_folder  # noqa: F401 - a fixture
from tests.data.library import here
from tests.helpers import pipeline, same_files
from tests.world import configured

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}{% if m['role'] == 'assistant' %}<|endoftext|>{% else %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)
LENGTH = 64


def line(chance: random.Random) -> dict:
    """A chat of one or two turns."""
    turns = [("user", chance.randint(1, 8)), ("assistant", chance.randint(1, 6))] * chance.randint(1, 2)
    return {
        "messages": [{"role": role, "content": " ".join(chance.choices(["ein", "Wald", "123", "x"], k=count))} for role, count in turns]
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory, tokenizer_folder) -> Path:  # noqa: F811 - the fixture
    """Files of chats, with blank and unusable lines, one of them compressed, and of pairs; the tokenizer has a template."""
    folder, chance = tmp_path_factory.mktemp("examples"), random.Random(1)
    (tokenizer_folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer").symlink_to(tokenizer_folder)
    for name, count in (("first", 300), ("second", 11), ("third", 90), ("validation", 20)):
        lines = [json.dumps(line(chance)) for _ in range(count)]
        lines[count // 2] += "\n\n{broken"
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "third.jsonl.gz").write_bytes(gzip.compress((folder / "third.jsonl").read_bytes()))
    pairs = [{"prompt": "x" * (number % 7), "chosen": "ja" * (number % 5 + 1), "rejected": "nein"} for number in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def settings(files: Path, *more: str) -> tuple[str, ...]:
    names = ",".join(str(files / name) for name in ("first.jsonl", "second.jsonl", "third.jsonl.gz"))
    return (
        f"tokenizer.path={files / 'tokenizer'}",
        f"data.instructions.train=[{names}]",
        f"data.instructions.validation=[{files / 'validation.jsonl'}]",
        f"training.sequence_length={LENGTH}",
        "data.shard_megabytes=0.008",
        "data.quarantine_limit=0.05",
        *more,
    )


@pytest.fixture(scope="module")
def prepared(files, tmp_path_factory) -> Path:
    """The shards of the chats, written by one process."""
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    printed = here("stage=tokenize", *settings(files), f"data.instructions.tokens={folder}")
    assert "skipped 3 unusable lines" in printed
    return folder


def objective(files: Path, *more: str, split: str = "training", share: tuple[int, int] = (0, 1)):
    config = configured("stage=finetune", "training.objective=supervised", *settings(files, *more))
    return getattr(registry, f"open_{split}")(config, share), config


def test_shards_give_the_samples_that_files_give(files, prepared, tmp_path):
    """In order and content, over two epochs, with the same fingerprint, so that a run may change from one to the other."""
    for split in ("training", "validation"):
        (direct, config), (shards, _) = (
            objective(files, *more, f"run_dir={tmp_path}", split=split) for more in ((), (f"data.instructions.tokens={prepared}",))
        )
        count = int(direct.samples.counts[0])
        assert count == int(shards.samples.counts[0]) > 5
        expected, found = (each.arrays(np.arange(2 * count)) for each in (direct, shards))
        assert expected.keys() == found.keys()
        for name in expected:
            np.testing.assert_array_equal(expected[name], found[name], err_msg=name)
        assert (found["targets"] != IGNORE).any(axis=1).all()
        assert direct.fingerprint(config, 1) == shards.fingerprint(config, 1)
        assert direct.samples.padding == shards.samples.padding
        assert direct.samples.answers == shards.samples.answers
    train = [entry for name, entry in json.loads((prepared / MANIFEST).read_text())["files"].items() if name.startswith("train")]
    assert len(train) > 4
    listed = {path.name: [json.loads(text) for text in path.read_text().splitlines()] for path in prepared.glob("unusable-*.jsonl")}
    assert [(Path(each["file"]).name, each["line"]) for each in listed["unusable-train.jsonl"]] == [
        ("first.jsonl", 153),
        ("second.jsonl", 8),
        ("third.jsonl.gz", 48),
    ]
    shards.samples.stream.verify()


def test_chats_in_parquet_are_those_of_lines(files, tmp_path):
    """Parquet has null for a key that a message lacks."""
    records = [json.loads(text) for text in (files / "third.jsonl").read_text().splitlines() if text.startswith('{"')]
    records[3]["messages"][0]["weight"] = None
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet", row_group_size=10)
    more = "data.shard_megabytes=1"  # divides both into one part
    lines, rows = (objective(files, f"data.instructions.train=[{tmp_path}/x.{ending}]", more)[0] for ending in ("jsonl", "parquet"))
    count = int(lines.samples.counts[0])
    expected, found = (each.arrays(np.arange(count)) for each in (lines, rows))
    for name in expected:
        np.testing.assert_array_equal(expected[name], found[name], err_msg=name)
    assert labels_of_both(tmp_path) == [["bad", "good"]] * 4
    (tmp_path / "x.parquet").write_bytes(bytes(3000) + (tmp_path / "x.parquet").read_bytes()[3000:])
    with pytest.raises(UserError, match=r"x\.parquet: is damaged"):
        objective(files, f"data.instructions.train=[{tmp_path}/x.parquet]")


def labels_of_both(folder: Path) -> list[list[str]]:
    """The labels of files of the same records in every format that is read."""
    text = b'{"text": "a", "label": "good"}\n{"text": "b", "label": "bad"}\n'
    contents = {"l.jsonl": text, "l.jsonl.gz": gzip.compress(text), "l.jsonl.xz": lzma.compress(text)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist([{"label": "good"}, {"label": "bad"}]), folder / "l.parquet")
    return [labels_of([str(folder / name)], "data.instructions.train") for name in (*contents, "l.parquet")]


def test_any_number_of_ranks_writes_the_same_bytes_and_a_rerun_does_what_is_missing(files, prepared, tmp_path):
    pipeline("stage=tokenize", *settings(files), f"data.instructions.tokens={tmp_path}/4", ranks=4)
    assert same_files(prepared, tmp_path / "4")
    folder, words = tmp_path / "refused", ("stage=tokenize", *settings(files, f"data.instructions.tokens={tmp_path / 'refused'}"))
    printed = here(*words, "data.quarantine_limit=0.001", expect=2)
    assert "data.quarantine_limit=0.001" in printed
    assert not (folder / MANIFEST).exists()
    shards = sorted(folder.glob("train-*.tar"))
    before = {path: path.stat().st_ino for path in shards[1:]}
    shards[0].unlink()
    (folder / ".unfinished" / f"{shards[0].name}.json").unlink()  # as after a kill: a part has its note once its shard is complete
    pipeline(*words, ranks=2)
    assert same_files(prepared, folder)
    assert {path: path.stat().st_ino for path in before} == before
    assert "nothing to do" in here(*words)


def test_pairs_are_sequences_of_two(files, tmp_path):
    more = (f"data.instructions.train=[{files / 'pairs.jsonl'}]", "data.instructions.validation=[]", "training.objective=dpo")
    here("stage=tokenize", *settings(files, *more), f"data.instructions.tokens={tmp_path}")
    both = [objective(files, *more, *tokens)[0] for tokens in ((), (f"data.instructions.tokens={tmp_path}",))]
    expected, found = (each.arrays(np.arange(80)) for each in both)
    for name in expected:
        np.testing.assert_array_equal(expected[name], found[name], err_msg=name)
    assert [each.documents for each in both] == [40, 40]
    assert objective(files, *more, f"data.instructions.tokens={tmp_path}", split="validation")[0] is None


def test_what_does_not_fit_is_refused(files, prepared, tokens, tmp_path):
    shards = f"data.instructions.tokens={prepared}"
    with pytest.raises(UserError) as error:
        objective(files, shards, "training.sequence_length=32", "data.instructions.pack=false", "tokenizer.chat_template=plain")
    for key in ("training.sequence_length=32", "data.instructions.pack=False", "tokenizer.chat_template"):
        assert key in str(error.value)
    assert "run stage=tokenize into another folder" in str(error.value)
    with pytest.raises(UserError, match=r"contains token shards of text, which have no answers"):
        objective(files, f"data.instructions.tokens={tokens}")
    with pytest.raises(UserError, match=r"contains packed examples of stage=finetune, not text"):
        registry.open_training(configured("stage=pretrain", f"data.tokens={prepared}"))
    with pytest.raises(UserError, match=r"contains no complete output of stage=tokenize"):
        objective(files, f"data.instructions.tokens={tmp_path}")
    name = "train-00001.tar"
    for path in prepared.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes((prepared / name).read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{name}: is truncated"):
        objective(files, f"data.instructions.tokens={tmp_path}")
    content = bytearray((prepared / name).read_bytes())
    content[700] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: is corrupt"):
        objective(files, f"data.instructions.tokens={tmp_path}", "data.verify=all")
    command = ("stage=tokenize", f"tokenizer.path={files / 'tokenizer'}", f"data.instructions.tokens={tmp_path / 'new'}")
    assert "data.instructions.train=[]: names no file" in here(*command, expect=2)
    missing = here(*command, f"data.instructions.train=[{tmp_path}/none.jsonl]", expect=2)
    assert "none.jsonl: is not a file" in missing


@pytest.mark.parametrize("median, spread", [(120, 1.2), (350, 0.9), (900, 0.7)])
def test_sequences_are_full(median, spread):
    """Lengths of chats are about log-normal: short answers, OpenAssistant, long instructions; a shard has 64 MB or so of text."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(median), spread, 8_000_000 // median), 2, 4096).astype(np.int64)
    count = best_fit(lengths, 4096).max() + 1
    assert lengths.sum() / (count * 4096) > 0.99
