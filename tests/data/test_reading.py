"""Reading documents from files of all supported formats."""

import gzip
import json
import lzma
import re
import tarfile
import zlib
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pyarrow as pa
import pytest
import zstandard

from pipeline.common.errors import UserError
from pipeline.data.read import input_files, inventory, reader, suffixes
from pipeline.data.read.documents import ReadOptions, Skipped
from pipeline.data.read.streams import CheckError
from tests.data.raw_files import (
    FORMATS,
    GOOD,
    LONG,
    PACKED,
    PAGE,
    PARQUET,
    TAR,
    WIKI,
    all_of,
    arrow_of,
    json_line,
    page,
    read,
    spans_of,
    tar_of,
    texts,
    warc_record,
    zip_of,
)
from tests.helpers import one_in, pipeline, words


def test_every_format_is_in_the_table() -> None:
    assert FORMATS.keys() == suffixes.FORMATS.keys()


@pytest.mark.parametrize("ending, packing", [(e, p) for e in FORMATS for p in PACKED if not p or e not in suffixes.INTERNAL])
def test_every_format_is_read(tmp_path, ending, packing):
    content, expected, meta = FORMATS[ending]
    (tmp_path / f"x{ending}{packing}").write_bytes(PACKED[packing](content))
    documents, bad = read(tmp_path, suffixes=(f"{ending}{packing}",))
    assert not bad
    assert texts(documents) == expected
    assert documents[0].meta == meta
    assert {document.source for document in documents} == {f"x{ending}{packing}"}


def test_the_case_of_a_suffix_does_not_matter(tmp_path):
    (tmp_path / "a.JSONL").write_bytes(GOOD)
    (tmp_path / "b.Txt.GZ").write_bytes(gzip.compress(b"good"))
    (tmp_path / "c.MD").write_bytes(b"text")
    assert texts(read(tmp_path)[0]) == ["good", "good"]
    assert texts(read(tmp_path, suffixes=(".md",))[0]) == ["text"]


def test_windows_of_up_to_2_gb_are_read_and_larger_ones_are_not_called_damage(tmp_path):
    """`zstd --long=31` writes windows of 2 GB; the header of a frame may demand 3.75 TB."""
    packed = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=10, write_checksum=True))
    frame = packed.compressobj()  # without the size of the content, the header has the window
    content = frame.compress(GOOD) + frame.flush()
    for window_log, documents in ((27, 2), (28, 2), (31, 2), (32, 1)):
        (tmp_path / "x.jsonl.zst").write_bytes(content[:5] + bytes([window_log - 10 << 3]) + content[6:] + PACKED[".zst"](GOOD))
        found, bad = read(tmp_path)
        assert len(found) == documents
        assert [report.reason.partition(":")[0] for report in bad] == ["needs more than 2 GB of memory to be decompressed"] * (
            2 - documents
        )
    content = bytearray(lzma.compress(GOOD))
    content[16] = 39  # the largest dictionary but one
    content[20:24] = zlib.crc32(content[12:20]).to_bytes(4, "little")
    (tmp_path / "x.jsonl.zst").rename(tmp_path / "x.jsonl.xz").write_bytes(content)
    assert [report.reason.partition(":")[0] for report in read(tmp_path)[1]] == ["needs more than 2 GB of memory to be decompressed"]


def test_padding_between_the_streams_of_xz_is_valid(tmp_path):
    (tmp_path / "x.jsonl.xz").write_bytes(lzma.compress(GOOD) + bytes(8) + lzma.compress(GOOD))
    documents, bad = read(tmp_path)
    assert (texts(documents), bad) == (["good"] * 2, [])


