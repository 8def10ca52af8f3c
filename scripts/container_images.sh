#!/usr/bin/env bash
# Makes the images of docker-compose.yaml on this machine, under the names the file uses, where no registry can be
# reached: Debian's packages stand in for python, postgres and redis; the project's own image is built from its real
# Dockerfile on top. Needs scripts/setup_containers.sh; what is there already and unchanged is kept.
#
#     scripts/container_images.sh [OUT]
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-var/containers}")
python=$(realpath "${PYTHON:-.venv/bin/python}")
. "$out/env.sh"

built() { # IMAGE FINGERPRINT: whether it was made from just this
  [ "$(podman image inspect --format '{{index .Labels "made-from"}}' "$1" 2>/dev/null)" = "$2" ]
}
fingerprint() { cat "$@" | sha256sum | cut -c1-16; }

images=tests/compose/images
base=$(fingerprint "$0" $images/* <("$python" -VV))
if ! built postgres:17-bookworm "$base"; then
  context=$(mktemp -d)
  trap 'rm -rf "$context"' EXIT
  mmdebstrap --quiet --variant=minbase --include=ca-certificates,postgresql,redis-server,libsqlite3-0,libffi8,libbz2-1.0,liblzma5,libreadline8,libssl3 \
    bookworm "$context/debian.tar"
  podman import --quiet "$context/debian.tar" localhost/capacity-debian >/dev/null
  rm "$context/debian.tar"
  prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
  (cd "$prefix" && tar -cf "$context/python.tar" --exclude='site-packages/*' --exclude=__pycache__ \
    --exclude=lib/python3.11/test --exclude='lib/python3.11/config-*' --exclude=lib/python3.11/idlelib \
    bin/python3.11 lib/python3.11 $(ls -d lib/libpython3*.so* 2>/dev/null))
  cp /etc/ssl/certs/ca-certificates.crt $images/* "$context"
  for name in python:3.11-slim-bookworm redis:7-bookworm postgres:17-bookworm; do
    podman build --quiet --label made-from="$base" -f "$context/${name%%:*}.Containerfile" \
      -t "$name" "$context" >/dev/null
    echo "made $name"
  done
fi
# The layer of the requirements is kept by the builder's own cache.
podman build --network host --layers -t localhost/llm-capacity:local . >"$out/build.log" 2>&1 ||
  { tail -30 "$out/build.log" >&2; exit 1; }
echo "made localhost/llm-capacity:local"
