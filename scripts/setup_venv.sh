#!/usr/bin/env bash
# Creates the project's environment from the pinned requirements.
set -euo pipefail
venv=$1 python=$2
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "$python is older than 3.11; call make with PYTHON=/path/to/python3.11" >&2
  exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt uv
# uv installs in seconds what takes pip minutes; pip is the way out where uv cannot be used.
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --system-certs \
    --constraint constraints.txt --requirement requirements-dev.txt ||
  "$venv/bin/python" -m pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt
