"""Notifications, through Airflow's notifiers: the fleet file names the class, its arguments and the events.

::

    run_failed     the run is red, and why
    limit_fell     a limit is lower than before (``limits.changes`` says when it is, and why)
    limit_rose     ... or higher
    night_missed   a night was not measured: started too late, or nothing was published for it

Any ``BaseNotifier`` will do. Its template fields are filled in by Airflow with the task's context and with
``capacity``: ``event``, ``title`` (one line), ``sentences`` (a list), ``text`` (title and sentences),
``fleet``, ``dag_id``, ``run_id`` and ``results`` (where the run was published). What it needs to log in
lies in an Airflow connection. Classes are imported when a run starts, so that a wrong name fails before a
server is started, and again when there is something to say. A notifier that fails is logged; it loses no
results and changes no colour."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from include.capacity.config import Notify
from include.capacity.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """Something to tell, at most one of a kind a run."""

    name: str
    """As in ``notify.on``."""
    title: str
    sentences: list[str]

    @property
    def text(self) -> str:
        """The whole message, one sentence a line."""
        return "\n".join([self.title, *(f"- {sentence}" for sentence in self.sentences)])


def notifier(configured: Notify) -> Any:
    """The notifier, made; ConfigError says what is wrong with its name or arguments."""
    from airflow.sdk import BaseNotifier

    where = f"notify: {configured.notifier}"
    module, _, name = configured.notifier.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot be imported ({error}); is its provider installed?") from error
    except AttributeError:
        raise ConfigError(f"{where}: the module {module} has no {name}") from None
    if not (isinstance(found, type) and issubclass(found, BaseNotifier)):
        raise ConfigError(f"{where}: expected a class derived from airflow.sdk.BaseNotifier")
    try:
        return found(**configured.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: its arguments are refused: {error}") from error


def check(configured: Sequence[Notify]) -> None:
    """ConfigError if any of these could not notify."""
    for one in configured:
        notifier(one)


def announce(
    configured: Sequence[Notify],
    events: Sequence[Event],
    context: Mapping[str, Any],
    about: Mapping[str, Any],
) -> int:
    """Tell each event to whom it concerns; returns how many notifications were sent."""
    sent = 0
    for event in events:
        log.info("%s: %s", event.name, event.text)
        words = {
            **about,
            "event": event.name,
            "title": event.title,
            "sentences": event.sentences,
            "text": event.text,
        }
        for one in configured:
            if event.name not in one.on:
                continue
            try:
                notifier(one)({**context, "capacity": words})
            except Exception:
                log.exception("%s was not told of %s", one.notifier, event.name)
                continue
            sent += 1
    return sent
