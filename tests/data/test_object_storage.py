"""data.tokens in a bucket of S3: training from it and writing to it, and what goes wrong."""

from __future__ import annotations

import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import yaml
from s3fs import S3FileSystem

from pipeline.common.errors import UserError
from pipeline.data.load import retries, stage_in
from pipeline.data.load.retries import UnreadableFile
from tests import warm
from tests.data import bucket
from tests.data.bucket import Server
from tests.data.library import here
from tests.helpers import environment, pipeline
from tests.training import one_rank
from tests.world import configured


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with bucket.serving() as server:
        yield server


@pytest.fixture
def s3(server: Server) -> Iterator[Server]:
    """The server without what a test before has left."""
    fsspec.filesystem("s3").clear_instance_cache()
    server.requests.clear()
    server.failing = lambda *_: False
    yield server
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture
def url(s3: Server, tokens: Path, request: pytest.FixtureRequest) -> str:
    """The token shards, in a folder of this test."""
    assert s3
    return bucket.fill(tokens, f"s3://bucket/{request.node.name}")


def data(url: str, folder: object):
    return configured("stage=pretrain", f"data.tokens={url}", f"data.stage_in={folder}").data


def test_training_from_a_bucket_is_training_from_a_folder(s3: Server, url: str, tokens: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    common = ("training.steps=3", "training.validate_every=3")
    one_rank.run("pretrain", tmp_path / "folder", f"data.tokens={tokens}", *common)
    one_rank.run("pretrain", tmp_path / "bucket", f"data.tokens={url}", f"data.stage_in={local}", *common)
    folder, remote = (one_rank.lines(tmp_path / name) for name in ("folder", "bucket"))
    assert [line["loss"] for line in remote.values()] == [line["loss"] for line in folder.values()]
    before, after = (yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("folder", "bucket"))
    assert after["data"]["tokens"] == url
    assert after["tokenizer"] == before["tokenizer"], "that of the shards"
    # the run goes on with the folder, and is evaluated with the validation split of the bucket alone
    one_rank.run("pretrain", tmp_path / "bucket", f"data.tokens={tokens}", "training.steps=4")
    (tmp_path / "other").mkdir()
    s3.requests.clear()
    scores = [
        one_rank.run("evaluate", tmp_path / "bucket", *words) and (tmp_path / "bucket/evaluation.json").read_text()
        for words in ([f"data.tokens={tokens}"], [f"data.tokens={url}", f"data.stage_in={tmp_path}/other"])
    ]
    assert scores[0] == scores[1]
    assert s3.gets("validation-00000.tar") == 1
    assert s3.gets("train-00000.tar") == 0


def test_ranks_of_a_node_fetch_every_shard_once(s3: Server, url: str, tokens: Path, tmp_path: Path) -> None:
    own, found = data(url, tmp_path), []
    threads = [threading.Thread(target=lambda: found.append(stage_in.staged(own).tokens)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert {path.name: path.read_bytes() for path in Path(found[0]).iterdir()} == {
        path.name: path.read_bytes() for path in tokens.iterdir()
    }
    assert all(s3.gets(path.name) == 1 for path in tokens.glob("*.tar"))
    assert s3.gets("/manifest.json") == 2


def refused(*words: object) -> str:
    """The message with which training ends before it begins."""
    with pytest.raises(UserError) as error:
        one_rank.run("pretrain", Path("unused"), *words)
    assert len(error.value.violations) == 1
    return str(error.value)


def test_what_is_wrong_is_said_before_work_starts(s3: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = f"data.stage_in={tmp_path}"
    assert f"data.tokens={url}: is a URL, whose shards are read from a copy" in refused(f"data.tokens={url}")
    assert "set data.stage_in to a folder on each node" in refused(f"data.blend={{a: {{tokens: '{url}'}}}}")
    assert "cannot be accessed: The specified bucket does not exist" in refused("data.tokens=s3://buckte/tokens", local)
    assert f"data.tokens={url}x: contains no complete output of stage=tokenize" in refused(f"data.tokens={url}x", local)
    assert "cannot be opened: Protocol not known: s4" in refused("data.tokens=s4://bucket/tokens", local)
    assert "cannot be opened: Please install gcsfs" in refused("data.tokens=gs://bucket/tokens", local)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(1000))
    assert refused(f"data.tokens={url}", local).endswith("fix: name a folder with more space")
    assert not s3.gets(".tar")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    fsspec.filesystem("s3").clear_instance_cache()
    assert "cannot be accessed: Forbidden" in refused(f"data.tokens={url}", local)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    fsspec.filesystem("s3").clear_instance_cache()
    assert "cannot be accessed: Unable to locate credentials\n    fix: correct data.tokens, or the cred" in refused(
        f"data.tokens={url}", local
    )


def test_missing_and_cut_objects_are_named_together(s3: Server, url: str, tmp_path: Path) -> None:
    system = fsspec.filesystem("s3")
    system.rm(f"{url}/train-00000.tar")
    system.pipe_file(f"{url}/validation-00000.tar", system.cat_file(f"{url}/validation-00000.tar")[:-1])
    s3.requests.clear()
    with pytest.raises(UserError) as error:
        stage_in.staged(data(url, tmp_path))
    missing, cut = error.value.violations
    assert (str(missing.value), missing.rule) == (f"{url}/train-00000.tar", "is missing")
    assert str(cut.value) == f"{url}/validation-00000.tar"
    assert cut.rule.startswith("is truncated or overwritten")
    assert not s3.gets(".tar")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_server_that_fails_for_a_moment_is_asked_again(
    s3: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(S3FileSystem, "retries", 1)  # its own attempts take seconds
    monkeypatch.setattr(retries, "WAITS", (0.01,) * 3)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    failures = {"/manifest.json": 1, "train-00000.tar": 2}

    def failing(_: str, path: str) -> bool:
        name = next((name for name in failures if path.endswith(name)), "")
        failures[name] = failures.get(name, 0) - 1
        return failures[name] >= 0

    s3.failing = failing
    copy = Path(stage_in.staged(data(url, tmp_path)).tokens)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == bucket.content(url)
    assert sorted(failures.values())[-2:] < [0, 0]
    assert f"{url}/train-00000.tar: can be read again" in caplog.text


def test_a_damaged_download_is_not_used_and_what_is_whole_is_kept(
    s3: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "WAITS", (0.01,))
    system, name = fsspec.filesystem("s3"), "train-00000.tar"
    whole = system.cat_file(f"{url}/{name}")
    system.pipe_file(f"{url}/{name}", whole[:-1] + b"x")
    s3.requests.clear()
    with pytest.raises(UnreadableFile, match=f"data.tokens={url}/{name}: cannot be read: its checksum is not that of the manifest"):
        stage_in.staged(data(url, tmp_path))
    assert s3.gets(name) == 2
    system.pipe_file(f"{url}/{name}", whole)
    s3.requests.clear()
    copy = Path(stage_in.staged(data(url, tmp_path)).tokens)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == bucket.content(url)
    assert s3.gets(name) == 2, "once for the copy, and once for this test"
    others = [path.name for path in copy.glob("*.tar") if path.name != name]
    assert others
    assert all(s3.gets(other) == 1 for other in others), "by this test alone"


def test_a_killed_tokenize_continues_and_other_settings_are_refused(
    s3: Server, shards: Path, tokenizer: Path, tokens: Path, tmp_path: Path
) -> None:
    url = "s3://bucket/written"
    words = ("stage=tokenize", f"data.shards={shards}", f"tokenizer.path={tokenizer}", f"data.tokens={url}")
    names = sorted(path.name for path in tokens.glob("*.tar"))
    last, killed = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> bool:
        if method == "PUT" and path.endswith(names[-1]):
            last.set()
            return killed.wait()
        return False

    s3.failing = hold
    with (tmp_path / "log").open("wb") as log:
        process = warm.start("-m", "pipeline", *words, environment=environment(), output=log.fileno())
        assert last.wait(120), (tmp_path / "log").read_text()
        process.kill()
    s3.failing = lambda *_: False
    killed.set()
    assert "manifest.json" not in bucket.content(url)
    other = "data.select=\"id != 'x'\""
    assert "holds an unfinished run with data.select=None" in here(*words, other, expect=2)
    s3.requests.clear()
    pipeline(*words, ranks=2)
    assert [path for method, path in s3.requests if method == "PUT" and path.endswith(".tar")] == [f"/bucket/written/{names[-1]}"]
    assert bucket.content(url) == {path.name: path.read_bytes() for path in tokens.iterdir()}, "and no record"
    assert "is complete, nothing to do" in here(*words)
    assert f"{url} was created with data.select=None" in here(*words, other, expect=2)


def test_what_tokenize_may_not_write_is_said_before_work_starts(
    s3: Server, url: str, shards: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("stage=tokenize", f"data.shards={shards}", f"tokenizer.path={tokenizer}")
    fsspec.filesystem("s3").rm(f"{url}/manifest.json")
    s3.requests.clear()
    assert "contains files of another run or program: train-00000.tar" in here(*words, f"data.tokens={url}", expect=2)
    assert "The specified bucket does not exist" in here(*words, "data.tokens=s3://buckte/tokens", expect=2)
    assert "settings.json: cannot be written" in here(*words, f"data.tokens=file://{shards}/none/tokens", expect=2)
    assert "is a URL, and stage=tokenize needs a folder" in here(*words, f"data.shards={url}", expect=2)
    assert "is a URL, and stage=convert_tokens needs a folder" in here("stage=convert_tokens", f"data.tokens={url}", expect=2)
    assert f"run_dir={url}: is a URL, and must be a folder" in here("stage=pretrain", f"run_dir={url}", expect=2)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    fsspec.filesystem("s3").clear_instance_cache()
    assert "cannot be accessed: Forbidden" in here(*words, f"data.tokens={url}", expect=2)
    assert not [request for request in s3.requests if request[0] == "PUT"]
