"""Runs unmodified programs of many kinds under two thirds of the memory they need, in every mode, as root and
as an ordinary user. Compares what they print with a run without Farpage, and samples their memory from
outside.

Usage: compat.py [--out FILE] [--only "NAME; ..."] [--fast]. Prints a table in Markdown, and writes it to
FILE. In FILE the rows of programs that aren't run stay as they are. Ends with 1 if any cell is wrong or
failed. `make compat` installs what this script needs and writes docs/compatibility.md. `--fast` is the part
that `make test` runs.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
# Directory with Farpage and the scripts that the programs are given. All are copies, because others may not
# look into this user's home.
TOOLS = "/var/tmp/compat-tools-%d" % os.getpid()
FARPAGE = os.path.join(TOOLS, "farpage")
PROGRAMS = TOOLS
NOBODY = 65534
MIB = 1 << 20
# Fraction of its budget up to which a cell says nothing but "right".
MOST = 1.05
# Smallest budget in bytes. A smaller one says more about what Farpage itself takes.
RAM_MIN = 28 * MIB
# Bytes that a program must need at least. A program that needs less isn't asked to do enough.
NEED_MIN = 15 * MIB
MODES = ("signal", "thread", "segv")
USERS = ("root", "ordinary user")
DEVICE = "/dev/userfaultfd"
# The system's directories come first: what is in root's home isn't there for others.
PATH = "/usr/bin:/bin:/usr/sbin:/sbin:" + os.environ["PATH"]

# Shell code that the scripts below call `lines N`. Prints N lines of a number, its hash in a few variants,
# and filler.
LINES = r"""awk -v n="$1" 'BEGIN { x = 1; for (i = 0; i < n; i++) { x = (x * 16807) % 2147483647;
  printf "%d %d some text that most lines have, item %d of group %d\n", x, i, x % 9973, x % 101 } }'"""

