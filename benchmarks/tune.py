"""Times every compiled kernel on a set of shapes beside what the planner chooses, and writes down where the choice is not the
fastest: the planner's table of measured exceptions. For the card it runs on; nothing is timed when tcgemm is used."""

import argparse
import re
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

# A line of csrc/cuda/tuned.def, for the shapes it can hold (order nt, no split); the others are printed as comments.
EXCEPTION = (
    "TCG_EXCEPTION({m}, {m}, {n}, {k}, {family}, {tile}, {schedule}, {cluster}, {swap:d})"
    " /* {in_dtype}; {loss:.1%} faster than {chosen} */"
)
OTHER = "/* {in_dtype} {m}x{n}x{k} {order}: {family} {suffix}, {splits} splits; {loss:.1%} faster than {chosen} */"
ANY_DTYPE = "any"  # where float16 and bfloat16 agree, or only one was measured
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
    parser.add_argument("--emit", action="store_true", help="print the exceptions as C initialisers")
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
        try:
            plans[name] = peers.plan(sets[0], kernel=name)
        except (RuntimeError, ValueError, TypeError):
            continue  # it says why it cannot run this
        functions[name] = peers.tcgemm_function(kernel=name)
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
    best = min(times, key=lambda name: times[name]["us"], default=choice["kernel"])
    times = {name: time for name, time in quick.items() if name in plans} | times
    for name, time in times.items():
        time |= {key: plans[name][key] for key in ("splits", "swap")}
    # Where the choice is the best row as planned, the two times differ by noise alone.
    same = best not in times or (choice["kernel"], choice["splits"], choice["swap"]) == (
        best,
        times[best]["splits"],
        times[best]["swap"],
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


def suffix(name):
    match = SYMBOL.fullmatch(name)
    return f"{match['family']} {match['suffix']}" if match else name


def exceptions(results, threshold=THRESHOLD):
    """Shapes whose choice costs more than the threshold, over all the records: what `emit` prints. One entry a shape and
    order where the 16-bit dtypes agree on the kernel."""
    entries = {}
    for result in results:
        for row in result["rows"]:
            if row["loss"] > threshold and row["batch"] == 1:
                match = SYMBOL.fullmatch(row["best"])
                entry = {key: row[key] for key in ("m", "n", "k", "order", "loss")} | {
                    "family": match["family"],
                    "suffix": match["suffix"],
                    "splits": row["times"][row["best"]]["splits"],
                    "swap": row["times"][row["best"]]["swap"],
                    "chosen": suffix(row["choice"]),
                }
                shape = tuple(row[key] for key in ("m", "n", "k", "order"))
                entries.setdefault(shape, {})[row["in_dtype"]] = entry
    found = []
    for by_dtype in entries.values():
        kernels = {(entry["suffix"], entry["splits"]) for entry in by_dtype.values()}
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
        held = tile and entry["order"] == "nt" and entry["splits"] == 1 and entry["family"] in ("mma", "wgmma")
        lines.append(
            (EXCEPTION if held else OTHER).format(
                **entry,
                tile=", ".join(tile.groups()) if tile else "",
                schedule=schedule[1] if schedule else "coop",
                cluster=", ".join(schedule.groups()[1:]) if schedule else "1, 1, 1",
            )
        )
    return lines


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
                    if not options.emit:
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
    if options.emit:
        for text in emit(exceptions(results, options.threshold)):
            print(text)
    print(summary(results, options.threshold), file=sys.stderr if options.emit else sys.stdout)
    return 130 if interrupted else 0


if __name__ == "__main__":
    timing.run_main(main)
