"""The object store's client, made from an Airflow connection, which holds the credentials."""

from __future__ import annotations

from typing import Any


def s3_client(connection: str, **bounds: Any) -> Any:
    """A boto3 client made from an Airflow connection.

    ``bounds``: settings of ``botocore.config.Config`` that go before the connection's own, such as shorter
    timeouts for a page that somebody waits for.
    """
    from airflow.providers.amazon.aws.hooks.s3 import S3Hook  # heavy

    hook = S3Hook(aws_conn_id=connection)
    if not bounds:
        return hook.get_conn()
    from botocore.config import Config

    return hook.get_client_type(config=hook.config.merge(Config(**bounds)))