# Name, kind, the executables that it needs, a script for sh. The script prints its result, the same every
# time.
TABLE = [
    ("python3", "interpreter", ["python3"], 'python3 "$PROGRAMS/objects.py" 120 plain'),
    ("python3, forked workers", "interpreter", ["python3"], 'python3 "$PROGRAMS/workers.py" 60'),
    ("perl", "interpreter", ["perl"], r"""perl -e '
        for $i (1..600000) { $h{"key $i"} = "value " . $i * 7 x 3; }
        for $i (1..40000) { $s = ($s + length($h{"key " . ($i * 7919 % 600000 + 1)}) * $i) % 1000003; }
        print scalar(keys %h), " $s\n"'"""),
    ("ruby", "interpreter", ["ruby"], r"""ruby -e '
        a = Array.new(600_000) { |i| "string number #{i} " + ("x" * (i % 60)) }
        h = {}; a.each_with_index { |s, i| h[s] = i }
        puts a.size, (0...30_000).sum { |i| h[a[i * 7919 % 600_000]] * (i % 13) }'"""),
    ("node", "interpreter", ["node"], r"""node -e '
        const a = []; for (let i = 0; i < 900000; i++) a.push({ id: i, name: "item " + i, list: [i, i * 2, i * 3] });
        const m = new Map(a.map((o) => [o.name, o])); let s = 0;
        for (let i = 0; i < 40000; i++) s = (s + m.get("item " + (i * 7919 % 900000)).list[2] * (i % 17)) % 1000003;
        console.log(m.size, s)'"""),
    ("java", "interpreter", ["java"], r"""cat > T.java <<'X'
        import java.util.*;
        public class T { public static void main(String[] z) {
          Map<String, int[]> m = new HashMap<>(); long s = 0;
          for (int i = 0; i < 700000; i++) m.put("key " + i, new int[] { i, i * 2, i * 3, i % 5 });
          for (int i = 0; i < 40000; i++) s = (s + m.get("key " + (int) (i * 7919L % 700000))[2] * (long) (i % 17)) % 1000003;
          System.out.println(m.size() + " " + s); } }
X
        java -XX:+UseSerialGC -Xms300m -Xmx300m T.java"""),
    ("R", "interpreter", ["Rscript"], r"""Rscript --vanilla -e '
        set.seed(1); x <- runif(4e6); y <- sort(x); d <- data.frame(g = floor(x * 100), v = seq_along(x))
        cat(sprintf("%.12f\n", sum(y[seq(1, 4e6, 1000)])), format(sum(tapply(d$v, d$g, sum)), digits = 15), "\n")'"""),
    ("guile", "interpreter", ["guile"], r"""guile --no-auto-compile -c '
        (define n 1500000)
        (define l (let loop ((i 0) (a (quote ()))) (if (= i n) a (loop (+ i 1) (cons (cons i (number->string i)) a)))))
        (define v (list->vector (map (lambda (p) (+ (car p) (string-length (cdr p)))) l)))
        (display (let loop ((i 0) (s 0)) (if (= i n) s (loop (+ i 1) (+ s (* (modulo i 7) (vector-ref v i))))))) (newline)'"""),
    ("lua", "interpreter", ["lua5.4"], r"""lua5.4 -e '
        local t = {} for i = 1, 900000 do t[i] = { id = i, name = "item " .. i } end
        local s = 0 for i = 1, 40000 do local o = t[i * 7919 % 900000 + 1] s = (s + o.id * #o.name) % 1000003 end
        print(#t, s)'"""),
    ("php", "interpreter", ["php"], r"""php -d memory_limit=-1 -r '
        $a = []; for ($i = 0; $i < 800000; $i++) $a["key $i"] = ["id" => $i, "text" => str_repeat("x", $i % 50)];
        $s = 0; for ($i = 0; $i < 40000; $i++) { $o = $a["key " . ($i * 7919 % 800000)]; $s = ($s + $o["id"] * strlen($o["text"])) % 1000003; }
        echo count($a), " ", $s, "\n";'"""),
    ("tclsh", "interpreter", ["tclsh"], r"""cat > t.tcl <<'X'
        for {set i 0} {$i < 400000} {incr i} { dict set d "key $i" [list $i "some text $i"] }
        set s 0
        for {set i 0} {$i < 30000} {incr i} {
          set s [expr {($s + [lindex [dict get $d "key [expr {$i * 7919 % 400000}]"] 0] * ($i % 17)) % 1000003}] }
        puts "[dict size $d] $s"
X
        tclsh t.tcl"""),
    ("go, with C in it", "runtime", ["go", "gcc"], '"$PROGRAMS/tree-go"'),
    ("mono", "runtime", ["mono", "mcs"], 'mono "$PROGRAMS/tree.exe"'),
    ("ghc -threaded", "runtime", ["ghc"], '"$PROGRAMS/tree-hs" +RTS -N2'),
    ("ocaml", "runtime", ["ocamlopt"], '"$PROGRAMS/tree-ml"'),
    ("sbcl", "runtime", ["sbcl"], r"""cat > tree.lisp <<'X'
        (defun tree (d) (if (= d 0) 1 (cons (tree (1- d)) (tree (1- d)))))
        (defun sum (x) (if (numberp x) x (+ (sum (car x)) (sum (cdr x)))))
        (defun deep (n) (1+ (deep (1+ n))))
        (let ((kept (tree 21)))
          (dotimes (i 4) (assert (= (sum (tree 17)) (ash 1 17))) (gc :full t) (assert (= (sum kept) (ash 1 21))))
          (format t "~a ~a~%" (sum kept) (handler-case (deep 0) (storage-condition () "the stack is full"))))
X
        sbcl --noinform --non-interactive --load tree.lisp"""),
    ("erlang", "runtime", ["erl"], r"""erl -noshell -eval '
        Tree = fun T(0) -> 1; T(D) -> {T(D - 1), T(D - 1)} end,
        Sum = fun S({A, B}) -> S(A) + S(B); S(N) -> N end,
        Kept = Tree(20), Me = self(),
        [spawn(fun() -> Me ! Sum(Tree(15)) end) || _ <- lists:seq(1, 16)],
        Sums = [receive N -> N end || _ <- lists:seq(1, 16)],
        erlang:garbage_collect(), io:format("~p ~p~n", [Sum(Kept), lists:sum(Sums)]), halt().'"""),
    ("gawk", "interpreter", ["gawk"], r"""gawk 'BEGIN { for (i = 0; i < 800000; i++) a["key " i] = "value " i * 3;
        for (i = 0; i < 40000; i++) s = (s + length(a["key " (i * 7919 % 800000)]) * (i % 17)) % 1000003; print length(a), s }'"""),
    ("mawk", "interpreter", ["mawk"], r"""mawk 'BEGIN { for (i = 0; i < 900000; i++) a["key " i] = "value " i * 3;
        for (i = 0; i < 40000; i++) s = (s + length(a["key " (i * 7919 % 900000)]) * (i % 17)) % 1000003; print length(a), s }'"""),
    ("jq", "interpreter", ["jq"], r"""lines 250000 | jq -R -s 'split("\n") | map(split(" ")) | map(select(length > 5)) | group_by(.[9])
        | map([.[0][9], length, (map(.[0] | tonumber) | add)])' | sha256sum"""),
    ("numpy", "data", ["python3", "numpy"], r"""python3 -c '
import numpy as np
a = (np.arange(12_000_000, dtype=np.int64) * 2654435761) % 1000003
b = np.sort(a); c = np.fft.rfft(a[:4_000_000].astype(float))
print(b[::100000].sum(), round(float(abs(c[:1000]).sum()), 3), int((a * (np.arange(len(a)) % 7)).sum()))'"""),
    ("pandas", "data", ["python3", "pandas"], r"""python3 -c '
import pandas as pd
n = 1_500_000
d = pd.DataFrame({"k": [i * 7919 % 1009 for i in range(n)], "v": range(n), "s": ["text %d" % (i % 5000) for i in range(n)]})
g = d.groupby("k").v.agg(["sum", "max"]); m = d.merge(g, left_on="k", right_index=True)
print(int(m["sum"].sum() % 1000003), int(d.groupby("s").v.sum().sum()), len(m))'"""),
    ("sqlite3", "data", ["sqlite3"], r"""sqlite3 :memory: "PRAGMA cache_size = -1000000;
        CREATE TABLE t(id INTEGER PRIMARY KEY, c INTEGER, s TEXT);
        INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000)
          SELECT i, i * 7919 % 1009, printf('%.*c row %d', 200, 'x', i) FROM n;
        CREATE INDEX by_c ON t(c, s); SELECT count(*), sum(length(s) * c) FROM t WHERE c % 3 = 1; PRAGMA integrity_check;" """),
    ("redis-server, BGSAVE", "data", ["redis-server", "redis-cli"], r"""
        redis-server --port 0 --unixsocket "$PWD/s" --save '' --enable-debug-command yes > log 2>&1 &
        r="redis-cli -s $PWD/s"
        until $r ping > pong 2>&1 && grep -q PONG pong; do sleep 0.05; done
        $r debug populate 150000 key 500; $r bgsave > bg
        $r debug populate 20000 other 300
        while $r info persistence | grep -q rdb_bgsave_in_progress:1; do sleep 0.1; done
        $r info persistence | grep -o rdb_last_bgsave_status:ok; $r debug digest; $r debug reload; $r debug digest
        $r shutdown nosave; wait"""),
    ("memcached", "data", ["memcached", "python3"], r"""
        u=; [ "$(id -u)" != 0 ] || u='-u root'
        memcached $u -s "$PWD/s" -m 400 -t 2 & p=$!
        until [ -S s ]; do sleep 0.05; done
        python3 - "$PWD/s" <<'X'
import hashlib, socket, sys
c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1]); f = c.makefile("rb"); d = hashlib.sha256(); n = 120000
for a in range(0, n, 500):
    c.sendall(b"".join(b"set k%d 0 0 700\r\n%s\r\n" % (i, (b"%010d" % (i * 7919)) * 70) for i in range(a, a + 500)))
    assert all(f.readline() == b"STORED\r\n" for _ in range(500))
for a in range(0, n, 500):
    for i in range(a, a + 500):
        c.sendall(b"get k%d\r\n" % (i * 7919 % n))
        f.readline(); d.update(f.read(702)); assert f.readline() == b"END\r\n"
print(d.hexdigest())
X
        kill $p; wait"""),
    ("postgres, large work_mem", "data", ["postgres", "initdb"], r"""
        initdb -D d -U u --no-sync > log 2>&1
        printf '%s\n' "set work_mem = '400MB'; create temp table t as select i, i * 7919::bigint % 1009 as c, md5(i::text) as s from generate_series(1, 500000) i;" \
          "select md5(string_agg(s, '' order by s)), count(*) from t;" "select sum(n), max(m) from (select c, count(*) n, max(s) m from t group by c) x;" |
          postgres --single -D d -c shared_buffers=8MB -c fsync=off postgres 2> err | grep ' = '"""),
    ("sort", "tool", ["sort"], "lines 900000 > l; sort --parallel=2 -S 200M -k2.5,2n -k1 l | sha256sum"),
    ("gcc", "tool", ["gcc"], r"""awk 'BEGIN { for (i = 0; i < 700; i++) printf "int f%d(int *a, int n) { int s = %d; for (int i = 0; i < n; i++) s = s * 31 + a[i] %% (i + %d); return s; }\n", i, i, i + 1 }' > t.c
        gcc -O2 -S -o t.s t.c; sha256sum < t.s"""),
    ("g++", "tool", ["g++"], r"""awk 'BEGIN { print "#include <map>\n#include <string>\n#include <vector>\n#include <algorithm>"; for (i = 0; i < 60; i++)
          printf "struct K%d { int a; bool operator<(const K%d &o) const { return a < o.a; } };\nint g%d(std::map<K%d, std::vector<std::string>> &m) { int s = 0; for (auto &[k, v] : m) { std::sort(v.begin(), v.end()); s += k.a + v.size(); } return s; }\n", i, i, i, i }' > t.cc
        g++ -O2 -std=c++17 -S -o t.s t.cc; sha256sum < t.s"""),
    ("rustc", "tool", ["rustc"], r"""awk 'BEGIN { for (i = 0; i < 500; i++) printf "pub fn f%d(a: &[u32]) -> u32 { a.iter().enumerate().fold(%d, |s, (i, x)| s.wrapping_mul(31).wrapping_add(x %% (i as u32 + %d))) }\n", i, i, i + 1 }' > t.rs
        rustc --crate-type rlib --emit=llvm-ir -C opt-level=1 -C codegen-units=1 -o t.ll t.rs; sha256sum < t.ll"""),
    ("make -j2", "tool", ["make", "gcc"], r"""for i in 1 2 3 4 5 6; do awk -v m=$i 'BEGIN { for (i = 0; i < 250; i++) printf "int f%d_%d(int *a, int n) { int s = %d; for (int i = 0; i < n; i++) s = s * %d + a[i]; return s; }\n", m, i, i, i }' > $i.c; done
        printf 'all: 1.o 2.o 3.o 4.o 5.o 6.o\n%%.o: %%.c\n\tgcc -O2 -c -o $@ $<\n' > Makefile; make -j2 > log; cat ?.o | sha256sum"""),
    ("xz", "tool", ["xz"], "lines 80000 > l; xz -7 -T1 -k l; xz -dc l.xz | cmp - l; sha256sum < l.xz"),
    ("zstd", "tool", ["zstd"], "lines 120000 > l; zstd -q -12 --long=27 l; zstd -dc --long=27 l.zst | cmp - l; sha256sum < l.zst"),
    ("brotli", "tool", ["brotli"], "lines 40000 > l; brotli -q 10 -w 24 -k l; brotli -dc l.br | cmp - l; sha256sum < l.br"),
    ("7z", "tool", ["7z"], "lines 120000 > l; 7z a -mx=7 -mmt=1 -mtm=off -mtc=off -mta=off l.7z l > log; 7z x -so l.7z | cmp - l; wc -c < l.7z"),
    ("ImageMagick", "tool", ["convert-im6.q16"], r"""convert-im6.q16 -limit memory 2GiB -limit map 2GiB -size 2600x2600 -seed 7 gradient:red-blue \
        -rotate 30 -blur 0x2 -resize 70% -depth 8 rgb:o; wc -c < o; sha256sum < o"""),
    ("ffmpeg", "tool", ["ffmpeg"], r"""ffmpeg -v error -f lavfi -i testsrc2=size=1920x1080:rate=25 -frames:v 40 -c:v libx264 -preset slow -threads 2 \
        -f h264 -flags +bitexact o.h264; ffmpeg -v error -i o.h264 -f md5 -"""),
    ("git gc", "tool", ["git"], r"""export HOME=$PWD GIT_AUTHOR_DATE='1700000000 +0000' GIT_COMMITTER_DATE='1700000000 +0000'
        git init -q -b main r; cd r; git config user.email a@b; git config user.name a; git config pack.threads 1; git config gc.auto 0
        for i in 1 2 3 4 5 6 7 8; do lines $((30000 + i * 400)) > f$((i % 2)); git add .; git commit -q -m $i; done
        git gc -q --aggressive; git fsck --full 2>&1; git rev-parse HEAD; git log -p | sha256sum"""),
    ("diff", "tool", ["diff"], "lines 500000 > a; awk 'NR % 1000 != 7' a > b; diff a b | sha256sum"),
] + [
    ("stress-ng " + name, "stress", ["stress-ng"],
     "stress-ng --quiet --verify --oomable --timeout 60 %s && echo passed" % options)
    for name, options in [
        ("vm", "--vm 1 --vm-bytes 90m --vm-method all --vm-ops 60000"),
        ("mmap", "--mmap 1 --mmap-bytes 80m --mmap-ops 8"),
        ("mremap", "--mremap 1 --mremap-bytes 64m --mremap-ops 15"),
        ("madvise", "--madvise 1 --madvise-ops 30 --vm 1 --vm-bytes 80m --vm-keep --vm-ops 6000"),
        ("malloc", "--malloc 1 --malloc-bytes 90m --malloc-max 2000 --malloc-ops 20000"),
        ("brk", "--brk 1 --brk-ops 400000 --vm 1 --vm-bytes 80m --vm-keep --vm-ops 6000"),
        ("fork", "--fork 2 --fork-ops 2000 --vm 1 --vm-bytes 80m --vm-keep --vm-ops 6000"),
        ("pthread", "--pthread 1 --pthread-ops 3000 --vm 1 --vm-bytes 80m --vm-keep --vm-ops 6000"),
        ("sigsegv", "--sigsegv 1 --sigsegv-ops 3000 --vm 1 --vm-bytes 80m --vm-keep --vm-ops 6000"),
        ("userfaultfd", "--userfaultfd 1 --userfaultfd-bytes 64m --userfaultfd-ops 30000"),
        ("iomix", "--iomix 1 --iomix-bytes 64m --iomix-ops 3000 --vm 1 --vm-bytes 80m --vm-keep --vm-ops 6000"),
    ]
]

