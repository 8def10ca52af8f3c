#!/usr/bin/env bash
# Installs load tools to measure the instrument beside: scripts/setup_peers.sh [DIR] [PYTHON]
# Each into an environment of its own (their pins clash), about 7 GB; vLLM's is that of `make vllm`. A tool that
# cannot be installed is left out, and the benchmark says so.
set -uo pipefail
cd "$(dirname "$0")/.."
dir=${1:-var/peers} python=${2:-python3.11}
command -v "$python" >/dev/null || python=python3
mkdir -p "$dir"
for tool in locust==2.47.0 aiperf==0.13.0 guidellm==0.8.1; do
  name=${tool%%==*}
  [ "$(cat "$dir/$name/.installed" 2>/dev/null)" = "$tool" ] && continue
  echo "installing $tool into $dir/$name ..."
  rm -rf "${dir:?}/$name"
  if .venv/bin/uv venv --quiet --python "$python" "$dir/$name" &&
    timeout 600 .venv/bin/uv pip install --quiet --python "$dir/$name/bin/python" "$tool"; then
    echo "$tool" >"$dir/$name/.installed"
  else
    echo "$tool could not be installed; the benchmark leaves it out" >&2
    rm -rf "${dir:?}/$name"
  fi
done
