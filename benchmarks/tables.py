"""The README's figures as Markdown, from the recorded results: nothing there is typed by hand. Prints every block; with
`--write README.md` puts each between the comments that name it, with `--check README.md` says whether that would change it."""

import argparse
import re
import sys
from pathlib import Path

import recorded
import timing
from recorded import Missing, Recorded, bench_command, ratios, tflops, us

SUITES = {
    "square": "N x N x N, N = 256 to 16384",
    "llm": "weights of language models, M = 1 to 8192",
    "odd": "sizes that nobody padded",
    "skinny": "one or two sizes far smaller than the others",
    "batched": "many small products at once",
    "layouts": "all four operand orders",
    "random": "drawn by chance: all orders, half of them in multiples of 8",
}

# (suite, M, N, K): rows of the table of single products.
SHOWN = (
    ("square", 4096, 4096, 4096),
    ("square", 8192, 8192, 8192),
    ("llm", 16, 4096, 4096),
    ("llm", 128, 28672, 4096),
    ("llm", 4096, 4096, 14336),
    ("odd", 4095, 4095, 4095),
    ("odd", 2048, 50257, 1600),
    ("skinny", 1, 128256, 4096),
    ("skinny", 64, 64, 65536),
    ("batched", 1024, 1024, 1024),
)


def table(header, lines):
    """A Markdown table, numbers to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return ["| " + " | ".join(map(str, line)) + " |" for line in (header, rule, *lines)]


def footer(*sources):
    """Where figures come from and how they were made."""
    return ["", *dict.fromkeys(f"<sub>{source}: `{source.result['command']}`</sub>" for source in sources)]


def times(value):
    return f"{value:.2f}"


def duration(value):
    """Microseconds, to three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def mean_over(rows, peer):
    found = ratios(rows, peer)
    return times(timing.geomean(found)) if found else "-"


def summary(results, dtype):
    """One sentence for the top."""
    llm = results.suite("llm", dtype)
    llm_ratios = ratios(llm.rows)
    parts = [f"{timing.geomean(llm_ratios):.2f} x torch's speed over {len(llm_ratios)} products of language models"]
    for suite, text in (("square", "squares"), ("odd", "odd sizes"), ("random", "shapes drawn by chance")):
        try:
            source = results.suite(suite, dtype)
        except Missing:
            continue
        if source.card == llm.card:
            parts.append(f"{timing.geomean(ratios(source.rows)):.2f} x over {text}")
    return [f"On one {llm.card}, {dtype}: " + ", ".join(parts) + " (geometric means)."]


def suites(results, dtype):
    """Every suite beside torch and cuBLASLt."""
    lines, sources = [], []
    for suite, what in SUITES.items():
        try:
            source = results.suite(suite, dtype)
        except Missing:
            continue
        found = ratios(source.rows)
        slowest, fastest = min(found), max(found)
        lines.append(
            (
                f"`{suite}`: {what}",
                len(found),
                f"**{mean_over(source.rows, 'torch')}**",
                times(slowest),
                times(fastest),
            )
            + (mean_over(source.rows, "cublaslt"),)
        )
        sources.append(source)
    if not sources:
        raise Missing(f"any suite, {dtype}", bench_command(dtype))
    header = ("suite", "shapes", "over torch", "least", "most", "over cuBLASLt's best of 12")
    return [*table(header, lines), *footer(*sources)]


def shapes(results, dtype):
    """Single products."""
    lines, sources = [], []
    for suite, m, n, k in SHOWN:
        try:
            source = results.suite(suite, dtype)
        except Missing:
            continue
        for row in source.rows:
            if (row["m"], row["n"], row["k"]) == (m, n, k):
                batch = f"{row['batch']} x " if row["batch"] > 1 else ""
                peer = timing.ratio(row, "cublaslt")
                lines.append(
                    (f"{batch}{m} x {n} x {k}", duration(us(row)), f"{tflops(row):.0f}", duration(us(row, "torch")))
                    + (f"**{times(timing.ratio(row, 'torch'))}**", times(peer) if peer else "-")
                )
                sources.append(source)
                break
    if not lines:
        raise Missing(f"single products, {dtype}", bench_command(dtype))
    header = ("M x N x K", "tcgemm, us", "TFLOP/s", "torch, us", "over torch", "over cuBLASLt's best of 12")
    return [*table(header, lines), *footer(*sources)]


def ladder(results, dtype):
    """Every family on the largest size that was measured."""
    source = results.ladder()
    size = max((row["m"] * row["n"] * row["k"] for row in source.rows))
    lines = []
    for row in source.rows:
        if row["m"] * row["n"] * row["k"] == size and row["in_dtype"] in (dtype, "float32"):
            name = "torch" if row["family"] == "torch" else f"`{row['family']}`"
            rate = f"{100 * row['of_rate']:.0f} % of `{row['rate']}`" if row.get("of_rate") else "-"
            lines.append(
                (f"{name}, {row['in_dtype']}", duration(row["time"]["us"]), f"{row['tflops']:.0f}")
                + (times(row["of_torch"]) if row["of_torch"] else "-", rate)
            )
            shape = f"{row['m']} x {row['n']} x {row['k']}"
    header = (f"family, {shape}", "us", "TFLOP/s", "over torch", "of what its instruction can do")
    return [*table(header, lines), *footer(source)]


