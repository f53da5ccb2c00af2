"""What the card can do at best, to hold products against: rates of mma.sync, wgmma and FMA with no traffic, the time to read
so many bytes, an empty launch. Compiles ceilings.cu on first use, with nvcc, into the user's cache."""

import argparse
import ctypes
import functools
import hashlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import timing

SOURCE = Path(__file__).with_name("ceilings.cu")
KERNELS = timing.ROOT / "kernels"

WHAT = {"mma.sync": 0, "wgmma": 1, "fma": 2}  # as in ceilings.cu
DTYPE = {"bfloat16": 0, "float16": 1, "float32": 2}
INSTRUCTION = {
    "mma.sync": "mma.sync.m16n8k16",
    "wgmma": "wgmma.m64n256k16, operands in shared memory",
    "fma": "fma.rn.f32",
}
WARPS = (4, 8, 16)
WARPS_MAX = 16
WGMMA_WARPS = 8
READ_MB = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BLOCKS_PER_SM = (1, 2, 4)

BURST_MS = 2.0
SUSTAINED_MS = 20.0  # a launch
SECONDS = 1.0  # of such launches; the first half brings the card to its power limit
REST_SECONDS = 0.2  # before a burst


# ---- the library ---------------------------------------------------------------------------------------------------


class Library:
    """ceilings.cu, compiled for the card."""

    def __init__(self, path):
        self._library = ctypes.CDLL(str(path))
        self._library.tcg_error_text.restype = ctypes.c_char_p
        self._library.tcg_read.argtypes = [ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.POINTER(ctypes.c_float)]

    def __getattr__(self, name):
        return getattr(self._library, name)

    def check(self, error):
        if error:
            raise RuntimeError(f"ceilings.cu: {self._library.tcg_error_text(error).decode()}")


def cache_folder():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tcgemm"


