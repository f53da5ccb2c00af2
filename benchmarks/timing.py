"""The clock and the record: interleaved, graph-replayed timing of peers on rotated inputs, the statistics, the state of the
machine, and the one result format (README.md) that every script here writes. Imports no framework until something is timed."""

import contextlib
import ctypes
import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1

# ---- the method ---------------------------------------------------------------------------------------------------

ROUNDS = 9
TARGET_MS = 6.0  # of one replay
LAUNCHES_MAX = 400  # in one graph
UNCAPTURED_MAX = 100  # launches in a row, where there is no graph
ROTATED_BYTES = 256 << 20  # that the sets of operands exceed together: several times a large card's L2
SETS_MAX = 24
SPIN_CYCLES = 200_000  # about 0.1 ms: a graph is enqueued meanwhile
# Two right results differ by roundings and the order of sums: the norm of their difference over the norm.
TOLERANCE = {"float16": 1e-2, "bfloat16": 2e-2, "float32": 1e-3}


class Unusable(Exception):
    """Why something asked for is not there; its text is for the user."""


@functools.cache
def cuda_torch():
    """torch, seeing a CUDA device, with TF32 off; else Unusable."""
    try:
        import torch
    except ImportError as error:
        raise Unusable(f"torch is needed to measure and is missing: {error}") from error
    if not torch.cuda.is_available():
        raise Unusable(f"a CUDA device is needed to measure: torch {torch.__version__} sees none")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


@functools.cache
def product():
    """tcgemm; else Unusable."""
    try:
        import tcgemm
    except ImportError as error:
        raise Unusable(f"tcgemm is not installed (pip install .): {error}") from error
    return tcgemm


@functools.cache
def _stream():
    """The stream that everything is captured and replayed on: libraries keep a workspace for each stream they see."""
    return cuda_torch().cuda.Stream()


def make_sets(problem, in_dtype, out_dtype=None, *, rotated_bytes=ROTATED_BYTES, sets_max=SETS_MAX):
    """Random normal operands (a, b, c), as many sets as exceed the L2 together: a launch finds its inputs in memory."""
    torch = cuda_torch()
    dtype, result = getattr(torch, in_dtype), getattr(torch, out_dtype or in_dtype)
    lead = (problem.batch,) if problem.batch > 1 else ()

    def normal(rows, cols, order):
        if order == "n":
            return torch.randn(*lead, rows, cols, device="cuda").to(dtype)
        return torch.randn(*lead, cols, rows, device="cuda").to(dtype).transpose(-1, -2)

    count = max(1, min(sets_max, math.ceil(rotated_bytes / problem.set_bytes(in_dtype, out_dtype))))
    return [
        (
            normal(problem.m, problem.k, problem.order[0]),
            normal(problem.k, problem.n, problem.order[1]),
            torch.empty(*lead, problem.m, problem.n, device="cuda", dtype=result),
        )
        for _ in range(count)
    ]


def relative_error(result, expected):
    """|result - expected| / |expected|; infinite where it is NaN."""
    wide = expected.float()
    error = ((result.float() - wide).norm() / wide.norm().clamp_min(1e-30)).item()
    return error if error == error else math.inf


class _Runner:
    """One peer, ready to be timed: a graph, or back-to-back launches where it cannot be captured."""

    def __init__(self, function, sets, target_ms):
        torch = cuda_torch()
        self.function, self.sets = function, sets
        for operands in sets:
            function(*operands)
        torch.cuda.synchronize()
        probed = sets[:4]
        estimate_ms = max(self._elapsed_ms(lambda: [function(*operands) for operands in probed]) / len(probed), 1e-3)
        self.launches = max(len(sets), min(LAUNCHES_MAX, int(target_ms / estimate_ms) + 1))
        try:
            self.graph = self._capture()
            self.graph.replay()
            torch.cuda.synchronize()
        except Exception:
            torch.cuda.synchronize()  # raises where the device itself is lost
            self.graph = None
            self.launches = min(self.launches, max(len(sets), UNCAPTURED_MAX))

    def _capture(self):
        torch = cuda_torch()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            self._launch_all()
        finally:
            graph.capture_end()
        return graph

    def _launch_all(self):
        for i in range(self.launches):
            self.function(*self.sets[i % len(self.sets)])

    @staticmethod
    def _elapsed_ms(enqueue, spin_cycles=0, meanwhile=None):
        torch = cuda_torch()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if spin_cycles:
            torch.cuda._sleep(spin_cycles)
        before.record()
        enqueue()
        after.record()
        if meanwhile:
            meanwhile()
        torch.cuda.synchronize()
        return before.elapsed_time(after)

    def sample_us(self, meanwhile=None):
        """One replay's time, per launch. `meanwhile` is called while it runs."""
        if self.graph:
            return self._elapsed_ms(self.graph.replay, SPIN_CYCLES, meanwhile) * 1e3 / self.launches
        return self._elapsed_ms(self._launch_all, 0, meanwhile) * 1e3 / self.launches


