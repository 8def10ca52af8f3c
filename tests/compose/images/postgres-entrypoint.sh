#!/bin/bash
# As the official image: the first start makes the cluster, the user and the database that the environment names.
set -euo pipefail
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --encoding UTF8 --locale C.UTF-8 --username "$POSTGRES_USER" --pwfile <(echo "$POSTGRES_PASSWORD") --auth-host scram-sha-256 \
    --auth-local trust >/dev/null
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  pg_ctl -w start -o "-c listen_addresses=" >/dev/null
  [ "$POSTGRES_DB" = postgres ] || psql -q -U "$POSTGRES_USER" -d postgres -c "CREATE DATABASE \"$POSTGRES_DB\""
  pg_ctl -w stop -m fast >/dev/null
fi
exec "$@" -c "listen_addresses=*"
