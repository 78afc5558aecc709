#!/bin/sh
# Runs test executables of a cargo command without privileges: as an ordinary user they run as they are; as root
# they are built first and then run as user 65534 without capabilities. Usage: unprivileged.sh cargo test ...
set -eu
if [ "$(id -u)" -ne 0 ]; then
    exec "$@"
fi
if ! command -v setpriv >/dev/null 2>&1; then
    echo "skipped: without setpriv (util-linux) root's privileges can't be dropped" >&2
    [ "${CI:-}" != true ] || exit 1
    exit 0
fi
# An executable below root's home may be out of an ordinary user's reach: it is run from a copy.
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
chmod 755 "$place"
"$@" --lib --tests --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' >"$place/list"
[ -s "$place/list" ] || { echo "no test executable was built" >&2; exit 1; }
while read -r executable; do
    install -m 755 "$executable" "$place/tests"
    (cd / && setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all \
        --no-new-privs "$place/tests")
done <"$place/list"
