"""Every kernel family beside torch on one size: time, TFLOP/s, share of torch, share of what its instruction can do at the
kernel's own warps an SM (ceilings.py, same run), and how busy the tensor pipe is where Nsight Compute can tell."""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import ceilings
import peers
import shapes
import timing

# From the lowest rung up; families that are not here follow in the table's own order.
RUNGS = ("simt", "wmma_naive", "wmma", "mma_naive", "mma", "tma_mma", "wgmma")
RATES = {"simt": "fma", "wgmma": "wgmma"}  # the others: mma.sync
PIPE_METRICS = (
    "sm__pipe_tensor_cycles_active",
    "sm__pipe_tensor_op_hmma_cycles_active",
    "sm__inst_executed_pipe_tensor",
)
PIPE_SUFFIX = ".avg.pct_of_peak_sustained_active"
REGISTERS = 65536  # an SM
RESERVED_SMEM_BYTES = 1024  # of every block, by the driver
NCU_SECONDS = 180


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=_sizes, default=[4096], metavar="N,...", help="of square products: 4096")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="simt runs in float32")
    parser.add_argument("--order", choices=shapes.ORDERS, default="nt")
    parser.add_argument("--families", type=lambda text: text.split(","), metavar="NAME,...", help="all there are")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument("--target-ms", type=float, default=timing.TARGET_MS, help="of one replay")
    parser.add_argument(
        "--seconds", type=float, default=ceilings.SECONDS, help="of each instruction's sustained rate"
    )
    parser.add_argument("--no-ncu", action="store_true", help="leave the tensor pipe's utilisation out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print the families as built and do nothing")
    parser.add_argument("--launch-once", action="store_true", help=argparse.SUPPRESS)  # what ncu looks at
    return parser.parse_args(argv)


def _sizes(text):
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected sizes of at least 1, got {text!r}")
    return sizes


def families(kernels, dtype, wanted=None):
    """(those to run, in the ladder's order; name -> why another that was asked for is not there)."""
    built = {kernel["family"] for kernel in kernels if kernel["in_dtype"] in (dtype, "float32")}
    ordered = [name for name in RUNGS if name in built] + sorted(built - set(RUNGS))
    if wanted is None:
        return ordered, {}
    return [name for name in ordered if name in wanted], {
        name: "not among the compiled kernels" for name in wanted if name not in built
    }


def in_dtype(family, dtype):
    return "float32" if family == "simt" else dtype


# ---- a kernel's warps an SM ----------------------------------------------------------------------------------------


def build_report():
    """Kernel name -> registers and static shared memory, by the compiler's report beside the extension; {} where it is
    not there."""
    major, minor = timing.card()["compute_capability"]
    found = {}
    for folder in timing.product().__path__:
        path = Path(folder, "_images.json")
        if path.is_file():
            for image in json.loads(path.read_text())["images"].values():
                for arch, built in image.items():
                    if arch.rstrip("a") in (f"{major}{minor}", f"{major}0"):
                        found.update(built["kernels"])
            break
    return found