def compiled(compute_capability):
    """The library's path; compiles it where the sources, the compiler or the card are new. Unusable where it cannot."""
    sys.path.insert(0, str(timing.ROOT))
    try:
        from buildtools import toolkit

        found = toolkit.find()
    except ImportError as error:
        raise timing.Unusable(f"ceilings.cu cannot be compiled outside a source tree: {error}") from error
    except SystemExit as error:
        raise timing.Unusable(f"ceilings.cu cannot be compiled: {timing.one_line(error)}") from error
    finally:
        sys.path.pop(0)
    major, minor = compute_capability
    arch = f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    headers = [KERNELS / "abi.h", *KERNELS.glob("*.cuh"), *KERNELS.glob("ptx/*.cuh")]
    digest = hashlib.sha256(found.version.encode())
    for path in (SOURCE, *sorted(headers)):
        digest.update(path.read_bytes())
    library = cache_folder() / f"ceilings-sm_{arch}-{digest.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f".{os.getpid()}.part")
    line = [str(found.nvcc), "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-I{KERNELS}"]
    line += [f"-I{folder}" for folder in found.include]
    line += [f"-ccbin={word}" for word in found.host_cxx[:1]] + [f"-Xcompiler={word}" for word in found.host_cxx[1:]]
    line += ["-shared", "-Xcompiler=-fPIC", "-cudart=static", "-o", str(part), str(SOURCE)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise timing.Unusable(f"ceilings.cu does not compile: {timing.one_line(done.stderr + done.stdout, 600)}")
    part.replace(library)
    return library


@functools.cache
def library():
    """Unusable where there is no card or no compiler."""
    compute_capability = timing.card()["compute_capability"]
    if compute_capability is None:
        raise timing.Unusable("a CUDA device is needed to measure: the driver is missing or knows none")
    return Library(compiled(compute_capability))


# ---- measurements --------------------------------------------------------------------------------------------------


def supported(what):
    return what != "wgmma" or timing.card()["compute_capability"] == [9, 0]


def _rate(what, dtype, warps, iterations, launches):
    """(milliseconds of each launch, floating-point operations of one)."""
    ms, flops = (ctypes.c_float * launches)(), ctypes.c_double()
    arguments = WHAT[what], DTYPE[dtype], warps, iterations, launches
    library().check(library().tcg_rate(*arguments, ms, ctypes.byref(flops)))
    return list(ms), flops.value


@functools.cache
def _iterations_of_a_ms(what, dtype, warps):
    ms, _ = _rate(what, dtype, warps, 2000, 3)
    return 2000 / min(ms)


def rate(what, dtype, warps, mode="sustained", seconds=SECONDS):
    """A row of the record. burst: launches of about 2 ms on a card that has rested. sustained: the last half of so many
    seconds of launches without a pause."""
    if what == "wgmma":
        warps = WGMMA_WARPS
    a_ms = _iterations_of_a_ms(what, dtype, warps)
    if mode == "burst":
        time.sleep(REST_SECONDS)
        ms, flops = _rate(what, dtype, warps, max(1, int(BURST_MS * a_ms)), 5)
    else:
        launches = max(4, int(seconds * 1e3 / SUSTAINED_MS))
        ms, flops = _rate(what, dtype, warps, max(1, int(SUSTAINED_MS * a_ms)), launches)
        ms = ms[launches // 2 :]
    us = statistics.median(ms) * 1e3
    return {
        "what": what,
        "instruction": INSTRUCTION[what],
        "dtype": dtype,
        "warps_per_sm": warps,
        "mode": mode,
        "us": round(us, 2),
        "tflops": round(timing.tflops(flops, us), 2),
        "sm_mhz": timing.sensors().sm_mhz(),
    }


def read_us(read_bytes, rounds=9):
    """The time of one launch that reads so many bytes from memory, microseconds, back to back: the best of a few grids."""
    launches = 200 if read_bytes < 64 << 20 else 40
    us, times = ctypes.c_float(), []
    for blocks_per_sm in BLOCKS_PER_SM:
        library().check(library().tcg_read(read_bytes, blocks_per_sm, launches, rounds, ctypes.byref(us)))
        times.append(us.value)
    return round(min(times), 3)


def launch_us(rounds=9):
    us = ctypes.c_float()
    library().check(library().tcg_empty(1000, rounds, ctypes.byref(us)))
    return round(us.value, 3)


def plan(warps=WARPS):
    """(what, dtype, warps) of the rates that this card has."""
    tensor = [("mma.sync", dtype, count) for dtype in ("bfloat16", "float16") for count in warps]
    wgmma = [("wgmma", dtype, WGMMA_WARPS) for dtype in ("bfloat16", "float16")]
    return tensor + (wgmma if supported("wgmma") else []) + [("fma", "float32", WARPS_MAX)]


# ---- the script ----------------------------------------------------------------------------------------------------


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each sustained rate")
    parser.add_argument("--warps", type=_warps, default=WARPS, metavar="N,...", help="an SM, for mma.sync: 4,8,16")
    parser.add_argument(
        "--read-mb", type=_numbers, default=READ_MB, metavar="MB,...", help="sizes to read (2^20 bytes)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print what would be measured and do nothing")
    return parser.parse_args(argv)


def _numbers(text):
    numbers = tuple(int(part) for part in text.split(",") if part)
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, got {text!r}")
    return numbers


def _warps(text):
    numbers = _numbers(text)
    if any(number > WARPS_MAX for number in numbers):
        raise argparse.ArgumentTypeError(f"expected at most {WARPS_MAX} warps, got {text!r}")
    return numbers


def line(row):
    if row["what"] == "read":
        return f"read {row['bytes'] / 2**20:6.0f} MB {row['us']:9.2f} us {row['tbytes_per_s']:6.2f} TB/s"
    if row["what"] == "launch":
        return f"an empty launch {row['us']:.2f} us"
    warps = f"{row['warps_per_sm']:2} warps an SM"
    clock = "" if row["sm_mhz"] is None else f"  {row['sm_mhz']} MHz"
    return f"{row['what']:9}{row['dtype']:9} {warps} {row['mode']:10}{row['tflops']:8.1f} TFLOP/s{clock}"


def main(argv=None):
    options = parse(argv)
    rates = [(*case, mode) for case in plan(options.warps) for mode in ("burst", "sustained")]
    if options.list:
        print("\n".join(f"{what} {dtype} {warps} warps an SM, {mode}" for what, dtype, warps, mode in rates))
        print("\n".join(f"read {mb} MB" for mb in options.read_mb) + "\nlaunch")
        return 0
    library()
    with timing.Record(
        "ceilings", {"seconds": options.seconds, "warps": list(options.warps)}, options.json
    ) as record:
        with timing.Progress(len(rates) + len(options.read_mb) + 1, "ceilings") as progress:

            def add(row):
                record.rows.append(row)
                progress.print(line(row))
                progress.step()

            add({"what": "launch", "us": launch_us()})
            for mb in options.read_mb:
                us = read_us(mb << 20)
                add({"what": "read", "bytes": mb << 20, "us": us, "tbytes_per_s": round((mb << 20) / us / 1e6, 3)})
            library().tcg_release()
            for what, dtype, warps, mode in rates:
                add(rate(what, dtype, warps, mode, options.seconds))
    return 130 if record.interrupted else 0


if __name__ == "__main__":
    timing.run_main(main)
