"""Every generated file through the real parsers, whatever the names in it are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from include.capacity.config import Gateway
from include.capacity.policy import policy_files
from tests.gateways import started
from tests.policy.made import about, entry, limits, pair

NASTY = st.text(alphabet="\"'\n\r\t{};$#%:\\ \u2028\x00\x85é☃a-*&!|>", min_size=1, max_size=30)
HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def written(folder: Path, name: str) -> dict[str, Path]:
    """nginx's and Envoy's files for awkward names, by their place below policy/."""
    gateway = Gateway(replicas=2, fallbacks=["other"])
    found = limits(entry("interactive", 25, claim=name), entry("batch", 107), *pair(12, 50))
    paths = {}
    for file, data in policy_files(about(model=name, served_name=name, run_id=name), found, gateway).items():
        paths[file] = folder / file
        paths[file].parent.mkdir(parents=True, exist_ok=True)
        paths[file].write_bytes(data)
    return paths


def accepted(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@settings(HERE, max_examples=20)
@example(name="plain")
@example(name="a\n} http { server { listen 1;")
@example(name="$host ${x} \\")
@given(name=NASTY)
def test_nginx_takes_it(name: str, tmp_path: Path) -> None:
    files = written(tmp_path, name)
    for place in ("alone/interactive", "alone/batch", "shared"):
        main = started.nginx_main(tmp_path, files[f"policy/{place}/nginx.conf"])
        accepted([started.NGINX, "-t", "-c", str(main)])


@settings(HERE, max_examples=8)
@example(name="plain")
@example(name="a\nstatic_resources: {}")
@given(name=NASTY)
def test_envoy_takes_it(name: str, tmp_path: Path) -> None:
    files = written(tmp_path, name)
    for place in ("alone/interactive", "alone/batch", "shared"):
        accepted([started.ENVOY, "--mode", "validate", "-c", str(files[f"policy/{place}/envoy.yaml"])])


def test_the_parsers_would_complain(tmp_path: Path) -> None:
    files = written(tmp_path, "plain")
    nginx, envoy = files["policy/shared/nginx.conf"], files["policy/shared/envoy.yaml"]
    nginx.write_text(nginx.read_text().replace("limit_conn ", "limit_con ", 1))
    envoy.write_text(envoy.read_text().replace("max_requests", "max_request", 1))

    with pytest.raises(AssertionError, match='unknown directive "limit_con"'):
        accepted([started.NGINX, "-t", "-c", str(started.nginx_main(tmp_path, nginx))])
    with pytest.raises(AssertionError, match="max_request"):
        accepted([started.ENVOY, "--mode", "validate", "-c", str(envoy)])
