"""tcgemm beside its peers on suites of shapes: one line a shape, geometric means at the end, and a record as JSON."""

import argparse
import sys
from pathlib import Path

import host
import peers
import shapes
import timing


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="A shape's ratio is the peer's time over tcgemm's: above 1, tcgemm is faster. README.md has the method.",
    )
    parser.add_argument(
        "--suite",
        type=suites_argument,
        metavar="NAME,...",
        help=f"{', '.join(shapes.SUITES)}, host, or all ({', '.join(shapes.ALL)}, host); without --shapes: square",
    )
    parser.add_argument(
        "--shapes", type=argument(shapes.parse_shapes), default=[], metavar="MxNxK[xBATCH][:ORDER],..."
    )
    parser.add_argument("--dtype", choices=shapes.DTYPES, default="bfloat16")
    parser.add_argument("--out-dtype", choices=shapes.DTYPES, help="the dtype, or float32 (peers may not have it)")
    parser.add_argument(
        "--peers",
        type=argument(peers.parse_peers),
        default=peers.parse_peers("torch,cublaslt"),
        metavar="NAME,...",
        help=f"{', '.join(peers.PEERS)} or none; torch,cublaslt. `invariant` is tcgemm with batch_invariant=True",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="host's rows go to FILE with _host before its suffix"
    )
    parser.add_argument("--rounds", type=positive, default=timing.ROUNDS)
    parser.add_argument("--target-ms", type=float, default=timing.TARGET_MS, help="of one replay")
    parser.add_argument("--floor", action="store_true", help="time to read A and B too, where M <= 64 (needs nvcc)")
    parser.add_argument(
        "--again",
        type=float,
        metavar="RATIO",
        help="measure once more, and keep that, where tcgemm over torch is below",
    )
    parser.add_argument("--list", action="store_true", help="print the shapes and do nothing")
    options = parser.parse_args(argv)
    if options.suite is None:
        options.suite = [] if options.shapes else ["square"]
    return options


def argument(parse_text):
    def checked(text):
        try:
            return parse_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


@argument
def suites_argument(text):
    names = text.split(",")
    found = shapes.parse_suites(",".join(others)) if (others := [name for name in names if name != "host"]) else []
    return found + (["host"] if "host" in names or "all" in names else [])


@argument
def positive(text):
    if int(text) < 1:
        raise ValueError(f"expected at least 1, got {text}")
    return int(text)


def select(options):
    """(suite, problem) in order."""
    cases = [("shapes", problem) for problem in options.shapes]
    return cases + [
        (suite, problem) for suite in options.suite if suite != "host" for problem in shapes.SUITES[suite]
    ]


def measure(suite, problem, options, builders):
    """One row of the record."""
    in_dtype, out_dtype = options.dtype, options.out_dtype or options.dtype
    sets = timing.make_sets(problem, in_dtype, out_dtype)
    functions, unbuilt, readings = {}, {}, []
    for name, build in builders.items():
        try:
            functions[name] = build(problem, sets)
        except Exception as error:
            timing.cuda_torch().cuda.synchronize()
            unbuilt[name] = timing.one_line(error)
    functions["tcgemm"] = peers.tcgemm_function()
    arguments = {"rounds": options.rounds, "target_ms": options.target_ms, "tolerance": timing.TOLERANCE[out_dtype]}
    times, failed = timing.time_together(
        functions, sets, **arguments, meanwhile=lambda: readings.append(timing.sensors().sm_mhz())
    )
    row = {
        "suite": suite,
        **{key: getattr(problem, key) for key in ("m", "n", "k", "batch", "order")},
        "in_dtype": in_dtype,
        "out_dtype": out_dtype,
        "sets": len(sets),
        "set_bytes": problem.set_bytes(in_dtype, out_dtype),
        "flops": problem.flops,
        "sm_mhz": readings[0] if readings else None,
        "times": {name: times[name] for name in ("tcgemm", *builders) if name in times},
        "failed": unbuilt | failed,
        **(peers.plan(sets[0]) if "tcgemm" in times else {}),
    }
    if options.floor and problem.m <= 64 and problem.batch == 1:
        import ceilings

        c_bytes = problem.m * problem.n * shapes.ITEM_BYTES[out_dtype]
        row["floor_us"] = ceilings.read_us(row["set_bytes"] - c_bytes)
    return row