# Commands that compile these programs once for all cells, in TOOLS, because compilers aren't tested here. The
# programs make trees, a part of which stays while others come and go in several threads. An error that a
# program makes on purpose (a null pointer, a full stack) is a signal.
MADE = {
    "go, with C in it": r"""cat > tree.go <<'X'
        package main
        // #include <stdlib.h>
        import "C"
        import ("fmt"; "os/exec"; "sync")
        type node struct { left, right *node; value int }
        func tree(depth int) *node {
            if depth == 0 { return &node{value: 1} }
            return &node{tree(depth - 1), tree(depth - 1), depth}
        }
        func (n *node) sum() int { if n == nil { return 0 }; return n.value + n.left.sum() + n.right.sum() }
        func null(n *node) (text any) { defer func() { text = recover() }(); return n.value }
        func main() {
            kept := tree(20)
            var all sync.WaitGroup
            sums := make([]int, 8)
            for i := range sums {
                all.Add(1)
                go func() { defer all.Done(); for round := 0; round < 4; round++ { sums[i] += tree(15).sum() } }()
            }
            all.Wait()
            said, _ := exec.Command("echo", "a child").Output()
            fmt.Print(kept.sum(), sums, C.abs(-1), null(nil), string(said))
        }
X
        CGO_ENABLED=1 GOCACHE="$PWD/cache" go build -o tree-go tree.go""",
    "mono": r"""cat > tree.cs <<'X'
        using System; using System.Threading;
        class Node {
            public Node left, right; public int value;
            static Node Tree(int depth) {
                var node = new Node { value = depth };
                if (depth > 0) { node.left = Tree(depth - 1); node.right = Tree(depth - 1); }
                return node;
            }
            static long Sum(Node node) { return node == null ? 0 : node.value + Sum(node.left) + Sum(node.right); }
            static int Nulls(Node node) {
                int found = 0;
                for (int i = 0; i < 2000; i++)
                    try { Node one = i % 2 == 0 ? null : node; found += one.value / 1000; } catch (NullReferenceException) { found++; }
                return found;
            }
            static void Main() {
                var kept = Tree(19); var threads = new Thread[4]; var sums = new long[4];
                for (int i = 0; i < 4; i++) {
                    int at = i;
                    threads[i] = new Thread(() => { for (int k = 0; k < 4; k++) sums[at] += Sum(Tree(14)) + Nulls(kept); });
                    threads[i].Start();
                }
                foreach (var thread in threads) thread.Join();
                GC.Collect();
                Console.WriteLine(Sum(kept) + " " + string.Join(" ", sums));
            }
        }
X
        mcs -out:tree.exe tree.cs""",
    "ghc -threaded": r"""cat > tree.hs <<'X'
import Control.Concurrent
import Control.Monad
import qualified Data.Map.Strict as Map
data Tree = Leaf | Node !Int Tree Tree
tree :: Int -> Tree
tree 0 = Leaf
tree depth = Node depth (tree (depth - 1)) (tree (depth - 1))
sums :: Tree -> Int
sums Leaf = 1
sums (Node value left right) = value + sums left + sums right
main :: IO ()
main = do
  let known = Map.fromList [(i, show i) | i <- [0 .. 300000 :: Int]]
      kept = tree 18
  print (sums kept)
  places <- forM [1 .. 4 :: Int] $ \_ -> do { place <- newEmptyMVar; _ <- forkIO (putMVar place $! sums (tree 15)); return place }
  found <- mapM takeMVar places
  print (found, all (\(i, text) -> show i == text) (Map.toList known), sums kept)
X
        ghc -v0 -O -threaded -rtsopts -o tree-hs tree.hs""",
    "ocaml": r"""cat > tree.ml <<'X'
        type tree = Leaf | Node of int * tree * tree
        let rec tree depth = if depth = 0 then Leaf else Node (depth, tree (depth - 1), tree (depth - 1))
        let rec sum = function Leaf -> 1 | Node (value, left, right) -> value + sum left + sum right
        let rec deep n = 1 + deep (n + 1)
        let () =
          let kept = tree 20 in
          for _ = 1 to 4 do assert (sum (tree 16) = sum (tree 16)); Gc.compact () done;
          let is_full = try deep 0 > 0 with Stack_overflow -> true in
          Printf.printf "%d %b\n" (sum kept) is_full
X
        ocamlopt -o tree-ml tree.ml""",
}