def test_types_of_records_do_not_depend_on_case_and_unknown_ones_are_counted(tmp_path):
    records = [warc_record(PAGE).replace(b"WARC-Type: response", b"warc-type: Response"), warc_record(b"Jane Doe", kind="Jane Doe")]
    records += [warc_record(b"x", kind="request").replace(b"WARC-Type", b"Warc-Type"), warc_record(PAGE)]
    (tmp_path / "x.warc").write_bytes(b"".join(records))
    documents, bad = read(tmp_path)
    assert (len(documents), bad) == (2, [])
    assert skipped(tmp_path) == ["WARC record of an unknown type"]


def test_pages_say_what_their_publisher_reserves(tmp_path):
    """In HTTP headers and in <meta>; other values reserve nothing."""
    tag = '<head><META NAME="TDM-Reservation" content="1">'
    headers = [{}, {"tdm_reservation": "1"}, {"X_Robots_Tag": "noindex, NoAI"}, {"Content_Usage": "search=y, train-ai=n"}]
    headers += [{"tdm_reservation": "0"}, {"X_Robots_Tag": "noindex, noairplanes"}, {"Content_Usage": "train-ai=y"}]
    records = [warc_record(page(LONG), **header) for header in headers]
    (tmp_path / "x.warc").write_bytes(b"".join([*records, warc_record(page(LONG).replace(b"<head>", tag.encode()))]))
    reserved = [found.meta.get("reserved") for found in read(tmp_path)[0]]
    assert reserved == [None, "tdm-reservation", "robots", "content-usage", None, None, None, "tdm-reservation"]


def test_pages_of_a_web_archive_are_found_by_media_type_and_everything_else_is_counted(tmp_path):
    page_types = ["Text/HTML; Charset=UTF-8", " TEXT/HTML ", "text/html;charset=utf-8", "application/XHTML+xml;x=y", "text/html,text/html"]
    records = [warc_record(page(LONG), Content_Type=header) for header in page_types]
    records.append(
        warc_record(
            page(LONG).replace(b'<meta charset="utf-8">', b"").decode().encode("latin-1"), Content_Type='text/html; charset="Latin1"'
        )
    )
    other = [("image/PNG", "200 OK"), ("", "200 OK"), ("Jane Doe", "200 OK"), ("text/html", "404 Not Found"), ("text/html", "Jane Doe")]
    records += [warc_record(b"Jane Doe", Content_Type=header, status=status) for header, status in other]
    records += [warc_record(b"x", kind="revisit"), warc_record(b"x", kind="request"), warc_record(b"x", kind="resource")]
    (tmp_path / "x.warc").write_bytes(b"".join(records))
    assert texts(read(tmp_path)[0]) == [LONG] * 6
    assert skipped(tmp_path) == [
        "WARC record of media type image/png",
        "WARC record without a media type",
        "WARC record of media type other",
        "WARC record with HTTP status 404",
        "WARC record without an HTTP status",
        "WARC record of type revisit",
        "WARC record of type resource",
    ]


@pytest.mark.parametrize("kind, packed", [("tar", tar_of), ("zip", zip_of)])
def test_members_of_an_archive_that_are_not_read_are_counted(tmp_path, kind, packed):
    names = ["1.txt", "1.jpg", "2.rst.txt", "3", "4.txt", "4.html", "5.Jane Doe", "6.jsonl.gz", "__MACOSX/._1.txt", ".txt"]
    (tmp_path / f"x.{kind}").write_bytes(packed(dict.fromkeys(names, b"text") | {"1.meta.json": b"{}"}))
    assert texts(read(tmp_path)[0]) == ["text"] * 3
    expected = [".jpg", "none", ".html beside .txt", "other", ".jsonl.gz", ".txt", ".txt", ".meta.json"]
    assert sorted(skipped(tmp_path)) == sorted(f"archive member with suffix {suffix}" for suffix in expected)


NAMES = ["papers/2101.00001", "papers/2101.00002", "papers/2101.00001v2", "v1.0/notes", "a.b/c", "a"]


