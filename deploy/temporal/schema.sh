#!/bin/sh
# Creates or upgrades Temporal's two databases; repeated, it changes nothing.
# temporal-sql-tool reads host, port, user, password and plugin from SQL_*.
set -eu

schema=${TEMPORAL_SCHEMA:-/etc/temporal/schema/postgresql/v12}
for pair in temporal:temporal temporal_visibility:visibility; do
  database=${pair%%:*}
  temporal-sql-tool --db "$database" create-database
  temporal-sql-tool --db "$database" setup-schema --version 0.0
  temporal-sql-tool --db "$database" update-schema --schema-dir "$schema/${pair##*:}/versioned"
done
