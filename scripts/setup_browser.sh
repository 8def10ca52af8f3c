#!/usr/bin/env bash
# Makes sure that there is a Chromium for the end-to-end tests.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null
else
  echo "The end-to-end tests need Chromium: install it (Debian: apt install chromium) and run again." >&2
  exit 2
fi
