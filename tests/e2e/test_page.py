"""The Capacity page in a real Airflow, behind its login, with a browser; and results imported by the form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, FrameLocator, Page, Route, expect

from include.capacity.results.store import FolderStore, S3Store
from scripts.local_stack import LocalStack
from tests.e2e.pages import finished, objects, open_page
from tests.importers.made import TIDY
from tests.page.made import ROUTES, publish_nights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bucket(stack: LocalStack) -> Iterator[S3Store]:
    """Where the fleet publishes: empty at first, and again at the end."""
    store = S3Store(stack.bucket, "demo", stack.s3)
    yield store
    for key in store.keys(""):
        store.delete(key)


@pytest.fixture
def published(bucket: S3Store, tmp_path: Path) -> S3Store:
    """Three nights in the bucket, made once."""
    if not bucket.exists("latest/limits.json"):
        last = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=3)
        made = FolderStore(tmp_path / "made")
        publish_nights(made, FolderStore(tmp_path / "work"), last)
        for key in made.keys(""):
            bucket.write(key, made.read(key))
    return bucket


def framed(page: Page) -> FrameLocator:
    """The page inside Airflow's frame."""
    return page.frame_locator("iframe[title=Capacity]")


def test_empty_broken_and_mended(
    stack: LocalStack, bucket: S3Store, browser: Browser, screenshots: Path
) -> None:
    page = open_page(browser, f"{stack.airflow_url}/capacity/", stack)
    expect(page.get_by_role("heading", name="Nothing has been published yet")).to_be_visible()
    page.screenshot(path=screenshots / "page-empty.png")
    bucket.write("latest/limits.json", b"{broken")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("latest/limits.json: not JSON")
    page.screenshot(path=screenshots / "page-error.png")
    bucket.delete("latest/limits.json")
    page.reload()
    expect(page.get_by_role("heading", name="Nothing has been published yet")).to_be_visible()
    page.context.close()


def test_every_route_is_behind_the_login(stack: LocalStack, published: S3Store) -> None:
    for path in ROUTES:
        url = f"{stack.airflow_url}/capacity{path}"
        assert httpx.get(url, trust_env=False).status_code == 401, path
        window = httpx.get(url, headers={"sec-fetch-dest": "document"}, trust_env=False)
        assert (window.status_code, window.headers["location"].partition("?")[0]) == (
            302,
            "/api/v2/auth/login",
        ), path
        wrong = httpx.get(url, headers={"authorization": "Bearer wrong"}, trust_env=False)
        assert wrong.status_code in (401, 403), path
        assert "llama" not in wrong.text
        stale = httpx.get(url, cookies={"_token": stack.token()[:-3] + "abc"}, trust_env=False)
        assert stale.status_code in (401, 403), path
        right = httpx.get(url, headers={"authorization": f"Bearer {stack.token()}"}, trust_env=False)
        assert right.status_code in (200, 302), path


def test_login_leads_back_to_the_page(stack: LocalStack, published: S3Store, browser: Browser) -> None:
    page = open_page(browser, f"{stack.airflow_url}/capacity/")
    page.locator("input[name=username]").fill(stack.user)
    page.locator("input[name=password]").fill(stack.password or "")
    page.locator("button[type=submit]").click()
    expect(page.get_by_role("table", name="How many requests")).to_be_visible()
    assert page.url == f"{stack.airflow_url}/capacity/"
    page.context.close()


def test_limits_in_airflows_frame(
    stack: LocalStack, published: S3Store, browser: Browser, screenshots: Path
) -> None:
    page = open_page(browser, f"{stack.airflow_url}/", stack, color_scheme="light")
    held: list[Route] = []
    page.route("**/capacity/limits", lambda route: held.append(route))
    page.get_by_role("link", name="Capacity").click()
    frame = framed(page)
    expect(frame.get_by_role("status")).to_have_text("Reading the published limits …")
    page.screenshot(path=screenshots / "page-loading.png")
    while not held:
        page.wait_for_timeout(50)
    held[0].continue_()
    page.unroute("**/capacity/limits")

    limits = frame.get_by_role("table", name="How many requests")
    expect(limits.get_by_role("rowheader")).to_have_text(
        ["coder batch simulated", "coder interactive simulatedorg/coder", "llama interactiveorg/llama"]
    )
    expect(limits.get_by_role("columnheader")).to_have_count(8)
    expect(limits.get_by_role("img", name="newest last: 64, 64, 40")).to_be_visible()
    expect(limits).to_contain_text("Fell from 64 to 40, with vllm 0.32 -> 0.33.")
    expect(limits).to_contain_text("its server did not start")
    figure = frame.get_by_role("img", name="coder, interactive: latency")
    figure.scroll_into_view_if_needed()
    expect(figure).to_have_js_property("naturalWidth", 40)  # drawn, from the object store
    limits.scroll_into_view_if_needed()
    page.screenshot(path=screenshots / "page.png")

    # By keyboard, told to screen readers.
    said = frame.locator("#filter-said")
    expect(said).to_have_text("3 of 3 shown")
    expect(said).to_have_attribute("aria-live", "polite")
    frame.get_by_label("Filter", exact=True).focus()
    page.keyboard.type("llama")
    expect(said).to_have_text("1 of 3 shown")
    page.keyboard.press("Tab")
    page.keyboard.type("batch")
    expect(said).to_have_text("0 of 3 shown")
    expect(frame.get_by_text("No limit matches the filter.")).to_be_visible()
    frame.get_by_role("button", name="Clear").press("Enter")
    expect(said).to_have_text("3 of 3 shown")
    expect(frame.get_by_label("Filter", exact=True)).to_be_focused()
    frame.get_by_label("Status").select_option("fell")
    expect(said).to_have_text("1 of 3 shown")
    frame.get_by_role("button", name="Refresh").press("Enter")
    expect(said).to_have_text("1 of 3 shown")  # read again, filter kept

    # To the report and the files, and back, inside the frame.
    frame.get_by_role("link", name="Report of llama, interactive").click()
    report = frame.frame_locator("iframe")
    expect(report.locator("html")).to_have_text("llama")
    frame.get_by_role("link", name="Files of this run").click()
    expect(frame.get_by_role("heading", name="Run night-2")).to_be_visible()
    page.screenshot(path=screenshots / "page-files.png")
    with page.expect_download() as download:
        frame.get_by_role("link", name="Download requests.parquet").click()
    assert download.value.suggested_filename == "requests.parquet"
    assert download.value.url.startswith(stack.s3_url)
    assert "X-Amz-Signature=" in download.value.url
    assert Path(download.value.path()).read_bytes() == published.read("runs/night-2/1/llama/requests.parquet")
    frame.get_by_role("link", name="All limits").click()
    expect(said).to_have_text("3 of 3 shown")
    page.context.close()


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("page-dark", 1400, "dark"), ("page-narrow", 420, "light")],
)
def test_alone_dark_and_narrow(
    stack: LocalStack,
    published: S3Store,
    browser: Browser,
    screenshots: Path,
    name: str,
    width: int,
    scheme: str,
) -> None:
    page = open_page(browser, "about:blank", stack, color_scheme=scheme)
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda line: troubles.append(line.text) if "Content Security" in line.text else None)
    page.set_viewport_size({"width": width, "height": 1200})
    page.goto(f"{stack.airflow_url}/capacity/")
    expect(page.get_by_role("rowheader")).to_have_count(6)  # limits and runs
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 22, 27)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert troubles == []
    page.screenshot(path=screenshots / f"{name}.png", full_page=True)
    page.context.close()


