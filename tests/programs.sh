#!/bin/sh
# Installs the programs that the tests run, on Debian and its relatives as root. Elsewhere prints the names of
# the missing ones. With `compat` installs those of `make compat`, too; with `vm` those of `make vm`.
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
need strace strace
need gdb gdb
need valgrind valgrind
need fio fio
need grep grep

if [ "${1:-}" = compat ]; then
    need perl perl
    need ruby ruby
    need node nodejs
    need java default-jdk-headless
    need Rscript r-base-core
    need guile guile-3.0
    need go golang-go
    need mono mono-runtime
    need mcs mono-mcs
    need ghc ghc
    need ocamlopt ocaml-nox
    need sbcl sbcl
    need erl erlang-base
    need lua5.4 lua5.4
    need php php-cli
    need tclsh tcl
    need gawk gawk
    need mawk mawk
    need jq jq
    need redis-cli redis-tools
    need memcached memcached
    need postgres postgresql
    need g++ g++
    need rustc rustc
    need make make
    need xz xz-utils
    need zstd zstd
    need brotli brotli
    need 7z p7zip-full
    need convert-im6.q16 imagemagick
    need ffmpeg ffmpeg
    need git git
    for module in numpy pandas; do
        /usr/bin/python3 -c "import $module" 2>/dev/null || packages="$packages python3-$module"
    done
fi

if [ "${1:-}" = vm ]; then
    need qemu-system-x86_64 qemu-system-x86
    need busybox busybox-static
    need setpriv util-linux
    need depmod kmod
    need cpio cpio
    need xz xz-utils
    need zstd zstd
fi

[ -n "$packages" ] || exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing for the tests:$packages" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >&2
    # Servers among the packages must not be started.
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
