"""Health checks of docker-compose.yaml: exit status 0 if what is named is well.

    python -m deploy.health http://HOST:PORT/PATH | tcp://HOST:PORT | dag_processor | worker

Starts in a fraction of a second, unlike Airflow's own commands: it runs every few seconds in every container.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from urllib.parse import urlsplit
from urllib.request import urlopen

WITHIN_S = 10


def main(what: str) -> str | None:
    """What is wrong; ``None``: nothing."""
    if what.startswith("http://"):
        with urlopen(what, timeout=WITHIN_S) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    if what.startswith("tcp://"):
        parts = urlsplit(what)
        socket.create_connection((str(parts.hostname), int(parts.port or 0)), WITHIN_S).close()
        return None
    if what == "worker":
        return worker()
    with urlopen("http://api-server:8080/api/v2/monitor/health", timeout=WITHIN_S) as answer:
        status = json.load(answer)[what]["status"]
    return None if status == "healthy" else f"{what} is {status}"


def worker() -> str | None:
    """Ask this container's Celery worker through the broker, as the scheduler will."""
    from celery import Celery

    name = f"celery@{socket.gethostname()}"
    app = Celery(broker=os.environ["AIRFLOW__CELERY__BROKER_URL"])
    return None if app.control.ping([name], timeout=WITHIN_S) else f"{name} does not answer"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except OSError as error:
        sys.exit(str(error))
