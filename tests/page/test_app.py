"""The page's routes: who may see them, what they hand out, and what they say when the store is in trouble."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import httpx
import pytest
from botocore.config import Config
from fastapi import Depends, FastAPI, HTTPException
from moto import mock_aws

from include.capacity.errors import ConfigError
from include.capacity.page.app import create_app
from include.capacity.page.source import fleet_store
from include.capacity.publish.publish import publish_run
from include.capacity.results.store import FolderStore, S3Store, Store
from tests.page.made import FELL, FIGURE, ROUTES, publish_nights
from tests.publish.made import limit_entry, small_sweep

NOW = datetime.now(UTC).replace(microsecond=0)
LAST = NOW - timedelta(hours=3)
MOUNTED = "/airflow/capacity"


def get(opener: Callable[[], Store], path: str, login: Any = None, **how: Any) -> httpx.Response:
    """One request to the page, as Airflow below a prefix would pass it on."""
    return asyncio.run(_get(create_app(opener, [] if login is None else [Depends(login)]), path, **how))


async def _get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    airflow = FastAPI()
    airflow.mount(MOUNTED, app)
    transport = httpx.ASGITransport(airflow, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://airflow.test") as client:
        return await client.get(MOUNTED + path, headers=headers)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> FolderStore:
    made = tmp_path_factory.mktemp("made")
    target = FolderStore(made / "published")
    publish_nights(target, FolderStore(made / "work"), LAST)
    return target


@pytest.fixture
def folder(published: FolderStore, tmp_path: Path) -> FolderStore:
    shutil.copytree(published.root, tmp_path / "published")
    return FolderStore(tmp_path / "published")


@pytest.fixture
def bucket(published: FolderStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        client = boto3.client("s3", config=Config(signature_version="s3v4"))
        client.create_bucket(Bucket="capacity")
        store = S3Store("capacity", "demo", lambda: client)
        for key in published.keys(""):
            if "night-2" in key or not key.startswith("runs/"):
                store.write(key, published.read(key))
        yield store


def refuse() -> None:
    raise HTTPException(401, "Not authenticated")


def test_no_route_answers_without_a_login(folder: FolderStore) -> None:
    app = create_app(lambda: folder, [Depends(refuse)])
    templates = {route.path for route in app.routes}  # type: ignore[attr-defined] # all are plain routes
    assert len(templates) == len(ROUTES)
    for path in ROUTES:
        answer = get(lambda: folder, path, refuse)
        assert answer.status_code == 401, path
        assert "Log in to Airflow again" in answer.text
        assert "llama" not in answer.text
        assert get(lambda: folder, path).status_code in (200, 302), path
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert get(lambda: folder, path).status_code == 404


def test_a_window_without_a_login_is_sent_to_it_and_back(folder: FolderStore) -> None:
    answer = get(lambda: folder, "/limits", refuse, **{"sec-fetch-dest": "document"})
    assert answer.status_code == 302
    assert answer.headers["location"] == "/airflow/api/v2/auth/login?next=%2Fairflow%2Fcapacity%2Flimits"


def test_the_shell_asks_nobody(tmp_path: Path) -> None:
    def never() -> Store:
        raise AssertionError("the store was opened")

    answer = get(never, "/")
    assert answer.status_code == 200
    assert "Reading the published limits" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_limits_and_their_news(folder: FolderStore) -> None:
    answer = get(lambda: folder, "/limits")
    assert answer.status_code == 200
    page = " ".join(answer.text.split())
    for said in (
        "2 current limits of 2 models",
        "1 fell",
        "1 without a current limit",
        "40 held, 44 did not",
        "Fell from 64 to 40, with vllm 0.32 -&gt; 0.33.",
        "Last 3 comparable runs: lowest 40, highest 64; newest last: 64, 64, 40",
        "no passing step",
        "its server did not start",
        "valid until",
        "2 of these limits are of simulated servers",
        f'href="{MOUNTED}/view/runs/night-2/1/llama/report.html"',
        f'href="{MOUNTED}/runs/night-2/1/"',
        f'src="{MOUNTED}/runs/night-2/1/llama/figures/interactive-latency.svg"',
    ):
        assert said in page, said


def nights(tmp_path: Path, *found: tuple[int | None, str | None]) -> str:
    """The page after nights with these limits (None: no step passed) and verdicts."""
    target, work = FolderStore(tmp_path / "published"), FolderStore(tmp_path / "work")
    for at, (limit, verdict) in enumerate(found):
        when = LAST - timedelta(days=len(found) - at)
        change = verdict and {**FELL, "verdict": verdict, "sentence": f"Night {at}: {verdict}."}
        more: dict[str, Any] = {"change": change}
        if limit is None:
            more |= {"status": "no_passing_step", "bracket": [None, 4]}
        entry = limit_entry("llama", "interactive", limit, **more)
        sweep = small_sweep(work, "llama", [entry], created_at=when.isoformat(), simulated=False)
        publish_run(target, f"night-{at}", {"llama": sweep}, promote=True, now=when)
    return " ".join(get(lambda: target, "/limits").text.split())


@pytest.mark.parametrize(
    ("verdicts", "mark"),
    [
        (["first", "may_have_fallen"], "may have fallen"),
        (["first", "may_have_fallen", None], "may have fallen"),  # a night that says nothing decides nothing
        (["first", "may_have_fallen", "same"], None),
        (["first", "may_have_fallen", "fell", "same"], "fell"),
        (["first", "fell", "may_have_risen", "same"], "fell"),
    ],
)
def test_what_may_have_changed_is_news_until_the_next_run(
    tmp_path: Path, verdicts: list[str | None], mark: str | None
) -> None:
    page = nights(tmp_path, *((40, verdict) for verdict in verdicts))
    shown = {words for words in ("fell", "may have fallen", "may have risen") if f">{words}</span>" in page}
    assert shown == ({mark} if mark else set())


def test_a_night_in_which_nothing_passed_is_in_the_trend(tmp_path: Path) -> None:
    page = nights(tmp_path, (64, "first"), (None, "fell"), (60, "rose"))
    assert (
        "Last 3 comparable runs: lowest no passing step, highest 64; newest last: 64, no passing step, 60"
        in page
    )


def test_an_old_limit_is_stale(tmp_path: Path) -> None:
    target = FolderStore(tmp_path / "published")
    publish_nights(target, FolderStore(tmp_path / "work"), NOW - timedelta(days=5))
    page = get(lambda: target, "/limits").text
    assert page.count(">stale</span>") == 2
    assert "stale since" in page
    assert "valid until" not in page


def test_names_of_models_are_text(tmp_path: Path) -> None:
    target = FolderStore(tmp_path / "published")
    publish_nights(target, FolderStore(tmp_path / "work"), LAST, evil="<script>alert(1)</script>/../x")
    page = get(lambda: target, "/limits").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;/../x" in page
    report = page[page.index("view/runs/night-2/1/~3c~script") :].partition('"')[0]
    assert "/.." not in report
    assert get(lambda: target, f"/{report}").status_code == 200


# -- nothing yet, and trouble


def test_nothing_published_yet(tmp_path: Path) -> None:
    answer = get(lambda: FolderStore(tmp_path / "nothing"), "/limits")
    assert answer.status_code == 200
    assert "Nothing has been published yet" in answer.text
    assert "capacity_nightly" in answer.text


def test_runs_but_none_promoted(folder: FolderStore) -> None:
    folder.path("latest/limits.json").unlink()
    answer = get(lambda: folder, "/limits")
    assert answer.status_code == 200
    assert "none of them was promoted" in answer.text
    assert "no current limit" in answer.text
    assert "night-2" in answer.text


def test_broken_latest_is_an_error_that_names_it(folder: FolderStore) -> None:
    folder.write("latest/limits.json", b"{broken")
    answer = get(lambda: folder, "/limits")
    assert answer.status_code == 502
    assert "latest/limits.json: not JSON" in answer.text
    assert 'role="alert"' in answer.text


@pytest.mark.parametrize("data", [b"{broken", b"[]", b'{"run_id": "x"}', b'{"published_at": 1, "run_id": 2}'])
def test_broken_history_leaves_the_limits(folder: FolderStore, data: bytes) -> None:
    folder.write("history/zzz.json", data)
    answer = get(lambda: folder, "/limits")
    assert answer.status_code == 200
    assert "The history cannot be read" in answer.text
    assert "40 held, 44 did not" in answer.text


def test_missing_manifest_leaves_the_limits(folder: FolderStore) -> None:
    folder.path("runs/night-2/1/manifest.json").unlink()
    answer = get(lambda: folder, "/limits")
    assert answer.status_code == 200
    assert "The files of a run are missing" in answer.text


def s3_at(url: str, **about: Any) -> S3Store:
    config = Config(connect_timeout=5, read_timeout=5, retries={"total_max_attempts": 1})
    keys = {"aws_access_key_id": "id", "aws_secret_access_key": "key", **about}
    return S3Store(
        "nobodys",
        "demo",
        lambda: boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=config, **keys),
    )


def test_s3_is_down() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        answer = get(lambda: s3_at(f"http://127.0.0.1:{taken.getsockname()[1]}"), "/limits")
    assert answer.status_code == 502
    assert "cannot be reached" in answer.text
    assert "publish.connection" in answer.text


def test_bucket_is_missing(bucket: S3Store) -> None:
    answer = get(lambda: S3Store("nobodys", "demo", lambda: bucket.client), "/limits")
    assert answer.status_code == 502
    assert "the bucket does not exist" in answer.text


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    none = {"aws_access_key_id": None, "aws_secret_access_key": None}
    answer = get(lambda: s3_at("http://127.0.0.1:9", **none), "/limits")
    assert answer.status_code == 502
    assert "no credentials for the object store" in answer.text


def test_a_wrong_fleet_file_is_said() -> None:
    def wrong() -> Store:
        raise ConfigError("fleet.yaml: publish: to: expected s3://bucket/prefix")

    answer = get(wrong, "/limits")
    assert answer.status_code == 500
    assert "fleet.yaml: publish: to" in answer.text


class StuckStore(FolderStore):
    """Answers when it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.let_go = threading.Event(), threading.Event()

    def read_version(self, key: str) -> Any:
        self.asked.set()
        assert self.let_go.wait(60)
        return super().read_version(key)


