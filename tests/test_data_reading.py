"""From files of any form to documents; what is bad is told with file, position and reason, and never ends the reading."""

import datetime
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers import words

from pipeline.data import reader, sources, suffixes
from pipeline.data.documents import Bad, Document, ReadOptions


def read(*inputs: Path | str, suffixes: tuple[str, ...] = (), **options: object) -> tuple[list[Document], list[Bad]]:
    """Every document below the inputs, and every complaint."""
    found, bad = sources.find({"default": [str(given) for given in inputs]}, suffixes, [".*"])
    results = [each for part in sources.parts(found) for span in part.spans for each in reader.read(span, ReadOptions(**options))]
    documents = [each for each in results if isinstance(each, Document)]
    assert len({document.id for document in documents}) == len(documents)
    return documents, bad + [each for each in results if isinstance(each, Bad)]


def texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


def json_line(text: str, **more: object) -> str:
    return json.dumps({"text": text, **more}, ensure_ascii=False) + "\n"


def page(text: str, title: str = "Titel") -> bytes:
    body = f"<nav><a href=/>Start</a><a href=/a>Menu</a></nav><main><article><p>{text}</p></article></main><footer>Impressum</footer>"
    return f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{title}</title></head><body>{body}</body></html>'.encode()


def warc_record(body: bytes, kind: str = "response", uri: str = "http://example.org/", **headers: str) -> bytes:
    """One record; a response is wrapped in HTTP."""
    if kind == "response":
        headers = {"Content-Type": "text/html; charset=utf-8"} | {name.replace("_", "-"): value for name, value in headers.items()}
        status = headers.pop("status", "200 OK")
        http = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        body = f"HTTP/1.1 {status}\r\n{http}\r\n".encode() + body
    about = {"WARC-Type": kind, "WARC-Target-URI": uri, "WARC-Date": "2026-01-02T03:04:05Z", "WARC-Record-ID": "<urn:uuid:1>"}
    about |= {
        "Content-Type": "application/http; msgtype=response" if kind == "response" else "text/plain",
        "Content-Length": str(len(body)),
    }
    return b"WARC/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in about.items()).encode() + b"\r\n" + body + b"\r\n\r\n"


def tar_of(members: dict[str, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def parquet_of(rows: list[dict], **more: object) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, **more)
    return out.getvalue()


LONG = " ".join(words(1, 200).split())
#: ending -> (a file of that form, its texts, the metadata of the first)
FORMS: dict[str, tuple[bytes, list[str], dict]] = {
    ".jsonl": ((json_line("eins", lang="de", n=1) + "\n" + json_line("zwei")).encode(), ["eins", "zwei"], {"lang": "de", "n": 1}),
    ".ndjson": (b"\xef\xbb\xbf" + json_line("eins").replace("\n", "\r\n").encode(), ["eins"], {}),
    ".json": (b'{"text": "eins", "score": NaN}', ["eins"], {"score": None}),
    ".txt": ("\ufeffEin Dokument\r\nin zwei Zeilen\u2028oder drei".encode(), ["Ein Dokument\r\nin zwei Zeilen\u2028oder drei"], {}),
    ".html": (page(LONG), [LONG], {"title": "Titel"}),
    ".htm": (page(LONG).replace(b"utf-8", b"iso-8859-1").decode().encode("latin-1"), [LONG], {"title": "Titel"}),
    ".warc": (
        warc_record(b"GET / HTTP/1.1\r\n\r\n", kind="request")
        + warc_record(page(LONG, "A"), uri="http://example.org/ü")
        + warc_record(b"\x89PNG", Content_Type="image/png")
        + warc_record(page("gone"), status="404 Not Found")
        + warc_record(gzip.compress(page(LONG + "!", "B")), Content_Encoding="gzip"),
        [LONG, LONG + "!"],
        {"url": "http://example.org/ü", "date": "2026-01-02T03:04:05Z", "title": "A"},
    ),
    ".wet": (
        warc_record(b"software", kind="warcinfo") + warc_record("Grün".encode(), kind="conversion"),
        ["Grün"],
        {"url": "http://example.org/", "date": "2026-01-02T03:04:05Z"},
    ),
    ".parquet": (
        parquet_of([{"text": "eins", "day": datetime.date(2026, 1, 2), "raw": b"x", "big": "x" * 2000, "m": {"a": [1]}}, {"text": "zwei"}]),
        ["eins", "zwei"],
        {"day": "2026-01-02", "m": {"a": [1]}},
    ),
    ".tar": (
        tar_of({
            "a/1.json": b'{"lang": "de"}', "a/1.txt": b"eins", "a/1.jpg": b"\xff\xd8", "b/1.txt": b"zwei",
            "b/2.json": b'{"text": "drei"}', "3.html": page(LONG), "4.jsonl": (json_line("vier") * 2).encode(),
            "5.txt": b"f", "5.json": b'{"id": "i", "source": "s", "meta": {"lang": "en"}}',
        }),  # fmt: skip
        ["eins", "zwei", "drei", LONG, "vier", "vier", "f"],
        {"lang": "de"},
    ),
}  # fmt: skip
PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def test_every_form_is_in_the_table() -> None:
    assert FORMS.keys() == suffixes.FORMS.keys()


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("ending", FORMS)
def test_every_form_is_read(tmp_path, ending, packing):
    if (ending, packing) == (".parquet", ".gz") or (ending, packing) == (".parquet", ".zst"):
        pytest.skip("Parquet compresses within")
    content, expected, meta = FORMS[ending]
    (tmp_path / f"x{ending}{packing}").write_bytes(PACKED[packing](content))
    documents, bad = read(tmp_path, suffixes=(f"{ending}{packing}",))
    assert not bad
    assert texts(documents) == expected
    assert documents[0].meta == meta
    assert {document.source for document in documents} == {f"x{ending}{packing}"}
