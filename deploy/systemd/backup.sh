#!/bin/sh
# A checked copy of a paramsync store, made while it is in use; the newest few stay.
#
#   backup.sh DATA_DIR BACKUP_DIR [KEEP]      BACKUP_DIR/2026-01-31T03-30-00Z; KEEP: 7
#
# To restore: stop paramsyncd, put a copy in the place of DATA_DIR, start it.
set -eu
if [ $# -lt 2 ]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0"
    exit 2
fi
data=$1 backups=$2 keep=${3:-7}
case $keep in
'' | *[!0-9]* | 0)
    echo "backup.sh: KEEP must be a number from 1 on, not $keep" >&2
    exit 2
    ;;
esac
name=$(date -u +%Y-%m-%dT%H-%M-%SZ)
mkdir -p "$backups"
rm -rf "$backups"/.unfinished-*
trap 'rm -rf "$backups/.unfinished-$name"' EXIT
paramsync export --store "$data" -o "$backups/.unfinished-$name" --check
mv "$backups/.unfinished-$name" "$backups/$name"
trap - EXIT
# Names sort by time.
for old in "$backups"/????-??-??T??-??-??Z; do
    [ -d "$old" ] && echo "$old"
done | sort -r | tail -n "+$((keep + 1))" | while IFS= read -r old; do
    rm -rf "$old"
    echo "removed $old"
done