def time_together(functions, sets, *, rounds=ROUNDS, target_ms=TARGET_MS, tolerance=None, meanwhile=None):
    """Times functions(a, b, c), which write c, interleaved: (name -> time as in README.md, name -> why it has none).

    With a tolerance, results on the first set are compared with those of the first function that runs; a wrong one is
    not timed. `meanwhile` is called once, under load."""
    torch = cuda_torch()
    runners, failed = {}, {}
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = reference = None
        for name, function in functions.items():
            try:
                c = sets[0][2]
                if tolerance is not None:
                    c.fill_(math.nan)
                    function(*sets[0])
                    if expected is None:
                        expected, reference = c.clone(), name
                    elif (error := relative_error(c, expected)) > tolerance:
                        failed[name] = f"wrong: relative error {error:.2g} against {reference}"
                        continue
                runners[name] = _Runner(function, sets, target_ms)
            except Exception as error:
                failed[name] = one_line(error)
                torch.cuda.synchronize()
        expected = None
        samples = {name: [] for name in runners}
        names = list(runners)
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                last = meanwhile is not None and number == rounds - 1 and name == names[0]
                samples[name].append(runners[name].sample_us(meanwhile if last else None))
    torch.cuda.current_stream().wait_stream(stream)
    return {name: summary(values, graph=runners[name].graph is not None) for name, values in samples.items()}, failed


def free_memory():
    """Gives what a shape took back to the driver: the next one's sizes differ."""
    cuda_torch().cuda.empty_cache()


def one_line(error, limit=200):
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ---- statistics ----------------------------------------------------------------------------------------------------


def summary(samples_us, graph=True):
    """A time as in README.md: the median of the samples and their quartiles, microseconds."""
    if len(samples_us) > 1:
        q1, _, q3 = statistics.quantiles(samples_us, n=4, method="inclusive")
    else:
        q1 = q3 = samples_us[0]
    return {
        "us": _round(statistics.median(samples_us)),
        "q1_us": _round(q1),
        "q3_us": _round(q3),
        "rounds": len(samples_us),
        "graph": graph,
    }


def _round(value, digits=5):
    """To so many significant digits, which is more than a clock repeats."""
    return (
        value
        if not value or not math.isfinite(value)
        else round(value, digits - 1 - math.floor(math.log10(abs(value))))
    )


def geomean(values):
    """NaN of none."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def tflops(flops, us):
    return flops / us / 1e6


def ratio(row, peer):
    """That peer's time over tcgemm's: above 1, tcgemm is faster. None where one of them has no time."""
    times = row["times"]
    return times[peer]["us"] / times["tcgemm"]["us"] if peer in times and "tcgemm" in times else None


# ---- the machine ---------------------------------------------------------------------------------------------------

_ATTRIBUTES = {"sms": 16, "l2_bytes": 38, "major": 75, "minor": 76}  # CUdevice_attribute
_STATE = ("sm_mhz", "sm_max_mhz", "memory_mhz", "power_w", "temperature_c")


class _Nvml:
    """Clocks, power and temperature of one card by NVML; every reading is None where it cannot be had."""

    def __init__(self, uuid):
        self.library = self.handle = None
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            if not library.nvmlInit_v2() and not library.nvmlDeviceGetHandleByUUID(
                uuid.encode(), ctypes.byref(handle)
            ):
                self.library, self.handle = library, handle

    def read(self, function, *arguments):
        if self.handle is None:
            return None
        value = ctypes.c_uint()
        try:
            failed = getattr(self.library, function)(self.handle, *arguments, ctypes.byref(value))
        except AttributeError:
            return None
        return None if failed else value.value

    def sm_mhz(self):
        return self.read("nvmlDeviceGetClockInfo", 1)

    def power_limit_w(self):
        limit = self.read("nvmlDeviceGetEnforcedPowerLimit")
        return None if limit is None else limit / 1e3

    def state(self):
        power = self.read("nvmlDeviceGetPowerUsage")
        return dict(
            zip(
                _STATE,
                (
                    self.sm_mhz(),
                    self.read("nvmlDeviceGetMaxClockInfo", 1),
                    self.read("nvmlDeviceGetClockInfo", 2),
                    None if power is None else power / 1e3,
                    self.read("nvmlDeviceGetTemperature", 0),
                ),
            )
        )

    def driver(self):
        text = ctypes.create_string_buffer(96)
        if self.library is None or self.library.nvmlSystemGetDriverVersion(text, len(text)):
            return None
        return text.value.decode()


@functools.cache
def card():
    """What the driver says of the device that is measured, CUDA's first; all None where there is none."""
    about = dict.fromkeys(("card", "compute_capability", "sms", "l2_bytes", "memory_bytes", "cuda", "uuid"))
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return about
    device, number = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return about
    values = {}
    for name, attribute in _ATTRIBUTES.items():
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        values[name] = number.value
    text, uuid, memory = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
    driver.cuDeviceGetName(text, len(text), device)
    driver.cuDeviceGetUuid(uuid, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    driver.cuDriverGetVersion(ctypes.byref(number))
    digits = bytes(uuid).hex()
    return {
        "card": text.value.decode(),
        "compute_capability": [values["major"], values["minor"]],
        "sms": values["sms"],
        "l2_bytes": values["l2_bytes"],
        "memory_bytes": memory.value,
        "cuda": f"{number.value // 1000}.{number.value % 1000 // 10}",
        "uuid": "GPU-" + "-".join(digits[i:j] for i, j in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))),
    }


