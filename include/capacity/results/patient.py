"""A store that waits while the real one is away.

Every operation is tried again, with growing pauses, while the store cannot be reached or fails by itself
(:class:`StoreAway`) and patience lasts. This is beyond what the S3 client retries itself (seconds): a
restart of the object store must not lose what a step has measured. What waiting cannot change (refused
credentials, no such bucket, a full disk) is told at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from include.capacity.errors import StoreAway
from include.capacity.results.store import Store

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0

T = TypeVar("T")


class PatientStore:
    """``store``, with ``patience_s`` for each operation."""

    def __init__(self, store: Store, patience_s: float) -> None:
        self.store = store
        self.patience_s = patience_s
        self.url = store.url

    def read(self, key: str) -> bytes:
        return self._patiently(lambda: self.store.read(key))

    def write(self, key: str, data: bytes) -> None:
        self._patiently(lambda: self.store.write(key, data))

    def keys(self, prefix: str = "") -> list[str]:
        return self._patiently(lambda: self.store.keys(prefix))

    def exists(self, key: str) -> bool:
        return self._patiently(lambda: self.store.exists(key))

    def delete(self, key: str) -> None:
        self._patiently(lambda: self.store.delete(key))

    def read_version(self, key: str) -> tuple[bytes, str]:
        return self._patiently(lambda: self.store.read_version(key))

    def write_if(self, key: str, data: bytes, version: str | None) -> None:
        # A write whose answer was lost is a conflict at the second try; the caller reads and merges again.
        self._patiently(lambda: self.store.write_if(key, data, version))

    def conditional(self, key: str) -> bool:
        return self._patiently(lambda: self.store.conditional(key))

    def _patiently(self, call: Callable[[], T]) -> T:
        give_up = time.monotonic() + self.patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return call()
            except StoreAway as error:
                left_s = give_up - time.monotonic()
                if left_s < pause_s:
                    raise
                log.warning("%s; trying again for %.0f s", error, left_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