def test_a_report_cannot_act_for_who_reads_it(
    stack: LocalStack, published: S3Store, browser: Browser
) -> None:
    title = b"document.title = 'ran'"
    script = b'<h1>Fleet</h1><script>%s</script><b onclick="%s">Click</b>' % (title, title)
    before = published.read("latest/report.html")
    published.write("latest/report.html", script)
    try:
        page = open_page(browser, f"{stack.airflow_url}/capacity/latest/report.html", stack)
        expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
        page.get_by_text("Click").click()
        assert page.title() != "ran"
        page.context.close()
    finally:
        published.write("latest/report.html", before)


def test_results_are_imported_by_the_form(
    stack: LocalStack, bucket: S3Store, browser: Browser, screenshots: Path
) -> None:
    stack.s3().put_object(Bucket=stack.bucket, Key="uploads/tidy.csv", Body=TIDY.encode())
    page = open_page(browser, "about:blank", stack)
    runs = {
        path: triggered(
            stack, page, f"s3://{stack.bucket}/uploads/{path}", screenshots / f"form-import-{path}.png"
        )
        for path in ("tidy.csv", "nothing.csv")
    }

    assert finished(stack, "capacity_import", runs["nothing.csv"]) == "failed"
    states = {task["task_id"]: task["state"] for task in stack.tasks("capacity_import", runs["nothing.csv"])}
    assert (states["read"], states["publish"]) == ("failed", "upstream_failed")
    log = stack.api(
        "GET", f"/dags/capacity_import/dagRuns/{runs['nothing.csv']}/taskInstances/read/logs/1"
    ).text
    assert f"s3://{stack.bucket}/uploads/nothing.csv: no such object, and none below it" in log

    run = runs["tidy.csv"]
    assert finished(stack, "capacity_import", run) == "success", stack.tasks("capacity_import", run)
    published = {key: body for key, body in objects(stack, "demo/runs/import-").items() if "manifest" in key}
    (manifest,) = published.values()
    names = [file["name"] for file in json.loads(manifest)["files"]]
    assert "report.html" in names
    for task in ("publish", "report"):
        page.goto(f"{stack.airflow_url}/dags/capacity_import/runs/{run}/tasks/{task}/details")
        page.get_by_role("link", name="Open report").click()
        report = framed(page).frame_locator("iframe")
        expect(report.locator("h1")).to_be_visible()
        assert f"/plugin/capacity/capacity/view/runs/{json.loads(manifest)['run_id']}/1/" in page.url
    page.screenshot(path=screenshots / "open-report.png")
    page.context.close()


def triggered(stack: LocalStack, page: Page, path: str, picture: Path) -> str:
    """Trigger the import of a path by the form; returns the run's id."""
    page.goto(f"{stack.airflow_url}/dags/capacity_import")
    page.get_by_test_id("trigger-dag-button").first.click()
    form = page.get_by_role("dialog")
    form.locator("[name=element_path]").fill(path)
    page.screenshot(path=picture)
    with page.expect_response(lambda answer: answer.url.endswith("/dagRuns") and answer.ok) as made:
        form.get_by_test_id("trigger-dag-submit").click()
    return str(made.value.json()["dag_run_id"])


def test_a_wrong_value_in_a_form_is_said(stack: LocalStack, browser: Browser, screenshots: Path) -> None:
    page = open_page(browser, f"{stack.airflow_url}/dags/capacity_sweep", stack)
    page.get_by_test_id("trigger-dag-button").first.click()
    form = page.get_by_role("dialog")
    form.locator("[name=element_concurrency]").fill("four")
    form.get_by_test_id("trigger-dag-submit").click()
    expect(form.get_by_text("Requests in flight: whole numbers separated by")).to_have_count(2)
    page.screenshot(path=screenshots / "form-wrong.png")
    page.context.close()
