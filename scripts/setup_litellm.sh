#!/usr/bin/env bash
# Creates the environment of LiteLLM's proxy: scripts/setup_litellm.sh [VENV] [PYTHON]. About 600 MB.
# Does nothing if the environment already is what requirements-litellm.txt asks for.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-litellm} python=${2:-python3.11}
command -v "$python" >/dev/null || python=python3
cmp -s requirements-litellm.txt "$venv/.installed" && exit 0
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing LiteLLM's proxy into $venv (about 600 MB) ..."
.venv/bin/uv pip install --quiet --python "$venv/bin/python" --system-certs --requirement requirements-litellm.txt ||
  "$venv/bin/python" -m pip install --quiet --requirement requirements-litellm.txt
cp requirements-litellm.txt "$venv/.installed"
