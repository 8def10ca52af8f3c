"""The page's routes. Every one is behind Airflow's login, for the dependency is the application's own.

::

    /                           the page, at once; it then asks for
    /limits                     the limits (also a whole page by itself, for browsers without scripts)
    /runs/<run>/<attempt>/      all files of a published run, and its figures
    /runs/<run>/<attempt>/<name>    a file of it: signed and redirected to, or passed through
    /latest/<name>              limits.json, report.html, report.md
    /view/<key of a report>     that report below a line that leads back
    /newest/<run>[/<model>]     to the report of the run's newest attempt

Paths mirror the keys of the published files, so that links between reports work here too. The store is read
in threads of the page's own, a few of them and for a bounded time: a slow store makes this page slow and
nothing else in the API server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import jinja2
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from include.capacity.errors import CapacityError, ConfigError
from include.capacity.page import files, view
from include.capacity.page.files import NotPublished
from include.capacity.results.store import FolderStore, S3Store, Store, content_type

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent / "templates"
THREADS = 4
BUDGET_S = 20.0
"""How long a request may take in all; the store's own timeouts are shorter."""

ADVICE = {
    400: "Follow a link of the Capacity page instead.",
    401: "Log in to Airflow again, then reload this page.",
    403: "Log in to Airflow again, then reload this page.",
    404: "It may never have been published, or have been removed. The Capacity page lists what there is.",
    500: "The message names the file and key to mend. If it does not, the API server's log has the details.",
    502: "If that does not say what to mend: check publish.to and publish.connection in the fleet file, and "
    "the Airflow connection of that name.",
    504: "It may be down or very slow; check it, then reload this page. Airflow itself is not affected.",
}
TITLES = {
    400: "That is not a page",
    401: "You are not logged in",
    403: "You are not logged in",
    404: "There is no such thing here",
    500: "The page cannot be made",
    502: "The published limits cannot be read",
    504: "The object store does not answer",
}

Found = TypeVar("Found")


