"""Which published files may be had through the page, and how they are handed out.

Nothing that comes with a request is ever a path. A run's name and attempt must look like what
:func:`include.capacity.results.store.safe_name` makes (no separator, no dot segment); the manifest found
there must be that very run's; and only names that this manifest lists are served, besides the three objects
of ``latest/``.

Files are handed out by a signed URL of the object store, made when clicked and good for
:data:`SIGNED_FOR_S`. Two kinds are passed through instead: files of a ``file://`` target, and reports, whose
relative links to each other would not be signed. What is passed through is shown without any right to run
scripts (see :data:`PASSED_THROUGH`), for it comes from Airflow's own address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from include.capacity.errors import PublishError
from include.capacity.results.store import S3Store, Store, content_type, safe_name

SIGNED_FOR_S = 300
SEGMENT = re.compile(r"(?!\.+$)[a-z0-9._~-]{1,240}")
ATTEMPT = re.compile(r"[1-9]\d{0,6}")
LATEST = ("limits.json", "report.html", "report.md")

PASSED_THROUGH = {
    "Content-Security-Policy": "sandbox allow-same-origin allow-downloads; default-src 'none'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "private, no-store",
}
"""No script, no form, nothing from elsewhere. The origin stays (nothing can use it without scripts), because
links between reports inside a frame would lose the login without it."""


class NotPublished(Exception):
    """There is no such published file; says which."""


def run_prefix(run: str, attempt: str) -> str:
    """``runs/<run>/<attempt>``; NotPublished if these are no names of a run."""
    if not (SEGMENT.fullmatch(run) and ATTEMPT.fullmatch(attempt)):
        raise NotPublished(f"{run!r}, attempt {attempt!r}: not the name of a published run")
    return f"runs/{run}/{attempt}"


def read_manifest(store: Store, run: str, attempt: str) -> dict[str, Any]:
    """A published run's manifest; NotPublished if there is none, PublishError if it is broken."""
    key = f"{run_prefix(run, attempt)}/manifest.json"
    try:
        manifest = json.loads(store.read(key))
        same = safe_name(manifest["run_id"]) == run and manifest["attempt"] == int(attempt)
        names = [file["name"] for file in manifest["files"]]
    except FileNotFoundError:
        raise NotPublished(f"run {run}, attempt {attempt}: not published, or not completely") from None
    except (ValueError, KeyError, TypeError) as error:
        raise PublishError(f"{store.url}/{key}: not a manifest: {error!r}") from error
    if not same:
        raise PublishError(f"{store.url}/{key}: the manifest of another run, {manifest['run_id']}")
    return {**manifest, "names": names}


def newest_attempt(store: Store, run: str) -> str:
    """The newest attempt of a run that was published completely; NotPublished if there is none."""
    folder = f"{run_prefix(run, '1').rpartition('/')[0]}/"
    whole = [key.removeprefix(folder).partition("/") for key in store.keys(folder)]
    attempts = [int(top) for top, _, name in whole if name == "manifest.json" and ATTEMPT.fullmatch(top)]
    if not attempts:
        raise NotPublished(f"run {run}: not published yet; its publish task does that, at the end of the run")
    return str(max(attempts))


def file_key(store: Store, run: str, attempt: str, name: str) -> str:
    """The key of a file of a run; NotPublished if the run's manifest does not list it."""
    manifest = read_manifest(store, run, attempt)
    if name not in manifest["names"]:
        raise NotPublished(f"run {run}, attempt {attempt}: its manifest lists no {name!r}")
    return f"{run_prefix(run, attempt)}/{name}"


def latest_key(name: str) -> str:
    """The key of one of the objects that are always the newest."""
    if name not in LATEST:
        raise NotPublished(f"latest/{name}: no such file; there are {', '.join(LATEST)}")
    return f"latest/{name}"


def signed_url(store: S3Store, key: str, *, attachment: bool) -> str:
    """A URL with which anybody may get this object for :data:`SIGNED_FOR_S` seconds."""
    where: dict[str, Any] = {"Bucket": store.bucket, "Key": store.prefix + key}
    if attachment:
        where["ResponseContentDisposition"] = disposition(key)["Content-Disposition"]
    return str(store.client.generate_presigned_url("get_object", Params=where, ExpiresIn=SIGNED_FOR_S))


def disposition(key: str) -> Mapping[str, str]:
    """Headers that make a browser save the file under its own name."""
    return {"Content-Disposition": f'attachment; filename="{key.rpartition("/")[2]}"'}


def is_page(key: str) -> bool:
    """Whether the file is a report, which is always passed through."""
    return content_type(key).startswith("text/html")
