"""What docker-compose.yaml does once at each start: the database's tables, the admin's password, the bucket.

Waits for the database and the S3 server itself, for not every compose waits for their health.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAIT_S = 120


def main() -> int:
    """Do all of it; each part may be done already."""
    passwords = Path(os.environ["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"])
    passwords.write_text(json.dumps({"admin": os.environ["AIRFLOW_ADMIN_PASSWORD"]}))
    passwords.chmod(0o600)
    wait_for("the S3 server", make_bucket)
    subprocess.run(["airflow", "db", "check", "--retry", "30", "--retry-delay", "2"], check=True)
    subprocess.run(["airflow", "db", "migrate"], check=True)
    return 0


def make_bucket() -> None:
    """Make the bucket unless it is there."""
    client = s3_client()
    bucket = os.environ["CAPACITY_BUCKET"]
    if bucket not in [item["Name"] for item in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=bucket)


def s3_client() -> Any:
    """A client made from the same connection that Airflow will use."""
    import boto3
    from botocore.config import Config

    connection = json.loads(os.environ["AIRFLOW_CONN_AWS_DEFAULT"])
    return boto3.client(
        "s3",
        endpoint_url=connection["extra"]["endpoint_url"],
        region_name=connection["extra"]["region_name"],
        aws_access_key_id=connection["login"],
        aws_secret_access_key=connection["password"],
        config=Config(**connection["extra"]["config_kwargs"]),
    )


def wait_for(what: str, done: Any) -> None:
    """Try until it works; the last error after two minutes."""
    from botocore.exceptions import BotoCoreError

    give_up = time.monotonic() + WAIT_S
    while True:
        try:
            return done()
        except BotoCoreError as error:  # nobody listens yet; a refusal (ClientError) is no matter of waiting
            if time.monotonic() > give_up:
                raise
            print(f"waiting for {what}: {error}", flush=True)
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
