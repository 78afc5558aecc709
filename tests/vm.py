"""Boots other kernels in QEMU, without KVM, and runs small programs under `farpage run` in each: in every
mode, as root and as an ordinary user. Each program verifies every byte of its memory.

Usage: vm.py [--kernels "5.10 6.1"] [--only "MODE; ..."] [--programs "NAME; ..."] [--append PARAMETERS]
[--refresh]. Prints a table in Markdown; the table and the logs stay in target/vm. Ends with 1 if a byte was
wrong, a program failed, or a mode was refused that the kernel has. `make vm` builds Farpage before. Kernels
are Debian's, verified by their SHA-256; they stay in target/vm, too.
"""

import argparse
import concurrent.futures
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
PLACE = os.path.join(TARGET, "vm")
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Series of kernels, each with the release of Debian that has it. The series of `sid` changes: its kernel is
# called by its version.
SUITES = {"5.10": "bullseye", "6.1": "bookworm", "6.12": "trixie", "newest": "sid"}
# Package that depends on the newest kernel of its suite. A "cloud" kernel has fewer drivers than the usual
# kernel, and is the same otherwise.
NEWEST = "linux-image-cloud-amd64"
MODULES = ("virtio_pci", "virtio_blk", "ext4")

# Sizes and budgets are a quarter of the usual ones, because emulation takes 10 to 30 times as long. `MIB` of
# check.h is 256 KiB.
UNIT_SHIFT = 18
GUEST_MIB = 1024
CELL_SECONDS = 600
BOOT_SECONDS = 3 * 3600

MODES = ("auto", "thread", "thread --install copy", "signal", "signal --install copy", "segv")
# Programs with which `auto` is tried. The mode that it takes is tried by name with all of them.
WITH_AUTO = ("load", "peer that writes")
USERS = {"root": 0, "ordinary user": 65534}
# Title in the table, executable, case, budget in MiB. Farpage itself takes a large part of so small a budget
# in each process: three processes get more.
PROGRAMS = (
    ("load", "threads", "only_threads", 8),
    ("direct I/O", "io", "direct", 8),
    ("registered, then moved", "io", "moved_after_it_was_registered", 8),
    ("peer that writes", "peer_writes", "from_a_parent", 8),
    ("fork", "processes", "fork_while_out", 16),
)
EXECUTABLES = sorted({row[1] for row in PROGRAMS})
# Status of a `farpage run` that refused: docs/user/options.md, "Exit status".
REFUSED = 125


class Trouble(Exception):
    """An error that the user must hear of."""


def run(words, **more):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    if done.returncode != 0:
        said = " / ".join(done.stdout.split("\n")[-4:]).strip(" /")
        raise Trouble("%s ... %s ended with status %d: %s" % (words[0], words[-1], done.returncode, said))
    return done.stdout


# Kernels


def apt(series):
    """Returns options by which apt looks at one suite, and keeps in PLACE what it knows of that suite."""
    state = os.path.join(PLACE, "apt", series)
    for directory in ("lists/partial", "cache/archives/partial"):
        os.makedirs(os.path.join(state, directory), exist_ok=True)
    with open(os.path.join(state, "sources.list"), "w") as file:
        file.write("deb [signed-by=%s] %s %s main\n" % (KEYRING, MIRROR, SUITES[series]))
    open(os.path.join(state, "status"), "a").close()
    words = ["Dir::Etc::sourcelist=%s/sources.list", "Dir::Etc::sourceparts=-", "Dir::State::lists=%s/lists",
             "Dir::State::status=%s/status", "Dir::Cache=%s/cache", "APT::Sandbox::User=root",
             "APT::Architecture=amd64", "APT::Update::Error-Mode=any", "Acquire::Languages=none", "Acquire::Retries=3"]
    return [word for option in words for word in ("-o", option.replace("%s", state))]


def package_fields(options, name):
    """Returns the fields of the newest version of a package."""
    text = run(["apt-cache", *options, "--no-all-versions", "show", name])
    return dict(line.split(": ", 1) for line in text.split("\n\n")[0].splitlines() if re.match(r"[\w-]+: ", line))


def kernel_packages(options):
    """Returns the package of a suite's newest kernel or, since Debian 14, the packages that have its
    parts."""
    newest = re.findall(r"linux-image-[\w.+-]+-cloud-amd64", package_fields(options, NEWEST)["Depends"])[0]
    parts = re.findall(r"linux-(?:base|binary|modules)-[\w.+-]+", package_fields(options, newest)["Depends"])
    return [package_fields(options, name) for name in parts or [newest]]


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(
            file.read()).hexdigest()