@functools.cache
def sensors():
    return _Nvml(card()["uuid"] or "")


def _version(*distributions):
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def machine():
    """The `machine` of a result, but for `after`."""
    about = {key: value for key, value in card().items() if key != "uuid"}
    torch = sys.modules.get("torch")
    return {
        **about,
        "driver": sensors().driver(),
        "power_limit_w": sensors().power_limit_w(),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "torch_cuda": torch.version.cuda if torch else None,
        "cupy": _version("cupy", "cupy-cuda13x", "cupy-cuda12x"),
        "jax": _version("jax"),
        "triton": _version("triton"),
        "before": sensors().state(),
    }


def commit():
    """Of the source tree, with `+` where it has changes outside results/; None outside a repository, unless
    TCGEMM_BENCH_COMMIT names it (a copy of the tree has no history)."""

    def git(*arguments):
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60)
        return done.stdout if done.returncode == 0 else None

    if named := os.environ.get("TCGEMM_BENCH_COMMIT"):
        return named
    try:
        head = git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
        if head is None:
            return None
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.strip() + ("+" if changed else "")


def command(argv=None):
    """The command line, the script as seen from the root of the repository."""
    script, *arguments = argv or sys.argv
    path = Path(script).resolve()
    return shlex.join(["python", str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name, *arguments])


# ---- the result ----------------------------------------------------------------------------------------------------

_NUMBER = (int, float)
_TEXT = (str,)
_SHAPE = {"m": (int,), "n": (int,), "k": (int,), "order": _TEXT, "in_dtype": _TEXT}
_COLUMNS = {
    "bench": {
        "suite": _TEXT,
        **_SHAPE,
        "batch": (int,),
        "out_dtype": _TEXT,
        "flops": (int,),
        "times": (dict,),
        "failed": (dict,),
    },
    "host": {
        "case": _TEXT,
        "framework": (str, type(None)),
        "us": _NUMBER,
        "q1_us": _NUMBER,
        "q3_us": _NUMBER,
        "calls": (int,),
    },
    "ladder": {"family": _TEXT, **_SHAPE, "time": (dict,), "tflops": _NUMBER, "of_torch": (int, float, type(None))},
    "ceilings": {"what": _TEXT, "us": _NUMBER},
    "tune": {
        **_SHAPE,
        "batch": (int,),
        "out_dtype": _TEXT,
        "times": (dict,),
        "choice": _TEXT,
        "best": _TEXT,
        "loss": _NUMBER,
    },
    "numerics": {},
    "distributed": {"case": _TEXT, "m": (int,), "n": (int,), "k": (int,), "processes": (int,), "times": (dict,)},
}
KINDS = tuple(_COLUMNS)
_HEAD = {
    "command": _TEXT,
    "date": _TEXT,
    "commit": (str, type(None)),
    "tcgemm": (str, type(None)),
    "machine": (dict,),
    "settings": (dict,),
    "missing": (dict,),
    "complete": (bool,),
    "rows": (list,),
}
_TIME = {"us": _NUMBER, "q1_us": _NUMBER, "q3_us": _NUMBER, "rounds": (int,), "graph": (bool,)}


