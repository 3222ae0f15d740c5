"""The input is divided into parts for ranks: byte ranges contain each document once, parts cover all files."""

import itertools
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.read import input_files
from pipeline.data.read.documents import Document
from tests.data.raw_files import all_of, json_line, parquet_of, spans_of

LINE_OR_FAULT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(json_line), st.sampled_from(["\n", "{\n", "\r\n"])
)


@given(st.lists(LINE_OR_FAULT, max_size=20), st.integers(1, 200))
def test_byte_ranges_of_a_file_contain_each_document_once(tmp_path_factory, lines, size):
    path = tmp_path_factory.mktemp("ranges") / "x.jsonl"
    path.write_bytes("".join(lines).encode())
    full, split = (all_of(spans_of(path, step)) for step in (1 << 30, size))
    assert [d for d in split if isinstance(d, Document)] == [d for d in full if isinstance(d, Document)]
    assert [d.text for d in full if isinstance(d, Document)] == [json.loads(line)["text"] for line in lines if line.startswith('{"')]
    assert len(split) == len(full)


@settings(max_examples=30)
@given(st.lists(st.text("aä", max_size=9), min_size=1, max_size=30), st.integers(1, 9), st.integers(100, 3000))
def test_byte_ranges_of_a_parquet_file_contain_each_row_once(tmp_path_factory, rows, group, size):
    path = tmp_path_factory.mktemp("groups") / "x.parquet"
    path.write_bytes(parquet_of([{"n": n, "text": text} for n, text in enumerate(rows)], row_group_size=group))
    found = all_of(spans_of(path, size))
    assert [(d.offset, d.meta["n"], d.text) for d in found] == [(n, n, text) for n, text in enumerate(rows)]


NAMES = st.sampled_from(["x.jsonl", "x.txt", "x.parquet", "x.jsonl.gz"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(NAMES, st.integers(0, 1_000_000)), max_size=30), st.integers(1, 7))
def test_parts_cover_the_input_once_and_every_rank_gets_its_share(files, ranks):
    found = [input_files.InputFile(f"{n}/{name}", f"{n}/{name}", size) for n, (name, size) in enumerate(files)]
    parts = input_files.parts(found, 100_000)
    assert [part.number for part in parts] == list(range(len(parts)))
    covered: dict[str, list] = {source.name: [] for source in found}
    for span in (span for part in parts for span in part.spans):
        covered[span.file.name].append((span.start, span.file.size if span.end is None else span.end))
    for source in found:
        ranges = covered[source.name]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == source.size
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        assert len(ranges) == 1 or source.splittable
    assert all(part.size <= 100_000 or len(part.spans) == 1 for part in parts)
    shares = [input_files.assigned(parts, rank, ranks) for rank in range(ranks)]
    assert sorted(part.number for share in shares for part in share) == list(range(len(parts)))
    loads = [sum(part.cost for part in share) for share in shares]
    assert max(loads) - min(loads) <= max((part.cost for part in parts), default=0)


def test_many_small_files_are_one_part() -> None:
    found = [input_files.InputFile(f"{n}.txt", f"{n}.txt", 1000) for n in range(1000)]
    assert len(input_files.parts(found, 64 << 20)) == 1