def test_a_store_that_does_not_answer_is_said(tmp_path: Path) -> None:
    store = StuckStore(tmp_path)
    try:
        answer = asyncio.run(_get(create_app(lambda: store, [], budget_s=0.05), "/limits"))
    finally:
        store.let_go.set()
    assert answer.status_code == 504
    assert "The object store does not answer" in answer.text


def test_a_slow_store_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    store = StuckStore(tmp_path)
    app = create_app(lambda: store, [], budget_s=60)

    async def both() -> tuple[int, int]:
        slow = asyncio.create_task(_get(app, "/limits"))
        await asyncio.to_thread(store.asked.wait, 60)
        shell = await _get(app, "/")
        assert not slow.done()
        store.let_go.set()
        return shell.status_code, (await slow).status_code

    assert asyncio.run(both()) == (200, 200)


# -- files


def test_a_file_on_s3_is_signed_when_asked_for(bucket: S3Store) -> None:
    answer = get(lambda: bucket, "/runs/night-2/1/llama/requests.parquet")
    assert answer.status_code == 302
    signed = urlsplit(answer.headers["location"])
    assert signed.path.endswith("/demo/runs/night-2/1/llama/requests.parquet")
    assert parse_qs(signed.query)["X-Amz-Expires"] == ["300"]
    assert "response-content-disposition" not in signed.query
    kept = get(lambda: bucket, "/runs/night-2/1/llama/requests.parquet?save=1").headers["location"]
    asked = parse_qs(urlsplit(kept).query)["response-content-disposition"]
    assert asked == ['attachment; filename="requests.parquet"']