def host(results, dtype):
    """What a call costs the host."""
    source = results.host()
    lines = [
        (f"`{row['case']}`" + (f", {row['framework']}" if row["framework"] else ""), f"{row['us']:.2f}")
        for row in source.rows
    ]
    return [*table(("call", "us"), lines), *footer(source)]


def numerics(results, dtype):
    """Error, run-to-run equality and batch invariance, as sentences."""
    repeat, rows = results.numerics("repeat"), results.numerics("rows")
    error = results.numerics("error", in_dtype=dtype, out_dtype=dtype, data="normal")
    k = max(row["k"] for row in error.rows)
    found = {row["of"]: row for row in error.rows if row["k"] == k}
    lines = []
    for of, row in sorted(found.items(), key=lambda item: list(recorded.PEERS).index(item[0])):
        runs = [row for row in repeat.rows if row["of"] == of]
        alone = [row for row in rows.rows if row["of"] == of]
        lines.append(
            (recorded.PEERS[of], f"{row['mean_ulp']:.3f}", f"{row['max_ulp']:.3g}")
            + (f"{sum(row['different'] for row in runs)} of {sum(row['runs'] for row in runs)}",)
            + (f"{sum(row['different'] > 0 for row in alone)} of {len(alone)}",)
        )
    header = (
        "",
        f"mean error, ulp, K = {k}",
        "largest",
        "runs with other bits",
        "cases where a row's bits depend on others",
    )
    return [*table(header, lines), *footer(error, repeat, rows)]


def distributed(results, dtype):
    """One product over several GPUs."""
    source = results.distributed()
    lines = [
        (row["case"], duration(us(row)), duration(us(row, "torch")), f"**{times(timing.ratio(row, 'torch'))}**")
        for row in source.rows
    ]
    first = source.rows[0]
    header = (
        f"{first['m']} x {first['n']} x {first['k']}, {first['in_dtype']}",
        "tcgemm, us",
        "torch, us",
        "over torch",
    )
    return [*table(header, lines), *footer(source)]


def records(results, dtype):
    """What there is: one line a result."""
    if not results.results:
        raise Missing("any result", "all")
    lines = [
        (path.name, result["kind"], len(result["rows"]), result["date"], result["machine"]["card"] or "-")
        + (
            f"{(result['commit'] or '-'):.8}",
            f"`{result['command']}`" + ("" if result["complete"] else ", interrupted"),
        )
        for path, result in sorted(results.results, key=lambda pair: pair[0].name)
    ]
    return table(("file", "kind", "rows", "date", "card", "commit", "command"), lines)


BLOCKS = {block.__name__: block for block in (summary, suites, shapes, ladder, host, numerics, distributed, records)}


def fill(text, results, dtype, missing=None):
    """`text` with every block between `<!-- tables.py NAME -->` and `<!-- end NAME -->` as recorded; those that are not
    recorded stay as they are, and their names go to `missing` with the reason."""

    def block(match):
        name = match[1]
        if name not in BLOCKS:
            raise ValueError(f"{match[0].splitlines()[0]}: expected one of {', '.join(BLOCKS)}")
        try:
            lines = BLOCKS[name](results, dtype)
        except Missing as reason:
            if missing is not None:
                missing[name] = str(reason)
            return match[0]
        return f"<!-- tables.py {name} -->\n" + "\n".join(lines) + f"\n<!-- end {name} -->"

    return re.sub(r"<!-- tables\.py (\w+) -->\n.*?<!-- end \1 -->", block, text, flags=re.DOTALL)


def main(argv=None):
    parser = argparse.ArgumentParser(description="The README's figures as Markdown, from the recorded results.")
    parser.add_argument("--results", type=Path, default=recorded.RESULTS, metavar="DIR", help="benchmarks/results")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the blocks into a Markdown file")
    parser.add_argument("--check", type=Path, metavar="FILE", help="exit with 1 where --write would change it")
    options = parser.parse_args(argv)
    results = Recorded(options.results)
    for name, reason in results.refused.items():
        print(f"{name}: left out: {reason}", file=sys.stderr)
    missing = {}
    if path := options.write or options.check:
        text = path.read_text()
        filled = fill(text, results, options.dtype, missing)
        if options.write:
            path.write_text(filled)
        elif filled != text:
            print(f"{path}: not what is recorded; python benchmarks/tables.py --write {path}", file=sys.stderr)
            return 1
    else:
        for name, block in BLOCKS.items():
            try:
                print(f"<!-- {name} -->", *block(results, options.dtype), "", sep="\n")
            except Missing as reason:
                missing[name] = str(reason)
    for name, reason in missing.items():
        print(f"{name}: {reason}", file=sys.stderr)
    return 1 if results.refused else 0


if __name__ == "__main__":
    sys.exit(main())
