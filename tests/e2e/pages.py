"""What the end-to-end tests do with the browser and the REST API alike."""

from __future__ import annotations

import time
from typing import Any

from playwright.sync_api import Browser, Page, expect

from scripts.local_stack import LocalStack

PATIENCE_MS = 120_000
RUN_PATIENCE_S = 600


def open_page(browser: Browser, url: str, stack: LocalStack | None = None, **context: Any) -> Page:
    """A new window of 1400 x 1200, logged in to the stack if one is given."""
    window = browser.new_context(viewport={"width": 1400, "height": 1200}, **context)
    if stack is not None:
        window.add_cookies([{"name": "_token", "value": stack.token(), "url": stack.airflow_url}])
    page = window.new_page()
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.goto(url)
    return page


def finished(stack: LocalStack, dag: str, run: str) -> str:
    """The state a run ends in."""
    give_up = time.monotonic() + RUN_PATIENCE_S
    while (state := stack.run_state(dag, run)) not in ("success", "failed"):
        assert time.monotonic() < give_up, f"{dag} {run} still {state}: {stack.tasks(dag, run)}"
        time.sleep(1)
    return state


def objects(stack: LocalStack, prefix: str) -> dict[str, bytes]:
    """All objects below a prefix of the bucket."""
    client = stack.s3()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=stack.bucket, Prefix=prefix)
    keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
    return {
        key.removeprefix(prefix): client.get_object(Bucket=stack.bucket, Key=key)["Body"].read()
        for key in keys
    }
