#!/bin/sh
# Runs a test executable for cargo (its `runner`). Core needs no privileges and no kernel feature. To show
# that, core's tests run as user 65534 without capabilities if this script runs as root. All other tests run
# as they are.
set -eu
if [ "${CARGO_PKG_NAME:-}" != farpage-core ] || [ "$(id -u)" -ne 0 ]; then
    exec "$@"
fi
if ! command -v setpriv >/dev/null 2>&1; then
    echo "skipped: without setpriv (util-linux) root's privileges can't be dropped" >&2
    [ "${CI:-}" != true ] || exit 1
    exit 0
fi
# An executable below root's home may be out of an ordinary user's reach, so a copy is run.
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
chmod 755 "$place"
install -m 755 "$1" "$place/tests"
shift
cd / && setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all \
    --no-new-privs "$place/tests" "$@"
