"""Times every compiled kernel on a set of shapes, both ways round, beside what the planner chooses. From that come the two
parts of csrc/cuda/tuned.def: constants of the wgmma rows (--fit), and where the choice is still not the fastest, the table of
exceptions (--emit). For the card it runs on; nothing is timed when tcgemm is used."""

import argparse
import math
import re
import statistics
import sys
from pathlib import Path

import bench
import peers
import shapes
import timing

FAMILIES = ("simt", "mma", "tma_mma", "wgmma")  # the others are rungs of the ladder, and never chosen
QUICK = {"rounds": 3, "target_ms": 1.5}  # of all kernels
NEAR = 1.15  # of the fastest's time: kernels that are measured again
ROUNDS = 7
THRESHOLD = 0.03  # a choice that costs more than this is an exception

# A line of csrc/cuda/tuned.def, for the shapes it can hold (order nt); the others are printed as comments.
EXCEPTION = (
    "TCG_EXCEPTION({m}, {m}, {n}, {k}, {batch}, {family}, {tile}, {schedule}, {cluster}, {swap:d}, {split:d})"
    " /* {in_dtype}; {loss:.1%} faster than {chosen} */"
)
OTHER = "/* {in_dtype} {batch} x {m}x{n}x{k} {order}: {family} {suffix}, {splits} splits; {loss:.1%} faster than {chosen} */"
ANY_DTYPE = "any"  # where float16 and bfloat16 agree, or only one was measured
WAYS = {False: ":direct", True: ":swapped"}  # what may follow a kernel's name
# Lines of csrc/cuda/tuned.def for rows of 16-bit operands; a row's float16 and bfloat16 kernels share one.
TUNED = "TCG_TUNED({row}, {0:.3f}, {1:.3f}, {2:.0f})"
WGMMA = re.compile(r"tcg_wgmma_sm90_(?:f16|bf16)_.._(\d+)x(\d+)x(\d+)_s\d+_w\d_(coop|pingpong)_c(\d)x(\d)x(\d)")
TIGHT = 0.12  # of a fit: a time so much over its shape's fastest weighs 1/e
STEPS = (1.25, 1.08, 1.02)  # of a constant, from coarse to fine
LEAST = (1.0, 0.8, 200.0)  # that the three constants can be
SYMBOL = re.compile(
    r"tcg_(?P<family>[a-z_]+)_(?P<arch>sm\d+)_(?P<in>f16|bf16|f32)_((?P<order>nn|nt|tn|tt)_)?(?P<suffix>.+)"
)


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--suite", type=bench.suites_argument, default=None, metavar="NAME,...", help="square,llm without --shapes"
    )
    parser.add_argument("--shapes", type=bench.argument(shapes.parse_shapes), default=[], metavar="MxNxK[:ORDER],...")
    parser.add_argument("--dtype", choices=shapes.DTYPES, default="bfloat16")
    parser.add_argument("--families", type=lambda text: tuple(text.split(",")), default=FAMILIES, metavar="NAME,...")
    parser.add_argument("--rounds", type=bench.positive, default=ROUNDS)
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="of an exception: 0.03")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--from", dest="recorded", type=Path, nargs="+", metavar="FILE", help="records to read; measures nothing"
    )
    parser.add_argument("--emit", action="store_true", help="print the exceptions as lines of csrc/cuda/tuned.def")
    parser.add_argument(
        "--fit", action="store_true", help="print the wgmma rows' constants fitted to these times, as such lines"
    )
    parser.add_argument("--list", action="store_true", help="print the shapes and do nothing")
    options = parser.parse_args(argv)
    if options.suite is None:
        options.suite = [] if options.shapes else ["square", "llm"]
    return options


