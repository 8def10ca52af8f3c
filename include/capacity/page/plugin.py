"""What Airflow loads of the page, in every process, and the application that only its API server needs.

Airflow loads plugins in schedulers, DAG processors and every task. FastAPI, templates and the store's client
are therefore imported by the first request to the page, not here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from typing import Any
from urllib.parse import quote

from include.capacity.flow.links import URL_PREFIX, ui_path

Scope = MutableMapping[str, Any]


async def application(
    scope: Scope,
    receive: Callable[[], Awaitable[Scope]],
    send: Callable[[Scope], Awaitable[None]],
) -> None:
    """The page as an ASGI application."""
    await _application()(scope, receive, send)


@cache
def _application() -> Any:
    from airflow.api_fastapi.core_api.security import get_user
    from fastapi import Depends

    from include.capacity.page.app import create_app
    from include.capacity.page.source import fleet_store

    return create_app(fleet_store(), [Depends(get_user)])


def fastapi_apps() -> list[dict[str, Any]]:
    """For the plugin's ``fastapi_apps``."""
    return [{"app": application, "url_prefix": URL_PREFIX, "name": "Capacity"}]


def external_views() -> list[dict[str, Any]]:
    """For the plugin's ``external_views``: the entry in Airflow's navigation."""
    return [
        {
            "name": "Capacity",
            "href": ui_path("/"),
            "destination": "nav",
            "url_route": "capacity",
            "icon": _icon("#1b1f24", halo="#ffffff"),  # also seen on dark blue, when chosen
            "icon_dark_mode": _icon("#e6edf3", halo="none"),
        }
    ]


def _icon(colour: str, halo: str) -> str:
    """A gauge, drawn in one colour on a halo of another."""
    lines = '<path d="M4.5 18a9 9 0 1 1 15 0"/><path d="M12 14l4-5"/><circle cx="12" cy="14" r="1.4"/>'
    drawing = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="none" '
        f'stroke-linecap="round" stroke-linejoin="round"><g stroke="{halo}" stroke-width="5">{lines}</g>'
        f'<g stroke="{colour}" stroke-width="2">{lines}</g></svg>'
    )
    return f"data:image/svg+xml,{quote(drawing)}"