def create_app(
    open_store: Callable[[], Store], login: Sequence[Any], *, budget_s: float = BUDGET_S
) -> FastAPI:
    """The application. ``open_store``: opens what to show, called in a thread; ``login``: dependencies of all
    routes, which refuse who is not logged in."""
    # Docs and schema would be routes without a login.
    app = FastAPI(title="Capacity", dependencies=login, docs_url=None, redoc_url=None, openapi_url=None)
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="capacity-page")
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    async def from_store(work: Callable[[Store], Found]) -> Found:
        """What ``work`` makes of the store; TimeoutError if that takes longer than it may."""
        loop = asyncio.get_running_loop()
        store = await loop.run_in_executor(pool, open_store)
        async with asyncio.timeout(budget_s):
            return await loop.run_in_executor(pool, partial(work, store))

    def page(request: Request, name: str, status: int = 200, **values: Any) -> HTMLResponse:
        """A rendered template; scripts and styles are those that we wrote, by nonce."""
        nonce = secrets.token_urlsafe(16)
        home = request.scope.get("root_path", "")
        html = templates.get_template(name).render(nonce=nonce, home=f"{home}/", **values)
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src 'self' data: http: https:; frame-src 'self'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'self'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "Referrer-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "private, no-store",
        }
        return HTMLResponse(html, status_code=status, headers=headers)

    def trouble(request: Request, status: int, message: str) -> HTMLResponse:
        return page(
            request,
            "error.html.j2",
            status,
            title=TITLES.get(status, "Something is wrong"),
            message=message,
            advice=ADVICE.get(status, ADVICE[500]),
            again=status >= 500,
        )

    @app.exception_handler(NotPublished)
    async def not_published(request: Request, error: NotPublished) -> Response:
        return trouble(request, 404, str(error))

    @app.exception_handler(CapacityError)
    async def refused(request: Request, error: CapacityError) -> Response:
        log.warning("%s: %s", request.url.path, error)
        return trouble(request, 500 if isinstance(error, ConfigError) else 502, str(error))

    @app.exception_handler(TimeoutError)
    async def too_slow(request: Request, _: TimeoutError) -> Response:
        log.warning("%s: no answer within %s s", request.url.path, budget_s)
        return trouble(request, 504, f"There was no answer within {budget_s:.0f} seconds.")

    @app.exception_handler(OSError)
    async def unreadable(request: Request, error: OSError) -> Response:
        log.warning("%s: %s", request.url.path, error)
        return trouble(request, 502, f"{error.filename or 'a file'}: {error.strerror or error}")

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> Response:
        if error.status_code == 401 and request.headers.get("sec-fetch-dest") == "document":
            root = request.scope.get("root_path", "")
            asked = quote(request.url.path, safe="")
            return RedirectResponse(f"{root.rpartition('/')[0]}/api/v2/auth/login?next={asked}", 302)
        return trouble(request, error.status_code, str(error.detail))

    @app.get("/")
    async def shell(request: Request) -> Response:
        """The page without its contents, which it asks for itself."""
        return page(request, "shell.html.j2")

    @app.get("/limits")
    async def limits(request: Request) -> Response:
        """The limits; empty states are no errors."""
        found = await from_store(view.read_snapshot)
        return page(request, "limits.html.j2", **view.limits_page(found))

    @app.get("/runs/{run}/{attempt}/")
    async def run_files(request: Request, run: str, attempt: str) -> Response:
        """All files of a run."""
        manifest = await from_store(lambda store: files.read_manifest(store, run, attempt))
        values = view.run_page(manifest, files.run_prefix(run, attempt))
        return page(request, "run.html.j2", **values)

    @app.get("/runs/{run}/{attempt}/{name:path}")
    async def run_file(run: str, attempt: str, name: str, save: bool = False) -> Response:
        """A file of a run."""

        def get(store: Store) -> Response:
            return handed_out(store, files.file_key(store, run, attempt, name), save)

        return await from_store(get)

    @app.get("/latest/{name}")
    async def latest_file(name: str, save: bool = False) -> Response:
        """One of the objects that are always the newest."""
        return await from_store(lambda store: handed_out(store, files.latest_key(name), save))

    @app.get("/view/latest/report.html")
    async def view_latest(request: Request) -> Response:
        """The newest fleet report below a line that leads back."""
        return page(request, "view.html.j2", title="Newest report", report="latest/report.html", files=None)

    @app.get("/view/runs/{run}/{attempt}/{name:path}")
    async def view_report(request: Request, run: str, attempt: str, name: str) -> Response:
        """A run's report below a line that leads back."""
        key = await from_store(lambda store: files.file_key(store, run, attempt, name))
        if not files.is_page(key):
            raise HTTPException(404, f"{name}: not a report")
        return page(
            request,
            "view.html.j2",
            title=f"{name.rpartition('/')[0] or 'Report'} · {run}",
            report=quote(key),
            files=f"runs/{quote(run)}/{attempt}/",
        )

    @app.get("/newest/{run}")
    @app.get("/newest/{run}/{model}")
    async def newest_report(request: Request, run: str, model: str = "") -> Response:
        """To the report of a run's newest attempt."""

        def find(store: Store) -> str:
            attempt = files.newest_attempt(store, run)
            name = f"{model}/report.html" if model else "report.html"
            return files.file_key(store, run, attempt, name)

        key = await from_store(find)
        home = request.scope.get("root_path", "")
        return RedirectResponse(f"{home}/view/{quote(key)}", 302)

    return app


def handed_out(store: Store, key: str, save: bool) -> Response:
    """The response with a published file: a redirect to its signed URL, or the file itself.

    ``save``: the browser is to keep it as a file.
    """
    extra = {**files.PASSED_THROUGH, **(files.disposition(key) if save else {})}
    if not store.exists(key):
        raise NotPublished(f"{key}: not published yet, or removed")
    if isinstance(store, S3Store) and (save or not files.is_page(key)):
        signed = files.signed_url(store, key, attachment=save)
        return RedirectResponse(signed, 302, {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
    if isinstance(store, FolderStore):
        return FileResponse(store.path(key), media_type=content_type(key), headers=extra)
    return Response(store.read(key), media_type=content_type(key), headers=extra)
