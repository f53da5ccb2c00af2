"""`python -m tcgemm`: what there is to run on, and one product on it: checked against float64, timed, compared with
the data sheet. NumPy is all it needs; ml_dtypes, where it is installed, lends NumPy a bfloat16."""

import argparse
import fnmatch
import platform
import sys
import time

import numpy as np

import tcgemm
from tcgemm import _core

# Dense TFLOP/s of NVIDIA's data sheets, by the driver's name of the card: 16-bit tensor cores with fp32
# accumulation, and fp32. Where a sheet states a rate "with sparsity", half of it is here.
PEAKS = {
    "NVIDIA B200": (2250, 75),
    "NVIDIA H200": (989, 67),
    "NVIDIA H200 NVL": (836, 60),
    "NVIDIA H100 80GB HBM3": (989, 67),
    "NVIDIA H100 PCIe": (756, 51),
    "NVIDIA H100 NVL": (836, 60),
    "NVIDIA A100*": (312, 19.5),
    "NVIDIA A10": (125, 31.2),
    "NVIDIA L4": (121, 30.3),
    "NVIDIA L40S": (362, 91.6),
    "NVIDIA GeForce RTX 3090": (71, 35.6),
    "NVIDIA GeForce RTX 4090": (165, 82.6),
    "NVIDIA GeForce RTX 5090": (210, 104.8),
}

# Significant bits, the hidden one included.
PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24}

CHECKED_ROWS = 64
REPEATS = 7


def main(argv=None) -> int:
    options = parse(argv)
    print(f"tcgemm {tcgemm.__version__}, Python {platform.python_version()}, NumPy {np.__version__}")
    devices, why_host = find_devices()
    for index, device in enumerate(devices):
        print(f"device {index}: {describe(device)}")
    if options.device is not None and not 0 <= options.device < len(devices):
        print(f"--device: expected one of the {len(devices)} devices, got {options.device}", file=sys.stderr)
        return 2
    index = options.device
    if index is None and devices:
        index = max(range(len(devices)), key=lambda i: (peak(devices[i], "float16") or 0, devices[i]["sm_count"]))
    if index is None:
        print(f"no GPU: {why_host}\nrunning on the host: float32 numpy.matmul, rounded once")
    m, n, k = options.size or ((1024,) * 3 if index is None else (4096,) * 3)
    name, dtype = numpy_dtype(options.dtype)

    rng = np.random.default_rng(0)
    a = rng.standard_normal((m, k), dtype=np.float32).astype(dtype)
    b = rng.standard_normal((k, n), dtype=np.float32).astype(dtype)
    where = "the host" if index is None else f"device {index}"
    print(f"product: {name} [{m}, {k}] @ [{k}, {n}], random normal, on {where}")
    result, seconds, plan = run_on_host(a, b) if index is None else run_on_device(a, b, index)

    ok, text = check(result, a, b, PRECISION[name])
    print(f"kernel:  {plan['kernel']}")
    print(f"check:   {text}")
    tflops = 2 * m * n * k / seconds / 1e12
    line = f"{seconds * 1e3:.3f} ms, {tflops:.3g} TFLOP/s"
    if index is not None and (limit := peak(devices[index], name)):
        line += f", {100 * tflops / limit:.0f} % of the {limit} on the data sheet of {devices[index]['name']}"
    print(f"time:    {line}")
    return 0 if ok else 1


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tcgemm", description="Runs, checks and times one product a @ b.")
    parser.add_argument("--version", action="version", version=tcgemm.__version__)
    parser.add_argument("--size", type=size, metavar="N|MxNxK", help="4096 on a GPU, 1024 on the host")
    parser.add_argument("--device", type=int, metavar="INDEX", help="the fastest by its data sheet")
    parser.add_argument(
        "--dtype", choices=PRECISION, default="bfloat16", help="bfloat16 where ml_dtypes is installed, else float16"
    )
    return parser.parse_args(argv)


def size(text):
    parts = [int(part) for part in text.lower().split("x")]
    if len(parts) not in (1, 3) or min(parts) < 1:
        raise ValueError(text)
    return tuple(parts * 3 if len(parts) == 1 else parts)


def numpy_dtype(name):
    """The dtype's name and NumPy's object for it; float16 for a bfloat16 that NumPy does not have."""
    if name != "bfloat16":
        return name, np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        print("ml_dtypes is not installed: float16 stands in for bfloat16 (pip install ml_dtypes)")
        return numpy_dtype("float16")
    return name, np.dtype(ml_dtypes.bfloat16)


def find_devices():
    """The devices, and the reason where there is none."""
    try:
        return tcgemm.devices(), "the driver knows no device"
    except RuntimeError as error:
        return [], str(error)


def describe(device):
    major, minor = device["compute_capability"]
    families = ", ".join(device["families"])
    return f"{device['name']}, compute capability {major}.{minor}, {device['sm_count']} SMs: {families}"


def peak(device, dtype_name):
    for pattern, (tensor, fp32) in PEAKS.items():
        if fnmatch.fnmatchcase(device["name"], pattern):
            return fp32 if dtype_name == "float32" else tensor
    return None


def run_on_host(a, b):
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        result = tcgemm.matmul(a, b)
        times.append(time.perf_counter() - started)
    return result, sorted(times)[REPEATS // 2], tcgemm.explain(a, b)


def run_on_device(a, b, index):
    x, y = _core._upload(a, index), _core._upload(b, index)
    result = _core._download(tcgemm.matmul(x, y))
    # One launch tells how many fill some 20 ms; the median is of runs of that many.
    launches = max(1, min(200, int(20 / max(_core._time(x, y, 1), 0.001))))
    times = sorted(_core._time(x, y, launches) for _ in range(REPEATS))
    return result, times[REPEATS // 2] / 1e3, tcgemm.explain(x, y)


def check(result, a, b, precision):
    """Some of the rows against float64. Allowed are one rounding of the result to its precision and, for fp32 sums of
    K terms, 2^-23 * sqrt(K) * |row of a| * |column of b|: one term that is lost or wrong is far above that."""
    (m, k), n = a.shape, b.shape[1]
    if result.shape != (m, n):
        return False, f"MISMATCH: expected the shape {(m, n)}, got {result.shape}"
    rows = np.unique(np.linspace(0, m - 1, min(m, CHECKED_ROWS), dtype=np.int64))
    x, y = a[rows].astype(np.float64), b.astype(np.float64)
    expected = x @ y
    sums = 2.0**-23 * np.sqrt(k) * np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=0))
    allowed = sums + 2.0**-precision * (np.abs(expected) + sums)
    error = np.abs(result[rows].astype(np.float64) - expected)
    compared = f"{len(rows)} of {m} rows against float64"
    wrong = int(np.sum(~(error <= allowed)))  # NaN is wrong too
    # The element nearest to what is allowed, or furthest beyond it.
    worst = np.unravel_index(np.argmax(np.nan_to_num(error / allowed, nan=np.inf)), error.shape)
    text = (
        f"{compared}: "
        + (f"MISMATCH in {wrong} elements" if wrong else "ok")
        + (
            f"; worst at [{rows[worst[0]]}, {worst[1]}]: expected {expected[worst]:.8g} +- {allowed[worst]:.2g}, "
            f"got {float(result[rows[worst[0]], worst[1]]):.8g}"
        )
    )
    return wrong == 0, text


if __name__ == "__main__":
    sys.exit(main())
