"""Conditions on the fields of documents: the step fields, and data.select of stage=tokenize with score_rank; the ledger follows it."""

import json
from bisect import bisect_right
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common import artifact
from pipeline.common.condition import Condition
from pipeline.common.errors import UserError
from pipeline.config.rules import check
from pipeline.config.rules.clean import condition_violations
from pipeline.data.clean.document_batch import DocumentBatch, Verdict
from pipeline.data.load import blend
from pipeline.data.load.ledger import DocumentLedger
from pipeline.data.read.documents import Document
from pipeline.data.shard import text_shards
from pipeline.data.shard.shards import WrittenShard
from tests.data.test_clean import PROSE, clean, config
from tests.data.test_fasttext import speaker
from tests.training.one_rank import run
from tests.world import configured


@pytest.mark.parametrize(
    "text, fault",
    [
        ("score > 3 and lang == 'de'", "condition not met"),
        ("score > 1 and lang == 'de'", ""),
        ("2 <= score < 3 or not lang in ('fr', 'sh')", ""),
        ("'wiki' in url", ""),
        ("quality['edu'] >= 0.5 and tags[0] != 'x'", ""),
        ("date is None or score > -1", ""),
        ("scroe > 1", "no field scroe"),
        ("lang > 1", "a field of another kind"),
        ("date > 1", "a field of another kind"),
        ("quality['math'] > 1", "a field of another kind"),
    ],
)
def test_a_condition_on_fields(text, fault):
    fields = {"score": 2, "lang": "de", "url": "https://de.wikipedia.org/x", "quality": {"edu": 0.7}, "tags": ["y"], "date": None}
    assert Condition(text).fault(fields) == fault
    assert not list(condition_violations("data.select", text))


@pytest.mark.parametrize(
    "text, why",
    [
        ("score >", "is no condition: invalid syntax"),
        ("", "is no condition"),
        ("score = 3", "is no condition"),
        ("len(url) > 3", "has len(url), and a condition has"),
        ("url.__class__ == 1", "has url.__class__, and"),
        ("[x for x in tags]", "has [x for x in tags], and"),
        ("score + 1 > 3", "has score + 1, and"),
        ("1 > 2", "reads no field"),
        ("score > 3\0", "is no condition"),
        ("(" * 500 + "score" + ")" * 500, "is no condition"),
        ("score > 3 and lang == 'nb'", "compares lang with nb, and no text has this label"),
        ("lang in ['zh-Hans', 'en']", "compares lang with zh-Hans, and"),
    ],
)
def test_what_is_no_condition_is_refused_before_work_starts(text, why):
    key = f"data.select={json.dumps(text)}"
    found = [violation.rule for violation in check.violations(configured("stage=tokenize", key), 1) if violation.key == "data.select"]
    assert len(found) == 1
    assert found[0].startswith(why)


def test_the_step_reads_the_record_and_what_earlier_steps_found():
    kept = [PROSE, None]
    german = "Am Abend ging der alte Mann noch einmal an den Strand, um nach den Schiffen zu sehen, die nicht gekommen waren."
    wanted = config("language", "fields", fields={"keep": "lang == 'en' and stars >= 3"}, language={"keep": ["en", "de"]})
    assert clean([PROSE, german], wanted, {"stars": 4})[0] == kept
    found, counts = clean([PROSE, german], wanted, {"stars": "four"})
    assert found == [None, None]
    assert counts["fields"].dropped.keys() == {"a field of another kind", "condition not met"}
    assert clean([PROSE], wanted)[1]["fields"].dropped.keys() == {"no field stars"}
    assert check.violations(configured("stage=shard", "data.input=[x.jsonl]", "clean.steps=[fields]"), 1)[0].key == "clean.fields.keep"


def test_scores_remain_when_a_later_step_changes_a_text():
    batch = DocumentBatch([Document("a", 0, "one", {}), Document("a", 9, "two", {})])
    batch.scores[:] = 0.25, 0.75
    changed = batch.apply([Verdict(0, "masked", "ones")])
    assert changed.texts == ["ones", "two"]
    assert changed.scores.tolist() == [0.25, 0.75]


@given(st.dictionaries(st.integers(0, 10000), st.integers(1, 50), min_size=1, max_size=40))
def test_percentiles_are_those_of_all_documents(counts):
    scores = sorted(score / 10000 for score, number in counts.items() for _ in range(number))
    written = WrittenShard(scores={"de": {f"{score / 10000:.4f}": number for score, number in counts.items()}})
    for percent, score in enumerate(written.percentiles()["de"]):
        assert bisect_right(scores, score) * 100 >= percent * len(scores), "so many do not exceed it"
        assert score == scores[0] or bisect_right(scores, score - 1e-9) * 100 < percent * len(scores), "and of no lower score"


