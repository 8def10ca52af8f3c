"""Publishing over the S3 protocol, against servers that really listen, and every way it is refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer

from include.capacity.errors import ConfigError, PublishError, WriteConflict
from include.capacity.publish.publish import publish_run, read_latest, verify_manifest
from include.capacity.results.patient import PatientStore
from include.capacity.results.store import MULTIPART_FROM_BYTES, FolderStore, S3Store, open_store
from include.capacity.results.sweepdir import SweepDir
from scripts.local_stack import free_port
from tests import running
from tests.publish.made import limit_entry, small_sweep

MakeClient = Callable[[], Any]


def client_for(endpoint: str, key: str = running.ACCESS_KEY, secret: str = running.SECRET_KEY) -> MakeClient:
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path"},
        connect_timeout=5,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 2},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return lambda: boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="us-east-1",
        config=config,
    )


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client_for(endpoint)().create_bucket(Bucket="capacity")
    yield endpoint
    server.stop()


@pytest.fixture(scope="module")
def nanio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running.nanio(tmp_path_factory.mktemp("nanio")) as endpoint:
        yield endpoint


def small(tmp_path: Path) -> tuple[dict[str, SweepDir], SweepDir]:
    source = FolderStore(tmp_path / "source")
    sweep = small_sweep(source, "steady", [limit_entry("steady", "interactive", 24)])
    page = SweepDir(source, "fleet")
    page.write("report.html", "<html>fleet</html>")
    page.write("report.md", "# fleet")
    return {"steady": sweep}, page


@pytest.mark.parametrize("server", ["moto", "nanio"])
def test_a_run_over_s3(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    make = client_for(request.getfixturevalue(server))
    store = open_store("s3://capacity/demo/prefix", make)
    sweeps, page = small(tmp_path)

    done = publish_run(store, f"run {server}", sweeps, page, promote=True)

    assert done["url"] == f"s3://capacity/demo/prefix/{done['prefix']}"
    assert len(verify_manifest(store, done["prefix"])["files"]) == done["files"] == 20
    assert (read_latest(store) or {})["limits"][0]["limit"] == 24
    seen = make().list_objects_v2(Bucket="capacity", Prefix="demo/prefix/latest/")
    assert [item["Key"] for item in seen["Contents"]] == [
        "demo/prefix/latest/limits.json",
        "demo/prefix/latest/report.html",
        "demo/prefix/latest/report.md",
    ]
    again = publish_run(store, f"run {server}", sweeps, page, promote=True)
    assert again["attempt"] == 2


@pytest.mark.parametrize("server", ["moto", "nanio"])
def test_content_types(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    make = client_for(request.getfixturevalue(server))
    store = open_store("s3://capacity/types", make)
    sweeps, page = small(tmp_path)
    prefix = publish_run(store, "r1", sweeps, page, promote=True)["prefix"]
    client = make()

    def type_of(key: str) -> str:
        return str(client.head_object(Bucket="capacity", Key=f"types/{key}")["ContentType"])

    assert type_of("latest/report.html") == "text/html; charset=utf-8"
    assert type_of("latest/report.md") == "text/markdown; charset=utf-8"
    assert type_of("latest/limits.json") == "application/json"
    assert type_of(f"{prefix}/steady/steps.csv") == "text/csv; charset=utf-8"
    assert type_of(f"{prefix}/steady/figures/interactive-latency.svg") == "image/svg+xml"
    assert type_of(f"{prefix}/steady/figures/interactive-latency.png") == "image/png"
    assert type_of(f"{prefix}/steady/requests.parquet") == "application/vnd.apache.parquet"


@pytest.mark.parametrize(("kind", "gone"), [("s3", "removed"), ("file", "changed")])
def test_an_object_that_somebody_else_changed_is_not_replaced(
    kind: str, gone: str, moto: str, tmp_path: Path
) -> None:
    url = {"s3": "s3://capacity/conditions", "file": (tmp_path / "conditions").as_uri()}[kind]
    store = open_store(url, client_for(moto))
    store.write_if("latest/x.json", b"1", None)
    with pytest.raises(WriteConflict, match=r"conditions/latest/x\.json: changed by another run since"):
        store.write_if("latest/x.json", b"2", None)
    _, version = store.read_version("latest/x.json")
    store.write_if("latest/x.json", b"2", version)
    with pytest.raises(WriteConflict):
        store.write_if("latest/x.json", b"3", version)
    assert store.conditional("latest/x.json") is True
    assert store.read("latest/x.json") == b"2"
    assert store.keys() == ["latest/x.json"]
    store.delete("latest/x.json")
    store.delete("latest/x.json")
    with pytest.raises(WriteConflict, match=f"{gone} by another run"):
        store.write_if("latest/x.json", b"3", version)
    assert not store.exists("latest/x.json")


def test_a_store_that_ignores_conditions_is_told_from_one_that_keeps_them(
    nanio: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store("s3://capacity/ignores", client_for(nanio))
    sweeps, page = small(tmp_path)
    assert publish_run(store, "r1", sweeps, page, promote=True)["conditional"] is False
    assert "ignores conditional writes: of two runs that publish at the same moment" in caplog.text
    verify_manifest(store, "runs/r1/1")


def test_large_bodies_go_up_in_parts(moto: str) -> None:
    make = client_for(moto)
    store = open_store("s3://capacity/big", make)
    body = bytes(range(256)) * (MULTIPART_FROM_BYTES // 256 + 1)

    store.write("rows.parquet", body)

    head = make().head_object(Bucket="capacity", Key="big/rows.parquet")
    assert head["ContentLength"] == len(body)
    assert head["ETag"].strip('"').endswith("-3")  # 8 MiB parts
    assert head["ContentType"] == "application/vnd.apache.parquet"
    assert store.read("rows.parquet") == body


def test_server_side_encryption_is_asked_for(moto: str) -> None:
    make = client_for(moto)
    open_store("s3://capacity/enc?sse=AES256", make).write("a.json", b"{}")
    open_store("s3://capacity/enc?sse=aws:kms&sse_kms_key_id=k1", make).write("b.json", b"{}")
    client = make()
    assert client.head_object(Bucket="capacity", Key="enc/a.json")["ServerSideEncryption"] == "AES256"
    head = client.head_object(Bucket="capacity", Key="enc/b.json")
    assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", "k1")


@pytest.mark.parametrize("url", ["s3://b/p?sse=rot13", "s3://b/p?sess=AES256", "s3:///p", "ftp://b/p"])
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        open_store(url)


def test_missing_bucket(moto: str, tmp_path: Path) -> None:
    sweeps, page = small(tmp_path)
    store = open_store("s3://no-such-bucket/demo", client_for(moto))
    with pytest.raises(PublishError, match=r"s3://no-such-bucket/demo/.*bucket does not exist; create it"):
        publish_run(store, "r1", sweeps, page, promote=True)


def test_refused_credentials(nanio: str, tmp_path: Path) -> None:
    sweeps, page = small(tmp_path)
    store = open_store("s3://capacity/refused", client_for(nanio, secret="wrong-secret"))
    with pytest.raises(PublishError, match=r"s3://capacity/refused/.*refused the credentials .*key"):
        publish_run(store, "r1", sweeps, page, promote=True)


def test_refused_credentials_do_not_look_like_a_missing_object(nanio: str) -> None:
    store = open_store("s3://capacity/refused", client_for(nanio, secret="wrong-secret"))
    with pytest.raises(PublishError, match="refused the credentials"):
        store.exists("latest/limits.json")


def test_unreachable(tmp_path: Path) -> None:
    sweeps, page = small(tmp_path)
    store = open_store("s3://capacity/demo", client_for(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(PublishError, match=r"s3://capacity/demo/.*cannot be reached: .*check its address"):
        publish_run(store, "r1", sweeps, page, promote=True)


def test_a_store_that_comes_back_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    back = ThreadedMotoServer(ip_address="127.0.0.1", port=port)

    class BringBack(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "trying again for" in record.getMessage() and back._server is None:
                back.start()
                client_for(f"http://127.0.0.1:{port}")().create_bucket(Bucket="capacity")

    handler = BringBack()
    logging.getLogger("include.capacity.results.patient").addHandler(handler)
    try:
        store = PatientStore(open_store("s3://capacity/back", client_for(f"http://127.0.0.1:{port}")), 60)
        store.write("a.json", b"{}")
        assert store.read("a.json") == b"{}"
        assert "s3://capacity/back/a.json: the object store cannot be reached" in caplog.text
    finally:
        logging.getLogger("include.capacity.results.patient").removeHandler(handler)
        back.stop()


def test_what_patience_cannot_change_is_told_at_once(nanio: str) -> None:
    refused = PatientStore(open_store("s3://capacity/x", client_for(nanio, secret="wrong-secret")), 600)
    with pytest.raises(PublishError, match="refused the credentials"):
        refused.write("a.json", b"{}")
    missing = PatientStore(open_store("s3://nowhere/x", client_for(nanio)), 600)
    with pytest.raises(PublishError, match="the bucket does not exist"):
        missing.write("a.json", b"{}")
    with pytest.raises(FileNotFoundError):
        PatientStore(open_store("s3://capacity/x", client_for(nanio)), 600).read("none.json")


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with pytest.raises(PublishError, match=r"s3://capacity/demo/x: no credentials .* AWS_ACCESS_KEY_ID"):
        open_store("s3://capacity/demo").read("x")


def test_default_client_speaks_to_an_endpoint_of_its_own(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-key-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    store = open_store("s3://capacity/default")
    assert isinstance(store, S3Store)
    store.write("a/b.json", b"{}")
    assert store.keys("a/") == ["a/b.json"]
    assert store.exists("a/b.json")
    assert not store.exists("a/c.json")
    with pytest.raises(FileNotFoundError):
        store.read("a/c.json")
    config = store.client.meta.config
    assert (config.retries["mode"], config.retries["total_max_attempts"]) == ("standard", 5)
    assert config.s3["addressing_style"] == "path"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PublishError, match=r"file/a\.json: cannot be written: "):
        FolderStore(tmp_path / "file").write("a.json", b"{}")
