#!/usr/bin/env bash
# Makes sure that there is a PostgreSQL for the fault tests. Starts no server: the tests run their own.
set -euo pipefail
command -v initdb >/dev/null && exit 0
compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  # The package would start a cluster of its own on port 5432; nobody needs it here.
  mkdir -p /etc/postgresql-common
  [ -e /etc/postgresql-common/createcluster.conf ] ||
    echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq postgresql >/dev/null
else
  echo "The fault tests need PostgreSQL: install it (Debian: apt install postgresql) and run again." >&2
  exit 2
fi
