"""The object store of a publish target, through an Airflow connection, which holds the credentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from include.capacity.config import Publish
from include.capacity.results.patient import PatientStore
from include.capacity.results.store import PATIENCE, Store, open_store

STORE_PATIENCE_S = 180.0
"""How long a task waits for an object store that is away: measurements must not be lost to a restart."""


def s3_client(connection: str, **bounds: Any) -> Any:
    """A boto3 client made from an Airflow connection; where that says nothing, as patient as the store's own.

    ``bounds``: settings of ``botocore.config.Config`` that go before the connection's own, such as shorter
    timeouts for a page that somebody waits for.
    """
    from airflow.providers.amazon.aws.hooks.s3 import S3Hook  # heavy
    from botocore.config import Config

    hook = S3Hook(aws_conn_id=connection)
    return hook.get_client_type(config=Config(**PATIENCE).merge(hook.config).merge(Config(**bounds)))


def publish_store(publish: Publish, s3: Callable[[], Any]) -> Store:
    """Where a run keeps its files and publishes them; ``s3`` makes the client, should it be a bucket."""
    store = open_store(publish.to, s3, sse=publish.sse, sse_kms_key_id=publish.sse_kms_key_id)
    return PatientStore(store, STORE_PATIENCE_S)
