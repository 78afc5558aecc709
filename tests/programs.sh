#!/bin/sh
# Installs the programs that the tests run, on Debian and its relatives as root; elsewhere names what is missing.
set -eu
PATH=$PATH:/usr/sbin:/sbin

packages=
missing=
# need PROGRAM PACKAGE
need() {
    if ! command -v "$1" >/dev/null 2>&1; then
        packages="$packages $2"
        missing="$missing $1"
    fi
}

need cc gcc
need python3 python3
need sort coreutils
need redis-server redis-server
need sqlite3 sqlite3
need stress-ng stress-ng
need losetup util-linux
need mount mount
need mkswap util-linux
need blockdev util-linux
need mkfs.ext4 e2fsprogs
need dmsetup dmsetup
need setcap libcap2-bin
need ps procps
need grep grep

[ -n "$packages" ] || exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing for the tests:$packages" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >&2
    # The servers among them must not be started.
    mkdir -p /usr/sbin
    made=
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        made=yes
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod 755 /usr/sbin/policy-rc.d
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    # shellcheck disable=SC2086
    apt-get install -q -y --no-install-recommends $packages >&2
    [ -z "$made" ] || rm -f /usr/sbin/policy-rc.d
else
    echo "The tests that need these programs will be skipped, they are missing:$missing" >&2
    echo "On Debian, as root: apt-get install$packages" >&2
    # In CI nothing may be skipped unseen.
    [ "${CI:-}" != true ] || exit 1
fi