def warps_per_sm(kernel, plan, device, report):
    """The warps that compute, resident on one SM at once: by shared memory, threads, registers and the grid."""
    built = report.get(kernel["name"], {})
    warps = -(-kernel["threads"] // 32)
    threads_max = 2048 if tuple(device["compute_capability"]) in ((8, 0), (9, 0), (10, 0)) else 1536
    smem_bytes = kernel["smem_bytes"] + built.get("static_smem_bytes", 0) + RESERVED_SMEM_BYTES
    blocks = min(device["smem_sm_bytes"] // smem_bytes, threads_max // kernel["threads"])
    if "registers" in built:
        blocks = min(blocks, REGISTERS // (-(-built["registers"] // 8) * 8 * 32 * warps))
    if plan.get("grid"):
        blocks = min(blocks, -(-plan["grid"] // device["sm_count"]))
    computing = kernel["warps"][0] * kernel["warps"][1] if kernel["warps"] else warps
    return max(1, blocks) * computing


# ---- the tensor pipe -----------------------------------------------------------------------------------------------


def pipe_utilisation(options, size, names):
    """Kernel name -> per cent of cycles in which an SM's tensor pipe was busy, by ncu in a process of its own;
    Unusable where it cannot tell."""
    ncu = shutil.which("ncu") or next(
        (str(path) for path in [Path("/usr/local/cuda/bin/ncu")] if path.is_file()), None
    )
    if ncu is None:
        raise timing.Unusable("ncu is not installed")
    known = {line.split()[0] for line in _output(ncu, "--query-metrics").splitlines() if line.strip()}
    metric = next((name for name in PIPE_METRICS if name in known), None)
    if metric is None:
        raise timing.Unusable(f"ncu knows none of {', '.join(PIPE_METRICS)} for this card")
    launched = [sys.executable, __file__, "--launch-once", "--size", str(size), "--dtype", options.dtype]
    launched += ["--order", options.order, "--families", ",".join(names)]
    profiled = ["--csv", "--page", "raw", "--clock-control", "none", "--metrics", metric + PIPE_SUFFIX]
    text = _output(ncu, *profiled, "--kernel-name-base", "function", "--kernel-name", "regex:^tcg_", *launched)
    return parse_ncu(text, metric + PIPE_SUFFIX)


def _output(*line):
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=NCU_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise timing.Unusable(f"ncu: {timing.one_line(error)}") from error
    if done.returncode:
        said = [text for text in (done.stdout + done.stderr).splitlines() if "==ERROR==" in text]
        raise timing.Unusable(f"ncu: {timing.one_line(' '.join(said) or done.stderr or done.stdout)}")
    return done.stdout


def parse_ncu(text, metric):
    """Kernel name -> that metric of its first launch, from ncu's raw CSV."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found = {}
    for row in csv.DictReader(lines):
        name, value = row.get("Kernel Name", "").partition("(")[0], row.get(metric)
        try:
            found.setdefault(name, round(float(value.replace(",", "")), 2)) if name else None
        except (AttributeError, ValueError):
            continue  # the line of units, or no value
    if not found:
        raise timing.Unusable(f"ncu printed no {metric}: {timing.one_line(text)}")
    return found


def launch_once(options):
    torch, matmul = timing.cuda_torch(), timing.product().matmul
    for name in options.families:
        dtype = in_dtype(name, options.dtype)
        problem = shapes.Problem(*options.size * 3, options.order)
        a, b, c = timing.make_sets(problem, dtype, sets_max=1)[0]
        matmul(a, b, out=c, kernel=name)
        torch.cuda.synchronize()


# ---- the measurement -----------------------------------------------------------------------------------------------


def measure(options, size, names, rate, record):
    """The rows of one size: torch in 16 bits with the tensor-core families, torch in float32 with simt."""
    kernels = {kernel["name"]: kernel for kernel in timing.product().kernels()}
    device, report = timing.product().devices()[0], build_report()
    problem = shapes.Problem(size, size, size, options.order)
    rows = []
    for dtype in dict.fromkeys(in_dtype(name, options.dtype) for name in names):
        sets = timing.make_sets(problem, dtype)
        functions = {"torch": peers.torch_function(problem)}
        functions |= {
            name: peers.tcgemm_function(kernel=name) for name in names if in_dtype(name, options.dtype) == dtype
        }
        times, failed = timing.time_together(
            functions, sets, rounds=options.rounds, target_ms=options.target_ms, tolerance=timing.TOLERANCE[dtype]
        )
        for name, reason in failed.items():
            record.missing[f"{name} {dtype} {size}"] = reason
        for name, time in times.items():
            row = {
                "family": name,
                "kernel": None,
                **{key: getattr(problem, key) for key in ("m", "n", "k", "order")},
                "in_dtype": dtype,
                "time": time,
                "tflops": round(timing.tflops(problem.flops, time["us"]), 2),
                "of_torch": round(times["torch"]["us"] / time["us"], 4) if "torch" in times else None,
                **dict.fromkeys(("warps_per_sm", "rate", "rate_tflops", "of_rate", "tensor_pipe_percent")),
            }
            if name != "torch":
                plan = timing.product().explain(*sets[0][:2], out=sets[0][2], kernel=name)
                row["kernel"] = plan["kernel"]
                row["warps_per_sm"] = warps_per_sm(kernels[plan["kernel"]], plan, device, report)
                _add_rate(row, rate)
            rows.append(row)
        del sets
        timing.free_memory()
    return rows


def _add_rate(row, rate):
    what = RATES.get(row["family"], "mma.sync")
    if rate is None or not ceilings.supported(what):
        return
    warps = ceilings.WARPS_MAX if what == "fma" else min(row["warps_per_sm"], ceilings.WARPS_MAX)
    row["rate"] = what
    row["rate_tflops"] = rate(what, row["in_dtype"], warps)
    row["of_rate"] = round(row["tflops"] / row["rate_tflops"], 4)


def rate_meter(seconds, record):
    """rate(what, dtype, warps) -> sustained TFLOP/s, each measured once; None where ceilings.cu cannot be compiled."""
    try:
        ceilings.library()
    except timing.Unusable as error:
        record.missing["ceilings"] = str(error)
        return None
    measured = {}

    def rate(what, dtype, warps):
        key = what, dtype, warps
        if key not in measured:
            measured[key] = ceilings.rate(*key, "sustained", seconds)["tflops"]
        return measured[key]

    return rate


def lines(rows):
    header = (
        "family",
        "size",
        "us",
        "+-%",
        "TFLOP/s",
        "% of torch",
        "% of rate",
        "rate",
        "warps",
        "pipe %",
        "kernel",
    )
    body = []
    for row in rows:
        time = row["time"]
        percent = [f"{100 * row[key]:.1f}" if row[key] is not None else "-" for key in ("of_torch", "of_rate")]
        rate = f"{row['rate']} {row['rate_tflops']:.0f}" if row["rate"] else "-"
        body.append(
            (
                row["family"] + (" float32" if row["in_dtype"] == "float32" else ""),
                row["m"],
                f"{time['us']:.1f}" + ("" if time["graph"] else "~"),
                f"{(time['q3_us'] - time['q1_us']) / time['us'] * 50:.1f}",
                f"{row['tflops']:.1f}",
                *percent,
                rate,
                row["warps_per_sm"] or "-",
                "-" if row["tensor_pipe_percent"] is None else f"{row['tensor_pipe_percent']:.1f}",
                row["kernel"] or "",
            )
        )
    return timing.table(body, header)


def main(argv=None):
    options = parse(argv)
    if options.launch_once:
        launch_once(options)
        return 0
    found, missing = families(timing.product().kernels(), options.dtype, options.families)
    if options.list:
        print("\n".join(found))
        return 0
    timing.cuda_torch()
    runnable = timing.product().devices()[0]["families"]
    missing |= {name: f"does not run on {timing.card()['card']}" for name in found if name not in runnable}
    names = [name for name in found if name in runnable]
    settings = {"sizes": options.size, "families": names, "rounds": options.rounds, "seconds": options.seconds}
    with timing.Record("ladder", settings, options.json) as record:
        record.missing.update(missing)
        rate = rate_meter(options.seconds, record)
        with timing.Progress(len(options.size), "ladder") as progress:
            for size in options.size:
                rows = measure(options, size, names, rate, record)
                record.rows.extend(rows)
                if not options.no_ncu:
                    _add_pipe(options, size, rows, record)
                for text in lines(rows):
                    progress.print(text)
                progress.step()
    for name, reason in record.missing.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    return 130 if record.interrupted else 0


def _add_pipe(options, size, rows, record):
    try:
        found = pipe_utilisation(options, size, [row["family"] for row in rows if row["kernel"]])
    except timing.Unusable as error:
        record.missing["ncu"] = str(error)
        options.no_ncu = True
        return
    for row in rows:
        row["tensor_pipe_percent"] = found.get(row["kernel"])


if __name__ == "__main__":
    timing.run_main(main)