FAST = ["perl", "gcc", "make -j2", "diff"]
# Programs that themselves refuse some user: that isn't Farpage's to decide.
NOT_AS = {("postgres, large work_mem", "root"): "refuses to run as root"}


def copy_tools():
    os.mkdir(TOOLS)
    os.chmod(TOOLS, 0o755)
    built = [os.path.join(TARGET, "release", name) for name in ("farpage", "libfarpage_preload.so")]
    for path in built + [os.path.join(ROOT, "tests", "programs", name) for name in ("objects.py", "workers.py")]:
        shutil.copy(path, TOOLS)


def has(needed):
    if needed in ("numpy", "pandas"):
        return subprocess.run(["/usr/bin/python3", "-c", "import " + needed], capture_output=True, check=False).returncode == 0
    return shutil.which(needed, path=PATH) is not None


def is_there_for(needed, user):
    """Whether a user may run the program."""
    if user == "root" or os.geteuid() != 0:
        return True
    found = shutil.which(needed, path=PATH)
    test = ["test", "-x", os.path.realpath(found)] if found else ["true"]
    return subprocess.run(test, user=NOBODY, group=NOBODY, extra_groups=[], check=False).returncode == 0


def tree(root):
    """Returns all processes below `root`, and `root` itself."""
    found, rest = [], [root]
    while rest:
        pid = rest.pop()
        found.append(pid)
        try:
            for task in os.listdir("/proc/%d/task" % pid):
                with open("/proc/%d/task/%s/children" % (pid, task)) as file:
                    rest.extend(int(child) for child in file.read().split())
        except OSError:
            pass
    return found