def fetched_kernel(series, is_refreshed):
    """Returns the directory of an unpacked kernel, and the packages that the kernel is from."""
    place = os.path.join(PLACE, "kernels", series)
    note = os.path.join(place, "packages.json")
    if os.path.exists(note) and not is_refreshed:
        with open(note) as file:
            return place, json.load(file)
    options = apt(series)
    try:
        run(["apt-get", *options, "update"])
        packages = kernel_packages(options)
        shutil.rmtree(place, ignore_errors=True)
        os.makedirs(place)
        for package in packages:
            run(["apt-get", *options, "download", "%s=%s" % (package["Package"], package["Version"])], cwd=place)
    except (Trouble, KeyError, IndexError) as error:
        raise Trouble("no kernel %s from %s, suite %s: %s" % (series, MIRROR, SUITES[series], error)) from error
    for package in packages:
        (path,) = glob.glob(os.path.join(glob.escape(place), package["Package"] + "_*.deb"))
        if sha256(path) != package["SHA256"]:
            raise Trouble("%s isn't what the package index says: SHA-256 %s" % (path, sha256(path)))
        run(["dpkg-deb", "-x", path, place])
        os.unlink(path)
    known = [{key: package[key] for key in ("Package", "Version", "SHA256")} for package in packages]
    with open(note, "w") as file:
        json.dump(known, file)
    return place, known


# What the guest has


def libraries(executable):
    """Returns what the loader loads for an executable or a library, and the loader."""
    return re.findall(r"(/\S+) \(0x", run(["ldd", executable]))


def put(tree, path, source):
    """Puts a copy of `source` into the tree of the guest."""
    place = os.path.join(tree, path.lstrip("/"))
    os.makedirs(os.path.dirname(place), exist_ok=True)
    shutil.copyfile(source, place)
    os.chmod(place, 0o755)


def put_executable(tree, path, source):
    put(tree, path, source)
    for library in libraries(source):
        put(tree, library, os.path.realpath(library))


def put_modules(tree, kernel):
    """Puts the modules that MODULES need into the tree, numbered in the order in which they are loaded."""
    for found in glob.glob(os.path.join(glob.escape(kernel), "usr/lib/modules")):
        os.makedirs(os.path.join(kernel, "lib"), exist_ok=True)
        shutil.move(found, os.path.join(kernel, "lib/modules"))
    (version,) = os.listdir(os.path.join(kernel, "lib/modules"))
    run(["depmod", "-b", kernel, version])
    files = []
    for module in MODULES:
        needed = run(["modprobe", "-d", kernel, "-S", version, "--show-depends", module])
        files += re.findall(r"^insmod (\S+)", needed, re.M)
    unpacked = {".xz": ["xz", "-dc"], ".zst": ["zstd", "-dcq"], ".gz": ["gzip", "-dc"]}
    os.makedirs(os.path.join(tree, "modules"))
    for number, path in enumerate(dict.fromkeys(files)):
        name = "%02d-%s.ko" % (number, os.path.basename(path).split(".")[0])
        with open(os.path.join(tree, "modules", name), "wb") as file:
            subprocess.run([*unpacked.get(os.path.splitext(path)[1], ["cat"]), path], stdout=file, check=True)


INIT = r"""#!/bin/sh
export PATH=/bin HOME=/ FARPAGE_PRELOAD=/bin/libfarpage_preload.so
for d in proc sys dev tmp data var; do mkdir -p /$d; done
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /sys/fs/cgroup
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup /sys/fs/cgroup
for m in /modules/*.ko; do insmod $m; done
mount -t ext4 /dev/vda /data || no_disk=1
chmod 1777 /tmp /data /dev/shm
ln -s /data /var/tmp
ip link set lo up
exec >/dev/ttyS1 2>&1
cd /data
echo "@@kernel $(uname -r)"
# Without a disk of a file system that has it, direct I/O would not be tried.
[ -z "$no_disk" ] || { dmesg | tail; poweroff -f; }
# cell USER UID MODE PROGRAM COMMAND...
cell() {
    rm -f /data/stats.json
    echo "@@begin $1|$3|$4"
    # Not by its name: busybox has a setpriv of its own, which knows less.
    /bin/util-linux-setpriv --reuid $2 --regid $2 --clear-groups timeout -s KILL CELL_SECONDS sh -c "$5"
    status=$?
    [ ! -e /data/stats.json ] || echo "@@stats $(tr -d '\n' </data/stats.json)"
    echo "@@end $status"
    [ $status = 0 ] || dmesg -c | tail -20 | sed 's/^/dmesg: /'
}
"""