def test_a_report_is_passed_through_without_rights(bucket: S3Store, folder: FolderStore) -> None:
    for store in (bucket, folder):
        for path in ("/runs/night-2/1/llama/report.html", "/latest/report.html"):
            answer = get(lambda store=store: store, path)  # type: ignore[misc] # bound now
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("sandbox ")
            assert "allow-scripts" not in policy
            assert "default-src 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-type"] == "text/html; charset=utf-8"


def test_a_file_in_a_folder_is_passed_through_without_rights(folder: FolderStore) -> None:
    answer = get(lambda: folder, "/runs/night-2/1/llama/figures/interactive-latency.svg")
    assert (answer.status_code, answer.text) == (200, FIGURE)
    assert answer.headers["content-type"].startswith("image/svg+xml")
    assert answer.headers["content-security-policy"].startswith("sandbox ")


@pytest.mark.parametrize(
    "path",
    [
        "/runs/night-2/1/secret.txt",  # there, but the manifest does not list it
        "/runs/night-2/1/manifest.json",
        "/runs/night-2/1/%2e%2e/%2e%2e/%2e%2e/latest/limits.json",
        "/runs/night-2/1/%2e%2e/%2e%2e/%2e%2e/outside.txt",
        "/runs/night-2/1/llama/..%2f..%2fsecret.txt",
        "/runs/%2e%2e/1/",
        "/runs/..%2flatest/1/limits.json",
        "/runs/night-2/9/",
        "/runs/night-2/x/",
        "/runs/Night 2/1/",
        "/latest/secret.txt",
        "/latest/..%2f..%2foutside.txt",
        "/view/runs/night-2/1/llama/steps.csv",
        "/view/runs/night-2/1/%2e%2e/%2e%2e/%2e%2e/%2e%2e/outside.html",
        "/newest/night-7",
        "/newest/..%2fruns",
        "/newest/night-2/nobody",
    ],
)
def test_only_listed_files_are_handed_out(folder: FolderStore, path: str) -> None:
    folder.write("runs/night-2/1/secret.txt", b"top secret")
    folder.write("latest/secret.txt", b"top secret")
    (folder.root.parent / "outside.txt").write_text("top secret")
    (folder.root.parent / "outside.html").write_text("top secret")
    answer = get(lambda: folder, path)
    assert answer.status_code == 404, answer.text
    assert "top secret" not in answer.text