def anonymous(pid):
    """Returns a process's part of its anonymous memory in bytes: memory that is shared since a fork counts
    once for all.

    The kernel walks through the memory while the program runs on. Memory that moves from where the walk has
    been to where it is still to come counts twice: tens of MiB where the walk is held up. RssAnon is true at
    one moment. The larger of its values before and after the walk is the most that there can have been."""
    try:
        before = kib(pid, "status", "RssAnon")
        walked = kib(pid, "smaps_rollup", "Pss_Anon")
        return min(walked, max(before, kib(pid, "status", "RssAnon"))) * 1024
    except OSError:
        return 0


def kib(pid, file, name):
    """Returns the KiB in a line of a file of a process; 0 if there is no such line."""
    with open("/proc/%d/%s" % (pid, file)) as file:
        found = re.search(r"^%s:\s+(\d+) kB" % name, file.read(), re.M)
    return int(found.group(1)) if found else 0


def together(root):
    """Returns the bytes that all processes below `root` have. The processes are looked at one after the
    other. Memory that a process shares with a child that is made meanwhile counts for the process alone, and
    for the child in part once more. At the next look this is over, so the lesser of two looks is right."""
    return min(sum(anonymous(pid) for pid in tree(root)) for _ in range(2))


def unmanaged(root):
    """Returns the bytes of each kind of anonymous memory that Farpage leaves in RAM, as docs/user/limits.md
    says, in all processes below `root`. Memory that is mapped with MAP_STACK alone can't be told from other
    memory here."""
    kinds = dict.fromkeys(("locked", "executable", "for a stack", "read-only or inaccessible"), 0)
    for pid in tree(root):
        try:
            with open("/proc/%d/smaps" % pid) as file:
                mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", file.read(), flags=re.M)
        except OSError:
            continue
        for mapping in mappings:
            here = re.match(r"\S+ [r-]([w-])([x-])", mapping)
            size = re.search(r"^Anonymous:\s+(\d+) kB", mapping, re.M)
            if not here or not size:
                continue
            flags = re.search(r"^VmFlags:(.*)", mapping, re.M).group(1).split()
            kind = ("locked" if "lo" in flags else "executable" if here.group(2) == "x" else "for a stack" if "gd" in flags
                    else "read-only or inaccessible" if here.group(1) == "-" else None)
            if kind:
                kinds[kind] += int(size.group(1)) * 1024
    return kinds