def guest_script(modes, programs):
    lines = [INIT.replace("CELL_SECONDS", str(CELL_SECONDS))]
    for user, uid in USERS.items():
        lines.append("cell '%s' %d doctor doctor 'farpage doctor'" % (user, uid))
        for mode in modes:
            for title, name, case, budget in programs:
                if mode == "auto" and title not in WITH_AUTO:
                    continue
                command = "farpage run --faults %s --ram %dM --stats /data/stats.json -- %s %s" % (
                    mode, budget, name, case)
                lines.append("cell '%s' %d '%s' '%s' '%s'" % (user, uid, mode, title, command))
    return "\n".join(lines) + "\necho @@done\nsync\npoweroff -f\n"


def initramfs(kernel, script):
    """Makes the guest's first file system: Farpage, the programs, their libraries, busybox, modules."""
    tree = os.path.join(kernel, "tree")
    shutil.rmtree(tree, ignore_errors=True)
    os.makedirs(os.path.join(tree, "bin"))
    put(tree, "/bin/busybox", shutil.which("busybox"))
    for name in run(["busybox", "--list"]).split():
        if name != "busybox":
            os.symlink("busybox", os.path.join(tree, "bin", name))
    put_executable(tree, "/bin/util-linux-setpriv", shutil.which("setpriv"))
    for name in ("farpage", "libfarpage_preload.so"):
        put_executable(tree, "/bin/" + name, os.path.join(TARGET, "release", name))
    for name in EXECUTABLES:
        put_executable(tree, "/bin/" + name, os.path.join(PLACE, name))
    put_modules(tree, kernel)
    path = os.path.join(tree, "init")
    with open(path, "w") as file:
        file.write(script)
    os.chmod(path, 0o755)
    image = os.path.join(kernel, "initramfs")
    with open(image, "wb") as file:
        subprocess.run("find . | cpio -o -H newc --quiet", shell=True, cwd=tree, stdout=file, check=True)
    return image


def build_programs():
    os.makedirs(PLACE, exist_ok=True)
    for name in EXECUTABLES:
        source = os.path.join(ROOT, "tests/programs", name + ".c")
        run(["cc", "-O2", "-Wall", "-DMIB=((size_t)1<<%d)" % UNIT_SHIFT, "-o", os.path.join(PLACE, name), source, "-lpthread"])


# The run


def kernel_image(kernel):
    for pattern in ("boot/vmlinuz-*", "lib/modules/*/vmlinuz"):
        for path in glob.glob(os.path.join(glob.escape(kernel), pattern)):
            return path
    raise Trouble("no vmlinuz in %s" % kernel)


