"""The HTML of the reports."""

import pytest

from pipeline.common import page
from pipeline.config.data import DedupConfig
from pipeline.data.clean.cleaner import StepCounts
from pipeline.data.dedup.clusters import NOTHING
from pipeline.data.read.documents import add_in_group
from pipeline.data.shard import shard_report
from pipeline.data.shard.process_part import PartCounts

DIFFERENCES = {
    "removed": ("one two three", "one three", "one <del>two </del>three"),
    "replaced": ("schÃ¶n & <b>", "schön & <b>", "<del>schÃ¶n</del><ins>schön</ins> &amp; &lt;b&gt;"),
    "invisible": ("soft\u00adly", "softly", "<del>soft[U+00AD]ly</del><ins>softly</ins>"),
    "a line": ("a\nb\nc", "a\nc", "a\n<del>b⏎\n</del>c"),
    "cut": ("x cut text that foll", "cut text that follow", "<del>x </del>cut text that …"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_differences_are_highlighted(case):
    before, after, expected = DIFFERENCES[case]
    assert page.macros().difference(before, after, 20) == f"<pre>{expected}</pre>"


def test_a_table_is_readable_on_a_narrow_screen_and_escapes():
    made = page.macros().table(["name", "n", "share"], [["<a>", 1234, "5.0 %"], ["b", "", "-"]])
    assert 'data-name="n">1,234<' in made
    assert "&lt;a&gt;" in made
    assert "class=wide" in made
    assert made.count("<td class=n") == 4


@pytest.mark.parametrize(
    "kept, lost, warned",
    [
        (4, "dedup: exact duplicate", "dedup: exact duplicate (60.0 %):"),
        (6, "dedup: exact duplicate", None),
        (6, "gopher: too few words", "gopher: too few words (40.0 %; off by <code>clean.gopher.least_words=0</code>):"),
        (7, "gopher: too few words", None),
    ],
)
def test_the_page_warns_of_a_corpus_that_loses_half_or_a_third_to_rules_of_quality(kept, lost, warned):
    counts = PartCounts(documents=20, bytes=2000, read={"books": [10, 1000], "web": [10, 1000]}, steps={"gopher": StepCounts()})
    add_in_group(counts.lost, "web", lost, 10 - kept, 100 * (10 - kept))
    empty = {"documents": 0, "bytes": 0}
    corpora = {name: {"train": {"documents": n, "bytes": 100 * n}, "validation": empty} for name, n in (("books", 10), ("web", kept))}
    totals = {"documents": 10 + kept, "bytes": 100 * (10 + kept)}
    counted = {"languages": {}, "lengths": {}, "scores": {}, "repeated_documents": 0}
    output = {"train": totals, "validation": empty, "corpora": corpora, **counted}
    report = shard_report.build(counts, NOTHING, None, output, {"dedup.bands": DedupConfig().bands}, [])
    assert [corpus["name"] for corpus in report["warnings"]] == ["web"] * bool(warned)
    made = shard_report.html(report)
    assert (f"<b>web</b> keeps {10 * kept}.0 % of its documents" in made) == bool(warned)
    assert warned is None or warned in made
    assert "<b>books</b> keeps" not in made
    assert f"<b>{50 + 5 * kept}.0 % of 20 documents kept</b>" in made
    assert "dedup.bands" in made