def measure(problem, options):
    """One row of the record."""
    tcgemm = timing.product()
    sets = timing.make_sets(problem, options.dtype)
    a, b, c = sets[0]
    choice = peers.plan(sets[0])
    plans, functions = {}, {}
    for kernel in tcgemm.kernels():
        name = kernel["name"]
        if kernel["in_dtype"] != options.dtype or (
            kernel["family"] not in options.families and name != choice["kernel"]
        ):
            continue
        for way in WAYS.values():
            try:
                plans[name + way] = peers.plan(sets[0], kernel=name + way)
            except (RuntimeError, ValueError, TypeError):
                continue  # it says why it cannot run this
            functions[name + way] = peers.tcgemm_function(kernel=name + way)
    # A forced kernel may be planned otherwise than a chosen one: the choice is timed as it is.
    functions[""] = peers.tcgemm_function()
    check = {"tolerance": timing.TOLERANCE[options.dtype]}
    reference = {"torch": peers.torch_function(problem)}
    quick, failed = timing.time_together(reference | functions, sets, **QUICK, **check)
    own = {name: time["us"] for name, time in quick.items() if name != "torch"}
    if "" not in own:
        raise RuntimeError(f"the planner's choice does not run: {failed.get('', '')}")
    near = [name for name, us in own.items() if us <= NEAR * min(own.values()) or name == ""]
    times, _ = timing.time_together({name: functions[name] for name in near}, sets, rounds=options.rounds)
    chosen = times.pop("")
    best = min(times, key=lambda name: times[name]["us"], default=choice["kernel"] + WAYS[choice["swap"]])
    times = {name: time for name, time in quick.items() if name in plans} | times
    for name, time in times.items():
        time |= {key: plans[name][key] for key in ("splits", "swap")}
    # Where the choice is the best row as planned, the two times differ by noise alone.
    same = best not in times or (choice["kernel"] + WAYS[choice["swap"]], choice["splits"]) == (
        best,
        times[best]["splits"],
    )
    loss = 0.0 if same else max(0.0, chosen["us"] / times[best]["us"] - 1)
    return {
        **{key: getattr(problem, key) for key in ("m", "n", "k", "batch", "order")},
        "in_dtype": options.dtype,
        "out_dtype": options.dtype,
        "times": dict(sorted(times.items(), key=lambda item: item[1]["us"])),
        "failed": failed,
        "choice": choice["kernel"],
        "choice_time": chosen,
        "choice_splits": choice["splits"],
        "best": best,
        "loss": round(loss, 4),
    }


def line(row):
    problem = shapes.Problem(*(row[key] for key in ("m", "n", "k", "order", "batch")))
    own, best = row["choice_time"]["us"], row["times"].get(row["best"], row["choice_time"])
    text = f"{problem!s:26}{own:10.2f} us  {suffix(row['choice'])} splits {row['choice_splits']}"
    if row["loss"]:
        text += f"  +{row['loss']:.1%} over {best['us']:.2f} us  {suffix(row['best'])} splits {best['splits']}"
    wrong = [name for name, reason in row["failed"].items() if reason.startswith("wrong")]
    return text + "".join(f"\n  WRONG: {name}: {row['failed'][name]}" for name in wrong)


def symbol(name):
    """The parts of a kernel's name, as the key of a time or without the way round."""
    return SYMBOL.fullmatch(name.partition(":")[0])


def suffix(name):
    match = symbol(name)
    return f"{match['family']} {match['suffix']}" if match else name


def exceptions(results, threshold=THRESHOLD):
    """Shapes whose choice costs more than the threshold, over all the records: what `emit` prints. One entry a shape and
    order where the 16-bit dtypes agree on the kernel."""
    entries = {}
    for result in results:
        for row in result["rows"]:
            if row["loss"] > threshold:
                match = symbol(row["best"])
                entry = {key: row[key] for key in ("m", "n", "k", "batch", "order", "loss")} | {
                    "family": match["family"],
                    "suffix": match["suffix"],
                    "splits": row["times"][row["best"]]["splits"],
                    "swap": row["times"][row["best"]]["swap"],
                    "chosen": suffix(row["choice"]),
                }
                shape = tuple(row[key] for key in ("m", "n", "k", "batch", "order"))
                entries.setdefault(shape, {})[row["in_dtype"]] = entry
    found = []
    for by_dtype in entries.values():
        kernels = {(entry["suffix"], entry["splits"], entry["swap"]) for entry in by_dtype.values()}
        if len(kernels) == 1 and "float32" not in by_dtype:
            found.append(max(by_dtype.values(), key=lambda entry: entry["loss"]) | {"in_dtype": ANY_DTYPE})
        else:
            found += [entry | {"in_dtype": dtype} for dtype, entry in by_dtype.items()]
    return sorted(found, key=lambda entry: (entry["n"], entry["k"], entry["m"], entry["order"]))


def emit(entries):
    lines = []
    for entry in entries:
        tile = re.match(r"(\d+)x(\d+)x(\d+)_", entry["suffix"])
        schedule = re.search(r"_(coop|pingpong)_c(\d)x(\d)x(\d)", entry["suffix"])
        held = tile and entry["order"] == "nt" and entry["family"] in ("mma", "wgmma")
        lines.append(
            (EXCEPTION if held else OTHER).format(
                **entry,
                split=entry["splits"] > 1,
                tile=", ".join(tile.groups()) if tile else "",
                schedule=schedule[1] if schedule else "coop",
                cluster=", ".join(schedule.groups()[1:]) if schedule else "1, 1, 1",
            )
        )
    return lines


# ---- the fit: the planner's own estimate, with other constants for one row at a time ----------------------------------