def check(result):
    """ValueError, with the place, where `result` is not what README.md's result format says. Further keys are allowed."""
    if not isinstance(result, dict):
        raise ValueError(f"result: expected an object, got {type(result).__name__}")
    if result.get("schema") != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA}, got {result.get('schema')!r}")
    if result.get("kind") not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {result.get('kind')!r}")
    _check_columns("", result, _HEAD)
    for state in ("before", "after"):
        _check_columns("machine.", result["machine"], {state: (dict,)})
    for i, row in enumerate(result["rows"]):
        place = f"rows[{i}]."
        if not isinstance(row, dict):
            raise ValueError(f"rows[{i}]: expected an object, got {type(row).__name__}")
        _check_columns(place, row, _COLUMNS[result["kind"]])
        for name, entry in row["times"].items() if "times" in _COLUMNS[result["kind"]] else ():
            _check_columns(f"{place}times.{name}.", entry, _TIME)
        if "time" in _COLUMNS[result["kind"]]:
            _check_columns(f"{place}time.", row["time"], _TIME)


def _check_columns(place, entry, columns):
    for key, types in columns.items():
        if key not in entry:
            raise ValueError(f"{place}{key}: is missing")
        value = entry[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            raise ValueError(f"{place}{key}: expected {names}, got {value!r:.60}")


def read(path):
    """The result stored at `path`, checked."""
    result = json.loads(Path(path).read_text())
    try:
        check(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return result


def write(path, result):
    """Checks `result` and stores it at `path`, one row a line: the file is whole or as it was."""
    check(result)
    head = {key: value for key, value in result.items() if key != "rows"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": ['
    text += ",".join("\n  " + json.dumps(row) for row in result["rows"]) + "\n ]\n}\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    temporary.replace(path)


class Record:
    """A result while it is made. As a context it survives an interrupt: what was done is finished and, with a path,
    stored, with `complete` false."""

    def __init__(self, kind, settings, path=None):
        try:
            version = product().__version__
        except Unusable:
            version = None
        self.path = path
        self.interrupted = False
        self.result = {
            "schema": SCHEMA,
            "kind": kind,
            "command": command(),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": commit(),
            "tcgemm": version,
            "machine": machine(),
            "settings": settings,
            "missing": {},
            "complete": False,
            "rows": [],
        }

    @property
    def rows(self):
        return self.result["rows"]

    @property
    def missing(self):
        return self.result["missing"]

    def __enter__(self):
        self._handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, kind, error, traceback):
        signal.signal(signal.SIGTERM, self._handler)
        self.result["machine"]["after"] = sensors().state()
        self.result["complete"] = kind is None
        self.interrupted = kind is KeyboardInterrupt
        if self.path:
            write(self.path, self.result)
            print(f"{len(self.rows)} rows: {self.path}", file=sys.stderr)
        if self.interrupted:
            print("interrupted: what was done is kept", file=sys.stderr)
        return self.interrupted


# ---- the terminal --------------------------------------------------------------------------------------------------


class Progress:
    """A bar with the time left: tqdm's where it is installed, else a plain line every few seconds. Writes to stderr."""

    EVERY_SECONDS = 5

    def __init__(self, total, label=""):
        self.total, self.done, self.label = total, 0, label
        self.started = self.told = time.monotonic()
        try:
            from tqdm import tqdm
        except ImportError:
            self.bar = None
        else:
            self.bar = tqdm(total=total, desc=label, file=sys.stderr, dynamic_ncols=True, smoothing=0.1, leave=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.bar.close()

    def print(self, line):
        """A line of the table, to stdout, above the bar."""
        if self.bar is not None:
            self.bar.clear()
        print(line, flush=True)
        if self.bar is not None:
            self.bar.refresh()

    def step(self):
        self.done += 1
        if self.bar is not None:
            self.bar.update()
            return
        now = time.monotonic()
        if now - self.told >= self.EVERY_SECONDS:
            self.told = now
            left = (now - self.started) / self.done * (self.total - self.done)
            print(f"{self.label} {self.done}/{self.total}, {clock(left)} left", file=sys.stderr, flush=True)


def clock(seconds):
    """75 -> 1:15."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def table(rows, header):
    """Lines of a text table: the first column to the left, the others to the right."""
    cells = [list(map(str, line)) for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
        )
        for line in cells
    ]


def run_main(main):
    """Runs a script's main(): a missing tool or bad argument ends it with one line, an interrupt with 130."""
    try:
        sys.exit(main())
    except Unusable as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