def test_the_best_documents_of_each_language_are_tokenized_and_the_ledger_names_them(tmp_path: Path, tokenizer: Path):
    """Two languages whose scores differ: a rank is one within the language."""
    model, languages = speaker(tmp_path / "m.bin", {"good": "hq", "bad": "cc"}), speaker(tmp_path / "l.bin", {"eins": "de", "one": "en"})
    records = [
        {"text": f"{word} " * 60 + "good " * good + "bad " * (80 - good) + f"number {good}", "page": good}
        for word, most in (("eins", 20), ("one", 40))
        for good in range(most - 20, most)
    ]
    written = [json.dumps(record) + "\n" for record in records]
    (tmp_path / "in.jsonl").write_text("".join(written))
    places = {record["page"]: sum(map(len, written[:number])) for number, record in enumerate(records)}
    shards, tokens = tmp_path / "shards", tmp_path / "tokens"
    steps = ("clean.steps=[language,score]", f"clean.language={{model: {languages}}}", f"clean.score={{model: {model}, label: hq}}")
    made = ("dedup=none", "data.validation_fraction=0", f"data.shards={shards}")
    run("shard", tmp_path, f"data.input=[{tmp_path}/in.jsonl]", *made, *steps)
    assert artifact.read(shards, key="data.shards", stage="shard").totals["scores"].keys() == {"de", "en"}
    assert "<h2>Scores</h2>" in (shards / "report.html").read_text()
    common = (f"data.shards={shards}", f"data.tokens={tokens}", f"tokenizer.path={tokenizer}")
    run("tokenize", tmp_path, *common, "data.select='score_rank >= 0.8 and page != 19'")
    manifest = artifact.read(tokens, key="data.tokens", stage="tokenize")
    assert manifest.totals["train"]["documents"] == 7, "a fifth of each language, without one"
    samples = blend.open_training(configured("stage=pretrain", f"data.tokens={tokens}", "training.sequence_length=32", "model=gpt-tiny"))
    ledger = DocumentLedger(samples, [shards])
    named = [fields["page"] for shard in range(len(ledger.shards)) for _, fields in ledger.metadata(shard)]
    assert sorted(named) == [16, 17, 18, 36, 37, 38, 39]
    run("convert_tokens", tmp_path, *common, "stage.to=parquet", f"stage.output={tmp_path}/rows")
    rows = pq.read_table([*(tmp_path / "rows").glob("*.parquet")])
    assert sorted(int(name.rpartition(":")[2]) for name in rows["id"].to_pylist()) == sorted(places[page] for page in named)
    with pytest.raises(UserError, match=r"chooses none of the documents\n.*score_rank is the part of .*, 0.99 at most"):
        run("tokenize", tmp_path, common[0], f"data.tokens={tmp_path}/none", common[2], "data.select=score_rank >= 0.995")
    with pytest.raises(UserError, match=r"=scroe > 1: reads scroe, which the first 40 documents .* do not have\n.*they have corpus, id"):
        run("tokenize", tmp_path, *common, "data.select=scroe > 1")
    with pytest.raises(UserError, match=r"data\.tokens"):  # the folder has the tokens of another condition
        run("tokenize", tmp_path, *common)


def test_a_rank_without_scores_is_refused(shards: Path, tokenizer: Path, tmp_path: Path):
    common = (f"data.shards={shards}", f"data.tokens={tmp_path}/t", f"tokenizer.path={tokenizer}")
    with pytest.raises(UserError, match=r"reads score_rank, which .*\n.*add score to clean.steps of stage=shard"):
        run("tokenize", tmp_path, *common, "data.select=score_rank > 0.5")


def test_a_selection_reads_the_fields_of_the_shard_first():
    selection = text_shards.Selection("score > 0.5 and lang == 'de' and corpus == 'web'", artifact.Manifest("shard", {}, {}, {}))
    assert selection({"corpus": "web", "lang": "de", "score": 0.7, "meta": {"score": 0.1, "corpus": "x"}})
    assert selection({"corpus": "web", "lang": None, "score": 0.7, "meta": {"lang": "de"}})
    assert not selection({"corpus": "web", "lang": "de", "meta": {"score": 0.1}})
