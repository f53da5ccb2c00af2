"""What a folder of results holds: of each kind and suite the best record, and the command that makes one that is missing.
Shared by plots.py, tables.py and performance.ipynb; needs nothing outside the standard library."""

import bisect
from pathlib import Path

import timing

RESULTS = timing.ROOT / "benchmarks" / "results"

# What records all that is shown, in the order of running, from the root of the repository. A result's own `command`
# says how it was really made.
COMMANDS = {
    "ceilings": "python benchmarks/ceilings.py --json benchmarks/results/ceilings.json",
    "all": "python benchmarks/bench.py --suite all --peers torch,cublaslt --floor --json benchmarks/results/all.json",
    "float16": "python benchmarks/bench.py --suite square,llm --dtype float16 --peers torch,cublaslt --json benchmarks/results/bench_fp16.json",
    "random": "python benchmarks/bench.py --suite random --peers torch --json benchmarks/results/random.json",
    "cliff": "python benchmarks/bench.py --suite cliff --peers torch --json benchmarks/results/cliff.json",
    "steps": "python benchmarks/bench.py --suite steps --peers torch,cublaslt --json benchmarks/results/steps.json",
    "host": "python benchmarks/bench.py --suite host --json benchmarks/results/all_host.json",
    "ladder": "python benchmarks/ladder.py --size 4096,8192 --json benchmarks/results/ladder.json",
    "numerics": "python benchmarks/numerics.py --json benchmarks/results/numerics.json",
    "distributed": "python benchmarks/distributed.py --json benchmarks/results/distributed.json",
}

PEERS = {
    "tcgemm": "tcgemm",
    "invariant": "tcgemm, batch-invariant",
    "torch": "torch (cuBLAS)",
    "cublaslt": "cuBLASLt, best of 12",
    "cupy": "CuPy",
    "triton": "Triton",
}


def bench_command(dtype, suite=None):
    """Which of COMMANDS records that suite, or suites of that type."""
    return suite if suite in COMMANDS else dtype if dtype in COMMANDS else "all"


class Missing(Exception):
    """Nothing recorded has what was asked for; the text says which command records it."""

    def __init__(self, what, command):
        super().__init__(f"{what}: not recorded; {COMMANDS[command]}")


class Source:
    """Some rows of one result, and where they come from."""

    def __init__(self, path, result, rows):
        self.path = path
        self.result = result
        self.rows = rows

    @property
    def card(self):
        return self.result["machine"]["card"]

    def __str__(self):
        machine = self.result["machine"]
        parts = [machine["card"] or "no GPU"]
        parts += [f"{name} {machine[key]}" for name, key in _VERSIONS.items() if machine.get(key)]
        parts += [f"tcgemm {self.result['tcgemm']}", self.result["date"][:10]]
        return ", ".join(parts) + ("" if self.result["complete"] else ", interrupted")


_VERSIONS = {"driver": "driver", "CUDA": "torch_cuda", "torch": "torch"}


class Recorded:
    """The results in a folder. `refused`: the files that are none, with the reason."""

    def __init__(self, folder=RESULTS):
        self.folder = Path(folder)
        self.results, self.refused = [], {}
        for path in sorted(self.folder.glob("*.json")):
            try:
                self.results.append((path, timing.read(path)))
            except ValueError as error:
                self.refused[path.name] = str(error)
        # Complete ones before interrupted ones, then the newest first.
        self.results.sort(key=lambda pair: (pair[1]["complete"], pair[1]["date"]), reverse=True)

    def find(self, kind, what, command, keep=lambda row: True, card=None):
        """The rows that `keep` accepts, of the first result that has any; else Missing. All rows are of one run, so that
        their ratios mean something."""
        for path, result in self.results:
            if result["kind"] != kind or (card is not None and result["machine"]["card"] != card):
                continue
            if rows := [row for row in result["rows"] if keep(row)]:
                return Source(path, result, rows)
        raise Missing(what + (f" on {card}" if card else ""), command)

    def suite(self, suite, dtype):
        """The products of a suite that have a time of tcgemm and one of torch."""

        def keep(row):
            return row["suite"] == suite and row["in_dtype"] == dtype and {"tcgemm", "torch"} <= row["times"].keys()

        return self.find("bench", f"suite {suite}, {dtype}", bench_command(dtype, suite), keep)

    def host(self):
        return self.find("host", "what a call costs the host", "host")

    def ladder(self):
        return self.find("ladder", "the ladder of families", "ladder")

    def ceilings(self, card):
        return self.find("ceilings", "ceilings", "ceilings", card=card)

    def distributed(self):
        return self.find("distributed", "a product over several GPUs", "distributed")

    def numerics(self, what, **fields):
        def keep(row):
            return row["what"] == what and all(row.get(key) == value for key, value in fields.items())

        return self.find("numerics", f"numerics, {what}", "numerics", keep)


def peers(rows):
    """Those with a time in any of the rows, tcgemm first."""
    found = {peer for row in rows for peer in row["times"]}
    return sorted(found, key=lambda peer: (list(PEERS).index(peer) if peer in PEERS else len(PEERS), peer))


def us(row, peer="tcgemm"):
    return row["times"][peer]["us"]


def tflops(row, peer="tcgemm"):
    return timing.tflops(row["flops"], us(row, peer))


def ratios(rows, peer="torch"):
    """That peer's time over tcgemm's, of the rows where it has one: above 1, tcgemm is faster."""
    return [ratio for row in rows if (ratio := timing.ratio(row, peer)) is not None]


def top_rate(ceilings, dtype, mode):
    """(TFLOP/s, its name) of the fastest instruction for `dtype`; None where none was measured."""
    rates = [
        (row["tflops"], row["what"]) for row in ceilings.rows if row.get("dtype") == dtype and row.get("mode") == mode
    ]
    return max(rates, default=None)


def read_floor(ceilings):
    """A function: the microseconds that a launch takes to read so many bytes, by straight lines between the measured
    sizes. None where none was measured."""
    points = sorted((row["bytes"], row["us"]) for row in ceilings.rows if row["what"] == "read")
    if not points:
        return None
    empty = [row["us"] for row in ceilings.rows if row["what"] == "launch"]
    points.insert(0, (0, min([*empty, points[0][1]])))

    def floor_us(count_bytes):
        upper = min(max(bisect.bisect_left(points, (count_bytes,)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[upper - 1 : upper + 1]
        return y0 + (y1 - y0) * (count_bytes - x0) / (x1 - x0)

    return floor_us


def read_rate(ceilings):
    """The fastest measured reading of memory, TB/s. None where none was measured."""
    return max((row["tbytes_per_s"] for row in ceilings.rows if row["what"] == "read"), default=None)