class Run:
    """One run of a script in a directory of its own: what it printed, how it ended, the most that its
    processes had."""

    def __init__(self, script, before, is_root, seconds=600, most=None):
        """The run may have `most` bytes. When it has more, the kinds of its memory are looked at."""
        self.place = tempfile.mkdtemp(prefix="compat-", dir="/var/tmp")
        os.chmod(self.place, 0o777)
        with open(os.path.join(self.place, "script"), "w") as file:
            file.write("set -eu\nlines() { %s; }\n%s\n" % (LINES, script))
        # The environment has nothing that is there by accident: a user's settings, the shims of version
        # managers.
        environment = {"PATH": PATH, "LC_ALL": "C", "HOME": self.place, "PROGRAMS": PROGRAMS}
        if "JAVA_HOME" in os.environ:
            environment["JAVA_HOME"] = os.environ["JAVA_HOME"]
        for name in ("RUSTUP_HOME", "CARGO_HOME"):
            environment[name] = os.environ.get(name, os.path.join(os.path.expanduser("~"), "." + name[:-5].lower()))
        self.peak, self.most, self.unmanaged, self.seconds = 0, most, {}, time.monotonic()
        user = {} if is_root or os.geteuid() != 0 else {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        out, err = (open(os.path.join(self.place, name), "w+b") for name in (".out", ".err"))
        self.process = subprocess.Popen(before + ["sh", "script"], cwd=self.place, env=environment, stdin=subprocess.DEVNULL,
                                        stdout=out, stderr=err, start_new_session=True, **user)
        watcher = threading.Thread(target=self.watch)
        watcher.start()
        try:
            self.status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.status = "no end"
        finally:
            # Servers that are still there belong to the session that was started here.
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
            watcher.join()
        self.seconds = time.monotonic() - self.seconds
        self.out, self.err = (self.read(file) for file in (out, err))
        self.stats = self.json("stats.json")
        shutil.rmtree(self.place, ignore_errors=True)

    def watch(self):
        while self.process.poll() is None:
            now = together(self.process.pid)
            self.peak = max(self.peak, now)
            if self.most and now > self.most:
                self.unmanaged = max(self.unmanaged, unmanaged(self.process.pid), key=lambda kinds: sum(kinds.values()))
            time.sleep(0.05)

    @staticmethod
    def read(file):
        file.seek(0)
        with file:
            return file.read().decode(errors="replace")

    def json(self, name):
        try:
            with open(os.path.join(self.place, name)) as file:
                return json.load(file)
        except (OSError, ValueError):
            return None


def verdict(native, run, ram):
    """Returns what a cell says, and whether it is right; None if Farpage refused."""
    if run.status in (125, 126):
        reason = [line for line in run.err.splitlines() if line.startswith("farpage:")]
        return "refused: " + (reason[-1][9:] if reason else "?"), None
    if run.status != 0:
        return "**FAILED** (%s)" % run.status, False
    if run.out != native.out:
        return "**WRONG**", False
    if run.stats is None:
        return "**FAILED** (no statistics)", False
    if run.stats["counters"]["evict_taken"] == 0:
        return "right, nothing evicted", True
    over = run.peak / ram
    if over <= MOST:
        return "right", True
    kinds = ["%d MiB %s" % (size / MIB, kind) for kind, size in run.unmanaged.items() if size > ram / 20]
    return "right, at most %.2f of its budget" % over + (" (%s)" % ", ".join(kinds) if kinds else ""), True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--only", type=lambda names: [name.strip() for name in names.split(";")])
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args()
    users = USERS if os.geteuid() == 0 else USERS[1:]
    columns = [(mode, user) for mode in MODES for user in users]
    wanted = FAST if options.fast else options.only
    table = [row for row in TABLE if not wanted or row[0] in wanted]
    known, done, skipped = lines_in(options.out, columns), {}, []
    if known is None or (options.fast and options.out):
        parser.error("the table in %s has all modes, as root and as an ordinary user; this run hasn't" % options.out)
    mode_of_device = os.stat(DEVICE).st_mode if os.path.exists(DEVICE) else None
    is_opened = mode_of_device is not None and os.geteuid() == 0 and not options.fast
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if is_opened:
            os.chmod(DEVICE, 0o666)
        copy_tools()
        for name, kind, needs, script in table:
            peak, ram, cells = cells_of(name, needs, script, users, options.fast)
            if not cells:
                skipped.append(name)
                continue
            done[name] = line_of(name, kind, peak, ram, cells, columns)
            if options.out:
                # The table is written after each program, because all of them take an hour.
                rows = {**known, **done}
                write_table(options.out, columns, [rows[name] for name, *_ in TABLE if name in rows])
    finally:
        if is_opened:
            os.chmod(DEVICE, mode_of_device & 0o777)
        shutil.rmtree(TOOLS, ignore_errors=True)
    summary, is_wrong = summary_of(list(done.values()))
    print("\n".join(head_of(columns) + list(done.values())) + "\n\n" + summary)
    if skipped:
        print("Not here: %s." % ", ".join(skipped))
    if is_wrong or (skipped and os.environ.get("CI") == "true"):
        sys.exit(1)


def cells_of(name, needs, script, users, is_fast):
    missing = [needed for needed in needs if not has(needed)]
    if missing:
        print("%s: SKIPPED, %s is not installed" % (name, " ".join(missing)), flush=True)
        return None, None, {}
    if name in MADE:
        subprocess.run(["sh", "-ec", MADE[name]], cwd=TOOLS, check=True)
    is_root_able = (name, "root") not in NOT_AS
    native = Run(script, [], is_root_able and os.geteuid() == 0)
    if native.status != 0 or not native.out:
        print("%s: SKIPPED, without Farpage it ends with %s:\n%s" % (name, native.status, native.err[-2000:]), flush=True)
        return None, None, {}
    if native.peak < NEED_MIN:
        print("%s: SKIPPED, it needs only %d KiB and would test nothing" % (name, native.peak / 1024), flush=True)
        return None, None, {}
    ram = max(RAM_MIN, native.peak * 2 // 3 // MIB * MIB)
    cells = {}
    for mode in MODES:
        for user in users:
            if is_fast and (mode, user) != ("signal", users[-1]):
                continue
            if (name, user) in NOT_AS:
                cells[mode, user] = (NOT_AS[name, user], None)
                continue
            if not all(is_there_for(needed, user) for needed in needs):
                cells[mode, user] = ("the program isn't there for this user", None)
                continue
            before = [FARPAGE, "run", "--quiet", "--faults", mode, "--ram", str(ram), "--stats", "stats.json", "--"]
            run = Run(script, before, user == "root", most=ram * MOST)
            cells[mode, user] = verdict(native, run, ram)
            print("%s, %s, %s: %s; %.0f MiB of %.0f, %.1f s (%.1f)" % (
                name, mode, user, cells[mode, user][0], run.peak / MIB, ram / MIB, run.seconds, native.seconds), flush=True)
            if cells[mode, user][1] is False:
                print("--- it printed:\n%s\n%s\n--- and without Farpage:\n%s" % (
                    run.out[-1500:], run.err[-3000:], native.out[-1500:]), flush=True)
    return native.peak, ram, cells


def line_of(name, kind, peak, ram, cells, columns):
    shown = [cells.get(column, ("", None))[0].replace("|", "\\|") for column in columns]
    return "| %s | %s | %d | %d | %s |" % (name, kind, peak / MIB, ram / MIB, " | ".join(shown))


def head_of(columns):
    return ["| program | kind | needs MiB | has MiB | " + " | ".join("`%s`, %s" % column for column in columns) + " |",
            "|---|---|--:|--:|" + "---|" * len(columns)]


def lines_in(path, columns):
    """Returns the rows of an earlier table, by program; None if the table has other columns."""
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except (OSError, TypeError):
        return {}
    head = head_of(columns)
    if head[0] not in lines:
        return None
    rows = lines[lines.index(head[0]) + len(head):]
    return {row.split(" | ")[0][2:]: row for row in rows if row.startswith("| ")}


def summary_of(lines):
    """Returns a summary of the cells of all rows, and whether one of them is wrong."""
    cells = [cell for line in lines for cell in line.strip("| ").split(" | ")[4:] if cell.strip()]
    right = sum(cell.startswith("right") for cell in cells)
    wrong = sum(cell.startswith("**") for cell in cells)
    summary = "%d programs, %d cells: %d right, %d refused or not run, %d wrong or failed." % (
        len(lines), len(cells), right, len(cells) - right - wrong, wrong)
    return summary, wrong > 0


def write_table(out, columns, lines):
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    with open(out + ".new", "w") as file:
        file.write("""# Compatibility

Made by `make compat`. Each program runs unmodified, once without Farpage and once in each cell, with two
thirds of the memory that it needs.

A cell is *right* if the program printed the same bytes, and its processes together were never seen with
more than %.2f of the budget. Their memory is read 20 times a second. Otherwise the cell says what was seen.

Memory that Farpage doesn't manage counts, too: stacks, small, shared, locked, executable and read-only
mappings, files. A small program can be over its budget by that alone. A cell above the budget names the kinds
of such memory: locked, executable, for a stack, read-only. The cell leaves out kinds with less than a
twentieth of the budget. It also leaves out memory mapped with MAP_STACK, which can't be told from other
memory. `stress-ng mmap` maps 80 MiB of that now and then.

`thread` as an ordinary user has permission for `/dev/userfaultfd`.

%s, Linux %s, %d CPUs. %s

%s
""" % (MOST, datetime.date.today(), platform.release().split("-")[0], os.cpu_count(), summary_of(lines)[0],
       "\n".join(head_of(columns) + lines)))
    os.replace(out + ".new", out)


if __name__ == "__main__":
    main()
