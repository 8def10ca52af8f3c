"""The object store's client, made from an Airflow connection, which holds the credentials."""

from __future__ import annotations

from typing import Any

from include.capacity.results.store import PATIENCE


def s3_client(connection: str, **bounds: Any) -> Any:
    """A boto3 client made from an Airflow connection; where that says nothing, as patient as the store's own.

    ``bounds``: settings of ``botocore.config.Config`` that go before the connection's own, such as shorter
    timeouts for a page that somebody waits for.
    """
    from airflow.providers.amazon.aws.hooks.s3 import S3Hook  # heavy
    from botocore.config import Config

    hook = S3Hook(aws_conn_id=connection)
    return hook.get_client_type(config=Config(**PATIENCE).merge(hook.config).merge(Config(**bounds)))
