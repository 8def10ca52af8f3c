#!/usr/bin/env bash
# Makes sure that there is an nginx for the tests in tests/gateways. (Envoy comes as a wheel.)
set -euo pipefail
PATH=$PATH:/usr/sbin
command -v nginx >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx-light >/dev/null
else
  echo "These tests need nginx: install it (Debian: apt install nginx-light) and run again." >&2
  exit 2
fi
