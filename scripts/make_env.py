"""Write .env for docker-compose.yaml: a random secret for everything that needs one.

    python3 scripts/make_env.py [FILE]

Needs nothing but Python. An existing file is left alone: its secrets are those of the data in the volumes.
"""

from __future__ import annotations

import base64
import os
import secrets
import sys
from pathlib import Path


def values() -> dict[str, str]:
    """Fresh secrets, by variable."""
    return {
        "AIRFLOW_ADMIN_PASSWORD": secrets.token_urlsafe(18),
        "AIRFLOW_FERNET_KEY": base64.urlsafe_b64encode(os.urandom(32)).decode(),
        "AIRFLOW_JWT_SECRET": secrets.token_hex(48),
        "AIRFLOW_API_SECRET": secrets.token_hex(32),
        "POSTGRES_PASSWORD": secrets.token_hex(24),
        "REDIS_PASSWORD": secrets.token_hex(24),
        "S3_SECRET_KEY": secrets.token_hex(24),
        "VLLM_API_KEY": secrets.token_hex(24),
    }


def main() -> int:
    """Write the file for its owner only; 2 if it is there already."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / ".env")
    text = "".join(f"{name}={value}\n" for name, value in values().items())
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except FileExistsError:
        print(f"{path} is there already; its secrets are those of the volumes' data", file=sys.stderr)
        return 2
    print(f"{path}: written; sign in as admin with its AIRFLOW_ADMIN_PASSWORD")
    return 0


if __name__ == "__main__":
    sys.exit(main())
