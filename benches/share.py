"""The share of time that is spent in the library itself: samples the loops of the bench `profile` with `perf`.

A sample counts for the crate whose source it is in, seen through inlined functions; the standard library counts for whoever
called it, where it was inlined. Only the client's process counts, not the server. Argument: the file of results.
"""

import bisect
import collections
import json
import os
import re
import subprocess
import sys
import tempfile

# Store, work, tasks, seconds.
LOOPS = [
    ("memory", "first", 1, 2),
    ("memory", "replay", 1, 4),
    ("redis", "first", 64, 6),
    ("redis", "replay", 1, 6),
    ("redis", "replay", 64, 6),
    ("redis", "replay", 1024, 6),
    ("postgres", "first", 64, 6),
    ("postgres", "replay", 64, 6),
]
GROUPS = {
    "idem": ("idem-runtime", "idem-macros"),
    "client": ("redis", "tokio-postgres", "postgres-protocol", "postgres-types", "deadpool", "deadpool-postgres", "combine"),
    "tokio": ("tokio", "tokio-util", "mio", "futures-util", "futures-core", "futures-channel", "parking_lot"),
    "serde": ("serde", "serde_core", "serde_json", "itoa", "ryu", "zmij", "memchr"),
    "bench": ("benches",),
}
COLUMNS = [*GROUPS, "other crates", "std", "libc", "kernel"]


def program():
    """The path of the bench's program, which cargo has built."""
    built = subprocess.run(
        "cargo bench --locked -p idem-benches --bench profile --no-run --message-format json".split(),
        check=True, capture_output=True, text=True,
    )
    artifacts = [json.loads(line) for line in built.stdout.splitlines()]
    return next(it["executable"] for it in artifacts if it.get("target", {}).get("name") == "profile" and it.get("executable"))


def group_of(path):
    """The group that a source file belongs to; None for the standard library."""
    if "/rustc/" in path or "/rustlib/" in path or path.startswith("??"):
        return None
    crate = re.search(r"/registry/src/[^/]+/(.+?)-\d+\.\d+", path)
    crate = crate.group(1) if crate else next((it for it in ("idem-runtime", "idem-macros", "benches") if f"/{it}/" in path), "")
    return next((group for group, crates in GROUPS.items() if crate in crates), "other crates")


class Symbols:
    """The source files to which an address of the program belongs, the innermost inlined function first."""

    def __init__(self, binary):
        self.binary = binary
        headers = subprocess.run(["readelf", "-lW", binary], check=True, capture_output=True, text=True).stdout
        found = re.findall(r"LOAD\s+0x(\w+) 0x(\w+) 0x\w+ 0x(\w+)", headers)
        self.segments = sorted(tuple(int(it, 16) for it in segment) for segment in found)

    def address(self, offset):
        """The address to which an offset in the file is linked."""
        at = bisect.bisect_right(self.segments, (offset, float("inf"), 0)) - 1
        start, linked, _ = self.segments[at]
        return offset - start + linked

    def files(self, addresses):
        addresses = sorted(addresses)
        # `-a` prints each address before its functions.
        asked = "\n".join(hex(address) for address in addresses)
        told = subprocess.run(["addr2line", "-a", "-i", "-e", self.binary], input=asked, check=True, capture_output=True, text=True)
        files, at = collections.defaultdict(list), None
        for line in told.stdout.splitlines():
            if re.fullmatch(r"0x[0-9a-f]+", line):
                at = int(line, 16)
            else:
                files[at].append(line)
        return files


def sample(binary, loop):
    store, work, tasks, seconds = loop
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "perf.data")
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "997", "-o", data, binary, "--bench"]
        done = subprocess.run([*command, store, work, str(tasks), str(seconds)], check=True, capture_output=True, text=True)
        calls = int(re.search(r"(\d+) calls", done.stdout).group(1))
        script = ["perf", "script", "-i", data, "--show-mmap-events", "-F", "comm,pid,ip,sym,dso"]
        text = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    return calls, text


def shares(symbols, text):
    """The share of each group, and the number of samples."""
    name = os.path.basename(symbols.binary)
    maps, samples, ours = [], [], None
    for line in text.splitlines():
        mapped = re.search(r"PERF_RECORD_MMAP2? (\d+)/\d+: \[0x(\w+)\(0x(\w+)\) @ (\w+) .* ([\w-]+) (\S+)$", line)
        if mapped:
            pid, start, length, offset, _, path = mapped.groups()
            if os.path.basename(path) == name:
                ours = ours or pid
                maps.append((pid, int(start, 16), int(length, 16), int(offset, 16)))
            continue
        sampled = re.match(r"\s*.*?\s(\d+)\s+([0-9a-f]+) (.*) \((.*)\)$", line)
        if sampled and sampled.group(1) == ours:
            samples.append((int(sampled.group(2), 16), sampled.group(4)))
    counted, addresses = collections.Counter(), []
    for ip, dso in samples:
        if os.path.basename(dso) == name:
            _, start, _, offset = next(it for it in maps if it[0] == ours and it[1] <= ip < it[1] + it[2])
            addresses.append(symbols.address(ip - start + offset))
        elif dso.startswith("[kernel") or dso.startswith("[unknown") or dso.endswith(".ko"):
            counted["kernel"] += 1
        else:
            counted["libc"] += 1
    files = symbols.files(set(addresses))
    for address in addresses:
        groups = (group_of(path) for path in files[address])
        counted[next((group for group in groups if group), "std")] += 1
    return {column: counted[column] / len(samples) for column in COLUMNS}, len(samples)


def main():
    os.environ.pop("IDEM_BENCH_QUICK", None)
    symbols = Symbols(program())
    print("| work |", " | ".join(COLUMNS), "| idem, ns of processor each |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    with open(sys.argv[1], "a", encoding="utf-8") as results:
        for loop in LOOPS:
            store, work, tasks, _ = loop
            calls, text = sample(symbols.binary, loop)
            share, samples = shares(symbols, text)
            each = samples / 997 * 1e9 / calls * share["idem"]
            title = f"{store}, {'first run' if work == 'first' else 'replay'}, {tasks} task{'s' if tasks > 1 else ''}"
            print(f"| {title} |", " | ".join(f"{share[it]:.0%}" for it in COLUMNS), f"| {each:.0f} |", flush=True)
            line = {"bench": "share", "table": "share", "work": title, "tasks": tasks, "share": share, "idem_ns": each}
            results.write(json.dumps(line) + "\n")


main()
