"""Notifiers of the tests' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airflow.sdk import BaseNotifier


class ToFile(BaseNotifier):
    """Appends the message to a file."""

    template_fields: Sequence[str] = ("text",)

    def __init__(self, path: str, text: str) -> None:
        super().__init__()
        self.path, self.text = path, text

    def notify(self, context: Any) -> None:
        with Path(self.path).open("a", encoding="utf-8") as file:
            file.write(f"{self.text}\n")


class Broken(BaseNotifier):
    """Cannot reach anybody."""

    def notify(self, context: Any) -> None:
        raise ConnectionError("nobody there")