class Point:
    """A time of a wgmma row, and what the planner takes to estimate it."""

    def __init__(self, row, name, time, device):
        m, n, k, batch = row["m"], row["n"], row["k"], row["batch"]
        a = (1 << 34, k, 1) if row["order"][0] == "n" else (1 << 34, 1, m)
        b = (1 << 35, n, 1) if row["order"][1] == "n" else (1 << 35, 1, k)
        axes = [(batch, m * k, k * n, m * n)] if batch > 1 else []
        problem = ((m, n, k), row["in_dtype"], row["out_dtype"], a, b, (1 << 36, n, 1), axes, device)
        self.arguments = (*problem, name, False)
        self.us = time["us"]
        fastest = min(other["us"] for other in row["times"].values())
        self.weight = math.exp(-(self.us / fastest - 1) / TIGHT)

    def cycles(self, constants=None):
        return timing.product()._core._plan(*self.arguments, constants)["cycles"]


def points(results):
    """{row of csrc/cuda/tuned.def: its times without a split}"""
    found = {}
    for result in results:
        machine = result["machine"]
        device = {
            "cc": machine["compute_capability"][0] * 10 + machine["compute_capability"][1],
            "sm_count": machine["sms"],
            "smem_block_bytes": 232448,  # of every Hopper part, which alone has these rows
            "smem_sm_bytes": 233472,
            "l2_bytes": machine["l2_bytes"],
        }
        for row in result["rows"]:
            for name, time in row["times"].items():
                match = WGMMA.fullmatch(name.partition(":")[0])
                if match and time["splits"] == 1:
                    found.setdefault(", ".join(match.groups()), []).append(Point(row, name, time, device))
    return found


def fit(results):
    """{row: its constants}: arithmetic, memory and tile cycles that bring the estimates of its times closest to them, by
    steps along one constant at a time. What a cycle is follows from the estimates as they are."""
    rows = points(results)
    every = [point for group in rows.values() for point in group]
    us_per_cycle = statistics.median(point.us / point.cycles() for point in every) if every else 0.0

    def error(group, constants):
        return sum(
            point.weight * min(abs(math.log(point.cycles(tuple(constants)) * us_per_cycle / point.us)), 0.3)
            for point in group
        )

    fitted = {}
    for row, group in rows.items():
        constants = [1.1, 1.0, 1500.0]
        least = error(group, constants)
        for step in STEPS:
            moved = True
            while moved:
                moved = False
                for i in range(3):
                    for factor in (step, 1 / step):
                        tried = [
                            max(value * (factor if i == j else 1), LEAST[j]) for j, value in enumerate(constants)
                        ]
                        new = error(group, tried)
                        if new < least * (1 - 1e-6):
                            constants, least, moved = tried, new, True
        fitted[row] = constants
    return fitted


def summary(results, threshold):
    losses = [row["loss"] for result in results for row in result["rows"]]
    over = sum(loss > threshold for loss in losses)
    mean = timing.geomean(1 + loss for loss in losses)
    most = max(losses, default=0)
    return f"{len(losses)} shapes: the choice costs {mean - 1:.2%} over the best kernel, {most:.1%} at most; {over} over {threshold:.0%}"


def run(options, cases):
    settings = {"families": list(options.families), "rounds": options.rounds, "threshold": options.threshold}
    with timing.Record("tune", settings, options.json) as record:
        with timing.Progress(len(cases), "shapes") as progress:
            for problem in cases:
                try:
                    row = measure(problem, options)
                except (timing.cuda_torch().cuda.OutOfMemoryError, RuntimeError) as error:
                    timing.cuda_torch().cuda.synchronize()  # raises where the device itself is lost
                    record.missing[str(problem)] = timing.one_line(error)
                    progress.print(f"{problem!s:26}left out: {timing.one_line(error)}")
                else:
                    record.rows.append(row)
                    if not (options.emit or options.fit):
                        progress.print(line(row))
                timing.free_memory()
                progress.step()
    return record


def main(argv=None):
    options = parse(argv)
    cases = list(dict.fromkeys(problem for _, problem in bench.select(options)))
    if options.list:
        print("\n".join(map(str, cases)))
        return 0
    interrupted = False
    if options.recorded:
        results = [timing.read(path) for path in options.recorded]
        for path, result in zip(options.recorded, results):
            if result["kind"] != "tune":
                raise timing.Unusable(f"{path}: expected a record of kind tune, got {result['kind']}")
    else:
        timing.cuda_torch()
        timing.product()
        record = run(options, cases)
        results, interrupted = [record.result], record.interrupted
    if options.fit:
        for row, constants in fit(results).items():
            print(TUNED.format(*constants, row=row))
    if options.emit:
        for text in emit(exceptions(results, options.threshold)):
            print(text)
    print(summary(results, options.threshold), file=sys.stderr if options.emit or options.fit else sys.stdout)
    return 130 if interrupted else 0


if __name__ == "__main__":
    timing.run_main(main)