def test_a_manifest_of_another_run_gives_nothing(folder: FolderStore) -> None:
    folder.write("runs/planted/1/manifest.json", folder.read("runs/night-2/1/manifest.json"))
    folder.write("runs/planted/1/report.html", b"planted")
    answer = get(lambda: folder, "/runs/planted/1/report.html")
    assert answer.status_code == 502
    assert "manifest of another run" in answer.text


def test_the_newest_complete_attempt_is_found(folder: FolderStore) -> None:
    folder.write("runs/night-2/2/report.html", b"half way")
    answer = get(lambda: folder, "/newest/night-2/llama")
    assert answer.status_code == 302
    assert answer.headers["location"] == f"{MOUNTED}/view/runs/night-2/1/llama/report.html"


def test_the_files_of_a_run(folder: FolderStore) -> None:
    page = get(lambda: folder, "/runs/night-2/1/").text
    assert f'href="{MOUNTED}/view/runs/night-2/1/llama/report.html"' in page
    assert f'href="{MOUNTED}/runs/night-2/1/llama/requests.parquet?save=1"' in page
    assert "One row per request" in page


# -- where it reads


def test_the_fleets_store_is_opened_again_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Path("include/config/fleet.yaml").read_text()
    file = tmp_path / "fleet.yaml"
    monkeypatch.setenv("CAPACITY_FLEET", str(file))
    clock = [0.0]
    opener = fleet_store(lambda: clock[0])
    file.write_text(fleet.replace("s3://capacity/demo", "file:///tmp/first"))
    assert opener().url == "file:///tmp/first"
    file.write_text(fleet.replace("s3://capacity/demo", "file:///tmp/second"))
    clock[0] = 59.0
    assert opener().url == "file:///tmp/first"
    clock[0] = 61.0
    assert opener().url == "file:///tmp/second"
