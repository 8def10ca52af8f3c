"""A PostgreSQL server of our own in a temporary folder, as the local installation's metadata database.

It refuses to run as root, so root starts it as the user ``postgres``; that user cannot look into root's
folders, so its data lie in one of its own below the system's temporary folder. Without fsync: what it
holds is gone with the test anyway.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

BINARIES = Path("/usr/lib/postgresql")
USER = "airflow"
SETTINGS = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}


class LocalPostgres:
    """One server on ``port``; :meth:`create` its data, then run :attr:`command` with :attr:`options`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.folder = Path(tempfile.mkdtemp(prefix="capacity-postgres-"))
        self.password = secrets.token_hex(20)

    @property
    def url(self) -> str:
        """For SQLAlchemy."""
        return f"postgresql+psycopg2://{USER}:{self.password}@127.0.0.1:{self.port}/postgres"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``subprocess.Popen`` that make it run as somebody else than root."""
        if os.geteuid() != 0:
            return {"cwd": self.folder}
        group = pwd.getpwnam("postgres").pw_gid
        return {"cwd": self.folder, "user": "postgres", "group": group, "extra_groups": []}

    @property
    def command(self) -> list[str]:
        """The server, in the foreground."""
        settings = [item for name, value in SETTINGS.items() for item in ("-c", f"{name}={value}")]
        return [program("postgres"), "-D", str(self.folder / "data"), "-p", str(self.port), *settings]

    def create(self) -> None:
        """Make an empty cluster; RuntimeError with what initdb says if it cannot."""
        password = self.folder / "password"
        password.write_text(self.password)
        if os.geteuid() == 0:
            for path in (self.folder, password):
                shutil.chown(path, "postgres", "postgres")
        done = subprocess.run(
            [
                *(program("initdb"), "-D", str(self.folder / "data"), "-U", USER, "-E", "UTF8"),
                *("--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"),
            ],
            **self.options,
            capture_output=True,
            text=True,
            check=False,
        )
        password.unlink()
        if done.returncode:
            raise RuntimeError(f"initdb failed:\n{done.stdout}{done.stderr}")

    def ready(self) -> bool:
        """Whether it takes connections (while it recovers from a crash it listens and refuses them)."""
        asked = [program("pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={self.port}"]
        return subprocess.run(asked, check=False).returncode == 0

    def remove(self) -> None:
        """Delete its data."""
        shutil.rmtree(self.folder, ignore_errors=True)


def program(name: str) -> str:
    """A program of PostgreSQL, on PATH or where Debian keeps it; RuntimeError if there is none."""
    versions = sorted(BINARIES.glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    found = shutil.which(name) or next(
        (str(path / name) for path in versions if (path / name).is_file()), None
    )
    if found is None:
        raise RuntimeError(f"PostgreSQL's {name} is not installed: run scripts/setup_postgres.sh")
    return found