def boot(kernel, image, parameters):
    """Runs the guest to its end. Returns what it wrote to its second serial port."""
    for old in glob.glob(os.path.join(glob.escape(kernel), "*.log")):
        os.unlink(old)
    disk, console, results = (os.path.join(kernel, name) for name in ("disk", "console.log", "results.log"))
    with open(disk, "wb") as file:
        file.truncate(512 << 20)
    run(["mkfs.ext4", "-q", "-F", disk])
    # QEMU ends with this script, however the script ends: the next guest needs the disk.
    words = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max,la57=off", "-smp", "1",
             "-m", str(GUEST_MIB), "-display", "none",
             "-nodefaults", "-no-reboot", "-kernel", kernel_image(kernel), "-initrd", image,
             "-append", "console=ttyS0 panic=-1 mitigations=off nokaslr no_timer_check quiet loglevel=4 " + parameters,
             "-drive", "file=%s,format=raw,if=virtio,cache=unsafe" % disk,
             "-serial", "file:" + console, "-serial", "file:" + results]
    try:
        run(words, timeout=BOOT_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        os.unlink(disk)
    with open(results, errors="replace") as file:
        return file.read().replace("\r", "")


def lacks(version, user, mode):
    """Returns why this kernel may refuse a mode, or None."""
    if not mode.startswith("thread") and version < (5, 11):
        return "Syscall User Dispatch is from Linux 5.11"
    if mode.startswith("thread") and user != "root" and version >= (5, 11):
        return "vm.unprivileged_userfaultfd is 0"
    return None


def verdict(cell, version):
    """Returns `right`, `refused` or `WRONG`, and why."""
    text, status, stats = cell["text"], cell["status"], cell["stats"]
    ours = [line for line in text.splitlines() if line.startswith("farpage: ")]
    if status == REFUSED and stats is None and ours:
        why = "; ".join(line[len("farpage: "):].strip() for line in ours[:2])
        if lacks(version, cell["user"], cell["mode"]) is None:
            return "WRONG", "refused, but the kernel has what this mode needs: " + why
        return "refused", why
    if status != 0:
        told = [line for line in text.splitlines() if ".c:" in line] or text.splitlines()[-1:] or ["no output"]
        return "WRONG", "status %s: %s" % (status, told[0].strip())
    if cell["mode"] == "auto" and stats is not None and stats["settings"]["faults"] == "thread":
        return "WRONG", "auto took a mode in which memory can be wrong"
    if stats is None or stats["counters"]["evict_taken"] == 0:
        return "WRONG", "nothing was evicted"
    return "right", "peak %d %%" % round(100 * stats["tree_anonymous_peak"] / stats["settings"]["ram_bytes"])


def cells(text):
    """Yields the cells of a guest's output."""
    for part in text.split("@@begin ")[1:]:
        head, _, rest = part.partition("\n")
        user, mode, program = head.split("|")
        end = re.search(r"^@@end (\d+)", rest, re.M)
        stats = re.search(r"^@@stats (\{.*\})$", rest, re.M)
        said = re.split(r"^@@", rest, maxsplit=1, flags=re.M)[0]
        yield {"user": user, "mode": mode, "program": program, "text": said, "status": int(end.group(1)) if end else None,
               "stats": json.loads(stats.group(1)) if stats else None}


def tested(series, arguments, script):
    """Returns rows of the table for one kernel, and how many are wrong."""
    began = time.monotonic()
    kernel, packages = fetched_kernel(series, arguments.refresh)
    for package in packages:
        print("%s: %s %s, SHA-256 %s" % (series, package["Package"], package["Version"], package["SHA256"]), flush=True)
    text = boot(kernel, initramfs(kernel, script), arguments.append)
    release = re.search(r"^@@kernel (\S+)", text, re.M)
    if not release:
        raise Trouble("kernel %s did not start its init: see %s/console.log" % (series, kernel))
    version = tuple(int(number) for number in re.match(r"(\d+)\.(\d+)", release.group(1)).groups())
    rows, wrong = [], 0
    for cell in cells(text):
        if cell["program"] == "doctor":
            use = [line for line in cell["text"].splitlines() if line.startswith("farpage run")]
            rows.append((release.group(1), cell["user"], "`farpage doctor`", "", "status %s" % cell["status"], " ".join(use)))
            continue
        outcome, why = verdict(cell, version)
        wrong += outcome == "WRONG"
        rows.append((release.group(1), cell["user"], cell["mode"], cell["program"], outcome, why))
    if "@@done" not in text:
        wrong += 1
        rows.append((release.group(1), "", "", "", "WRONG", "the guest did not come to its end: see %s" % kernel))
    print("%s: %d cells, %d wrong, %d s" % (series, len(rows), wrong, time.monotonic() - began), flush=True)
    return rows, wrong


def chosen(known, wanted, separator):
    names = [name.strip() for name in wanted.split(separator) if name.strip()]
    for name in names:
        if name not in known:
            raise Trouble("`%s` is none of: %s" % (name, ", ".join(known)))
    return [name for name in known if name in names] if names else list(known)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", default="")
    parser.add_argument("--only", default="", help="modes, with `;` between them")
    parser.add_argument("--programs", default="", help="programs, with `;` between them")
    parser.add_argument("--append", default="", help="more parameters for the kernels")
    parser.add_argument("--refresh", action="store_true", help="look for newer packages")
    parser.add_argument("--jobs", type=int, default=2, help="kernels at a time")
    arguments = parser.parse_args()
    series = chosen(SUITES, arguments.kernels, " ")
    titles = chosen([row[0] for row in PROGRAMS], arguments.programs, ";")
    script = guest_script(chosen(MODES, arguments.only, ";"), [row for row in PROGRAMS if row[0] in titles])
    build_programs()
    table, wrong = [], 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {name: pool.submit(tested, name, arguments, script) for name in series}
        for name, job in runs.items():
            try:
                rows, bad = job.result()
            except (Trouble, OSError, ValueError, subprocess.SubprocessError) as error:
                rows, bad = [(name, "", "", "", "NOT RUN", str(error).splitlines()[0])], 1
                print("vm: %s" % error, file=sys.stderr)
            table, wrong = table + rows, wrong + bad
    lines = ["| kernel | user | mode | program | outcome | peak, or why |", "|---|---|---|---|---|---|"]
    lines += ["| %s |" % " | ".join(part.replace("|", "/") for part in row) for row in table]
    with open(os.path.join(PLACE, "table.md"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    print("Logs: %s/kernels/*/{console,results}.log" % PLACE)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Trouble as error:
        sys.exit("vm: %s" % error)