@pytest.mark.parametrize("order", ["beside", "texts first", "metadata first", "reversed"])
@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz", ".tar.xz", ".zip"])
def test_names_with_dots_and_any_order_of_members_keep_texts_and_metadata(tmp_path, ending, order):
    pairs = [[(f"{name}.json", json.dumps({"n": name}).encode()), (f"{name}.txt", name.encode())] for name in NAMES]
    members = [member for pair in pairs for member in pair]
    if order != "beside":
        members = [pair[1] for pair in pairs] + [pair[0] for pair in pairs]
        members = {"texts first": members, "metadata first": members[6:] + members[:6], "reversed": members[::-1]}[order]
    content = zip_of(dict(members)) if ending == ".zip" else PACKED[{".tgz": ".gz"}.get(ending, ending[4:])](tar_of(dict(members)))
    (tmp_path / f"x{ending}").write_bytes(content)
    documents, bad = read(tmp_path)
    if order != "beside" and ending == ".tar":  # the part is read again
        with pytest.raises(CheckError):
            list(reader.read(*spans_of(tmp_path / "x.tar", 1 << 30), ReadOptions(), verify=False))
    assert {document.text: document.meta for document in documents} == {name: {"n": name} for name in NAMES}
    assert (len(documents), bad, skipped(tmp_path)) == (len(NAMES), [], [])


def skipped(folder: Path) -> list[str]:
    """The reasons why parts of the files are not read."""
    spans = [input_files.Span(file) for file in input_files.find({"default": [str(folder)]}, [], []).files]
    return [found.reason for found in all_of(spans) if isinstance(found, Skipped)]


def test_files_that_are_not_read_are_counted_by_reason(tmp_path):
    for name in ("a.jsonl", "b.MD", "c.bib", "d.bib", "README", ".hidden.txt", ".git/config", "x.Jane Doe"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(GOOD)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "again.jsonl").symlink_to(tmp_path / "a.jsonl")
    listing = input_files.find({"default": [str(tmp_path)]}, [], [".*"])
    assert len(listing.files) == 1
    assert listing.skipped["default"] == {
        "with suffix .md": [1, len(GOOD)],
        "with suffix .bib": [2, 2 * len(GOOD)],
        "with suffix none": [1, len(GOOD)],
        "with suffix other": [1, len(GOOD)],
        "excluded by data.exclude": [2, len(GOOD)],
        "reached again by another path": [2, len(GOOD)],
    }


