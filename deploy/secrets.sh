#!/bin/sh
# Create the secrets of the compose stack once, in deploy/secrets; existing files are kept.
# Only the owner can enter the folder. Files in it are readable, because containers run as another user.
set -eu
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
chmod 700 "$folder"

random() { head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }
create() { # FILE TEXT
    [ -s "$folder/$1" ] || { printf '%s\n' "$2" > "$folder/$1.new"; chmod 444 "$folder/$1.new"; mv "$folder/$1.new" "$folder/$1"; }
}

create admin.key "$(random)"
create metrics.key "$(random)"
create ray.token "$(random)"
create secret.key "$(random)"
create postgres.password "$(random)"
create grafana.password "$(random)"
create database.env "TRAINSHED_DATABASE_URL=postgresql://trainshed:$(cat "$folder/postgres.password")@postgres/trainshed"
echo "secrets are in $folder; the operator's key: $folder/admin.key"