def line(row, builders):
    """One line of the running table."""
    problem = shapes.Problem(*(row[key] for key in ("m", "n", "k", "order", "batch")))
    parts = [f"{row['suite']:8}{problem!s:24}"]
    if "tcgemm" in row["times"]:
        own = row["times"]["tcgemm"]
        spread = (own["q3_us"] - own["q1_us"]) / own["us"] * 50
        parts.append(f"{_time(own):>9} us +-{spread:4.1f} % {timing.tflops(row['flops'], own['us']):7.1f} TFLOP/s")
    for name in builders:
        if (ratio := timing.ratio(row, name)) is not None:
            parts.append(f"{name} {_time(row['times'][name])} x{ratio:.3f}")
    if "floor_us" in row:
        parts.append(f"read {row['floor_us']:.2f}")
    if row.get("kernel"):
        splits = f" splits {row['splits']}" if row["splits"] > 1 else ""
        parts.append(f"{row['kernel']}{' swap' if row['swap'] else ''}{splits}{' copies' if row['copies'] else ''}")
    parts += [f"{name} left out: {reason}" for name, reason in row["failed"].items()]
    return "  ".join(parts)


def _time(time):
    us = time["us"]
    return (f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:.0f}") + ("" if time["graph"] else "~")


def summary(rows, names):
    """Geometric means and worst cases by suite, one line each: the table at the end."""
    body = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        chosen = [row for row in rows if row["suite"] == suite]
        cells = [suite, len(chosen)]
        for name in names:
            ratios = [(ratio, row) for row in chosen if (ratio := timing.ratio(row, name)) is not None]
            if ratios:
                low, worst = min(ratios, key=lambda pair: pair[0])
                where = shapes.Problem(*(worst[key] for key in ("m", "n", "k", "order", "batch")))
                mean = timing.geomean(ratio for ratio, _ in ratios)
                cells += [f"{mean:.3f}", f"{low:.3f}", where]
            else:
                cells += ["-", "-", "-"]
        body.append(cells)
    header = ["suite", "shapes"]
    for name in names:
        header += [f"over {name}", "least", "at"]
    return timing.table(body, header)


def run_shapes(options, cases):
    """Measures the cases; True where it was interrupted."""
    builders, missing = peers.available(options.peers)
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    settings = {
        "suites": list(dict.fromkeys(suite for suite, _ in cases)),
        "peers": options.peers,
        "rounds": options.rounds,
        "target_ms": options.target_ms,
        "again": options.again,
    }
    with timing.Record("bench", settings, options.json) as record:
        record.missing.update(missing)
        with timing.Progress(len(cases), "shapes") as progress:
            for suite, problem in cases:
                try:
                    row = measure(suite, problem, options, builders)
                    ratio = timing.ratio(row, "torch")
                    if options.again and ratio is not None and ratio < options.again:
                        row = measure(suite, problem, options, builders) | {"measured": 2}
                except timing.cuda_torch().cuda.OutOfMemoryError as error:
                    progress.print(f"{suite:8}{problem!s:24}left out: {timing.one_line(error)}")
                    record.missing[f"{suite} {problem}"] = "out of memory"
                else:
                    record.rows.append(row)
                    progress.print(line(row, builders))
                timing.free_memory()
                progress.step()
    if record.rows and builders:
        print("\nratio = the peer's time / tcgemm's: geometric mean, least, and where")
        print("\n".join(summary(record.rows, list(builders))))
    if options.floor:
        _print_floor(record.rows)
    return record.interrupted


def _print_floor(rows):
    shares = [
        (row["times"]["tcgemm"]["us"] / row["floor_us"], row)
        for row in rows
        if "floor_us" in row and "tcgemm" in row["times"]
    ]
    if shares:
        most, worst = max(shares, key=lambda pair: pair[0])
        mean = timing.geomean(share for share, _ in shares)
        shape = "x".join(str(worst[key]) for key in "mnk")
        print(f"tcgemm's time over the time to read A and B: geometric mean {mean:.3f}, most {most:.3f} at {shape}")


def run_host(options):
    path = options.json
    if path and len(options.suite) + len(options.shapes) > 1:
        path = path.with_name(f"{path.stem}_host{path.suffix}")
    with timing.Record("host", {"dtype": options.dtype, "size": host.SIZE}, path) as record:
        host.measure(record, dtype=options.dtype)
    for name, reason in record.missing.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    print("\n".join(host.lines(record.rows)))
    return record.interrupted


def main(argv=None):
    options = parse(argv)
    cases = select(options)
    if options.list:
        print("\n".join(f"{suite:8}{problem}" for suite, problem in cases))
        return 0
    timing.cuda_torch()
    timing.product()
    interrupted = False
    if cases:
        interrupted = run_shapes(options, cases)
    if "host" in options.suite and not interrupted:
        interrupted = run_host(options)
    return 130 if interrupted else 0


if __name__ == "__main__":
    timing.run_main(main)