def test_names_that_differ_only_in_their_suffix_are_found(tmp_path):
    for name in ("a/1.html", "a/1.txt", "b/1.txt", "lib/os.html", "_sources/lib/os.rst.txt", "x.y.jsonl", "x.y.jsonl.gz", "x.z.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(GOOD)
    listing = input_files.find({"default": [str(tmp_path)]}, [], [])
    assert inventory.same_names(listing.files) == {"default": (3, ["_sources/lib/os.rst.txt", "lib/os.html"])}


@pytest.mark.parametrize(
    "ending, padding", [(".gz", b""), (".gz", bytes(700)), (".zst", b""), (".bz2", b""), (".xz", b""), (".xz", bytes(8))]
)
def test_files_of_many_compressed_members_are_read_completely(tmp_path, ending, padding):
    lines = [json_line(words(n, 2000)) for n in range(30)]
    (tmp_path / f"x.jsonl{ending}").write_bytes(b"".join(PACKED[ending](line.encode()) for line in [*lines, ""]) + padding)
    documents, bad = read(tmp_path)
    assert not bad
    assert texts(documents) == [words(n, 2000) for n in range(30)]


def test_the_full_page_is_kept_without_main_content(tmp_path):
    (tmp_path / "x.html").write_bytes(page(LONG))
    documents, _ = read(tmp_path, main_content=False)
    assert "Menu" in documents[0].text
    assert LONG in documents[0].text
    assert "Impressum" in documents[0].text


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_of_tar_is_read(tmp_path, form):
    names = ["short/1.txt", f"{'long' * 20}/{'name' * 10}.txt", *([] if form == tarfile.USTAR_FORMAT else [f"{'ä' * 120}.txt"])]
    (tmp_path / "x.tar").write_bytes(tar_of({name: name.encode() for name in names}, form))
    documents, bad = read(tmp_path)
    assert (texts(documents), bad) == (names, [])


@pytest.mark.parametrize("indent", [None, 1])
def test_json_files_are_arrays_or_records_or_lines(tmp_path, indent):
    wanted = [f"{n} {words(n % 7, 3000)}" for n in range(99)]
    (tmp_path / "array.json").write_text(json.dumps([{"text": text, "n": 1, "x": float("nan")} for text in wanted], indent=indent))
    (tmp_path / "record.json").write_text(json.dumps({"text": "one", "n": 1}, indent=indent))
    (tmp_path / "lines.json").write_text("".join(map(json_line, wanted)))
    (tmp_path / "nothing.json").write_text(json.dumps([], indent=indent))
    documents, bad = read(tmp_path)
    assert texts(documents) == [*wanted, *wanted, "one"]
    assert [report.reason for report in bad] == ["contains no document"]
    assert documents[0].meta == {"n": 1, "x": None}
    for name in ("array.json", "lines.json"):
        assert texts(all_of(spans_of(tmp_path / name, 500_000))) == wanted


def test_files_of_arrow_are_read_as_streams_are(tmp_path):
    (tmp_path / "x.arrow").write_bytes(arrow_of([{"text": "eins"}, {"text": "zwei"}], pa.ipc.new_file))
    assert texts(read(tmp_path)[0]) == ["eins", "zwei"]


def test_redirects_and_talk_of_a_wiki_are_counted(tmp_path):
    (tmp_path / "wiki-pages1.xml-p1p41242.bz2").write_bytes(PACKED[".bz2"](WIKI))
    assert skipped(tmp_path) == ["wiki page that redirects", "wiki page of another namespace"]


def test_numbered_shards_are_read_in_the_notation_of_webdataset(tmp_path):
    for number in range(3):
        (tmp_path / f"shard-{number:02d}.tar").write_bytes(tar_of({f"{number}.txt": words(number, 200).encode()}))
    documents, bad = read(tmp_path / "shard-{00..01}.tar")
    assert (texts(documents), bad) == ([words(0, 200), words(1, 200)], [])
    with pytest.raises(UserError, match=r"shard-03\.tar: no such file"):
        read(tmp_path / "shard-{01..03}.tar")


def test_text_shards_of_this_pipeline_are_read_back(shards, corpus):
    documents, bad = read(shards, suffixes=(".tar",))
    originals, _ = read(corpus)
    assert not bad
    assert sorted(texts(documents)) == sorted(texts(originals))
    assert sorted(document.meta["id"] for document in documents) == sorted(document.meta["id"] for document in originals)


def test_corpora_are_named_by_the_user_and_kept_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    listing = input_files.find({"web": [f"{tmp_path}/a", f"{tmp_path}/a/x.txt"], "default": [f"{tmp_path}/b"]}, [], [])
    documents = [
        document
        for part in input_files.parts(listing.files, 64 << 20)
        for span in part.spans
        for document in reader.read(span, ReadOptions())
    ]
    assert [(d.id, d.text, d.corpus) for d in documents] == [("x.txt:0", "b", "default"), ("web/x.txt:0", "a", "web")]
    refused = pipeline("stage=shard", "data.corpora={Web:[x],default:[x]}", "data.corpora.web=[x]", f"data.shards={tmp_path}/s", expect=2)
    assert "2 problems" in refused
    assert "data.corpora=Web: must consist of a-z" in refused
    assert "data.corpora=default: is the reserved name of the corpus of data.input" in refused
    assert "write data.corpora={NAME: [x]}" in pipeline("stage=shard", "data.corpora=[x]", expect=2)


class _Handler(SimpleHTTPRequestHandler):
    """Serves files below /ranges/ in ranges, below /whole/ not, and below /unsized/ without their length; /broken/ ends early."""

    def do_GET(self) -> None:
        _, way, name = self.path.split("/", 2)
        path = Path(self.directory, unquote(name))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if way == "ranges" else None
        self.send_response(206 if wanted else 200)
        if wanted:
            first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        if way != "unsized":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            with suppress(OSError):  # fsspec ends an answer that is not a range
                self.wfile.write(data[: len(data) // 2] if way == "broken" else data)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path):
    """The address of an HTTP server of the files in tmp_path."""
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(tmp_path))) as http:
        Thread(target=http.serve_forever).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


@pytest.mark.parametrize("way", one_in(3, ["ranges", "whole", "unsized"]))
def test_every_format_is_read_from_a_server(tmp_path, server, way):
    for ending, (content, expected, meta) in FORMATS.items():
        for packing in ("",) if ending in suffixes.INTERNAL else ("", ".gz"):
            name = f"x{ending}{packing}"
            (tmp_path / name).write_bytes(PACKED[packing](content))
            documents, bad = read(f"{server}/{way}/{name}", suffixes=(ending, name))
            assert (texts(documents), bad) == (expected, []), name
            assert documents[0].meta == meta


def test_a_file_of_a_server_that_is_larger_than_a_block_of_fsspec_is_read_in_parts(tmp_path, server):
    """Also from a server that has no ranges."""
    lines = [f"{n} {words(n % 9, 5000)}" for n in range(500)]
    (tmp_path / "x.jsonl").write_text("".join(map(json_line, lines)))
    assert (tmp_path / "x.jsonl").stat().st_size > 10_000_000
    for way in ("ranges", "whole"):
        (file,) = input_files.find({"default": [f"{server}/{way}/x.jsonl"]}, [], []).files
        spans = [span for part in input_files.parts([file], 4_000_000) for span in part.spans]
        assert (len(spans), texts(all_of(spans))) == (4, lines), way


def test_what_a_server_does_not_send_is_reported(tmp_path, server):
    (tmp_path / "x.jsonl").write_bytes(GOOD * 1000)
    for way, name in (("broken", "x.jsonl"), ("whole", "missing.jsonl")):
        source = input_files.InputFile(f"{server}/{way}/{name}", name, 17_000)
        (bad,) = all_of([input_files.Span(source)])
        assert bad.reason.startswith("cannot be read: ")


def test_urls_are_read_through_fsspec(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    content = {"a.jsonl": GOOD, "deep/b ü.jsonl.gz": gzip.compress(GOOD), "deep/c.parquet": PARQUET, "deep/d.warc.gz": b"", ".e.txt": b"no"}
    content |= {"deep/e.warc.gz": gzip.compress(warc_record(PAGE)), "deep/f.tar": TAR}
    for name, data in content.items():
        memory.pipe(f"/corpus/{name}", data)
    documents, bad = read("memory://corpus")
    assert [document.source for document in documents if document.offset == 0 and document.source != "deep/f.tar"] == [
        "a.jsonl", "deep/b ü.jsonl.gz", "deep/c.parquet", "deep/e.warc.gz",
    ]  # fmt: skip
    assert len(documents) == 1 + 1 + 5 + 1 + 4
    assert [report.source for report in bad] == ["deep/d.warc.gz"]
    assert [d.source for d in read("memory://corpus/deep/b*")[0]] == ["b ü.jsonl.gz"]
    assert [d.source for d in read("memory://corpus/a.jsonl")[0]] == ["a.jsonl"]
    (tmp_path / "x.txt").write_text("local")
    assert texts(read(f"file://{tmp_path}")[0]) == ["local"]
    for url, reason in (
        ("memory://nowhere", "no such file"),
        ("nosuch://x", "cannot be listed"),
        ("gs://bucket/x", "its protocol needs a package"),
    ):
        with pytest.raises(UserError, match=reason):
            read(url)
