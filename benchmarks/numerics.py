"""What the results are worth: the error against float64 over K, whether bits change from run to run, and what the bits of a
row depend on, for tcgemm beside torch. Writes a result of kind `numerics`, whose rows are described below.

`what` = `error`: one product [m,k] @ [k,n] of one data, `of` tcgemm, invariant (batch_invariant=True) or torch. `data`:
`normal`, or `uniform` in [0, 1), where no sum cancels. In units in the last place (`ulp`) of the exact result in out_dtype:
`max_ulp`, `mean_ulp`, and, where out_dtype is in_dtype, `histogram`, the counts in bins of `settings.bin_ulp`, the last one
open; one correct rounding is at most 0.5. Over the root mean square of the exact result: `max_relative`, `rms_relative`.
`nonfinite`: elements that are not finite, which the others leave out. `kernel`, `splits`: tcgemm's plan.

`what` = `repeat`: `runs` of one product while other work disturbs the device; `different`: those whose bits are not the
first's.

`what` = `rows`: the first m rows of a product of `of_rows` rows, computed alone: `different` of its `elements` have other
bits. `place`: `first`, the rows stay where they were; `last`, they are the last m of of_rows others.
"""

import argparse

import timing

DTYPES = ("float16", "bfloat16")
PRECISION = {"float16": (11, -14), "bfloat16": (8, -126), "float32": (24, -126)}  # significant bits, least exponent
BIN_ULP, BINS = 0.02, 76  # to 1.5 ulp

ERROR_MN = 512
ERROR_K = tuple(2**i for i in range(4, 17))

# (m, n, k), order: split K, clusters, unaligned operands, a batch of tiles in more than one wave.
REPEATED = (
    ((16, 4096, 4096), "nt"),
    ((128, 4096, 14336), "nt"),
    ((64, 64, 65536), "nn"),
    ((1001, 1003, 1005), "nt"),
    ((4096, 4096, 4096), "nt"),
    ((2048, 2112, 7168), "tt"),
)
RUNS = 25

WEIGHTS = ((4096, 4096), (4096, 14336), (7168, 2048))
OF_ROWS = 1024
ROWS = (1, 2, 3, 4, 8, 16, 24, 32, 64, 100, 128, 200, 256, 512, 768, 1000, 1024)


def main():
    parser = argparse.ArgumentParser(
        description="Error against float64, run-to-run equality and batch invariance of tcgemm beside torch."
    )
    parser.add_argument("--json", metavar="FILE", help="where to store the result")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tries the script, on little")
    options = parser.parse_args()
    lab = Lab(options.device)
    with timing.Record(
        "numerics", {"device": options.device, "bin_ulp": BIN_ULP, **lab.settings}, options.json
    ) as record:
        errors(lab, record)
        repeats(lab, record)
        rows(lab, record)
    print("\n".join(report(record.rows)))
    return 130 if record.interrupted else 0


class Lab:
    """The device, and the products to compare, each f(a, b, out_dtype)."""

    def __init__(self, device):
        self.tcgemm = timing.product()
        if device == "cuda":
            self.torch = timing.cuda_torch()
        else:
            try:
                import torch
            except ImportError as error:
                raise timing.Unusable(f"torch is needed and is missing: {error}") from error
            self.torch = torch
        self.device = device
        self.small = device == "cpu"
        matmul = self.torch.backends.cuda.matmul
        # torch's defaults: its split sums may be added in the operands' dtype.
        self.settings = {
            "seed": 0,
            "allow_fp16_reduced_precision_reduction": bool(matmul.allow_fp16_reduced_precision_reduction),
            "allow_bf16_reduced_precision_reduction": bool(matmul.allow_bf16_reduced_precision_reduction),
        }
        self.generator = self.torch.Generator(device).manual_seed(0)
        self.products = {"tcgemm": self.by_tcgemm, "torch": self.by_torch}
        if device == "cuda":  # host arrays have no plan that could depend on the rows
            self.products["invariant"] = self.by_invariant

    def by_tcgemm(self, a, b, out_dtype):
        return self.tcgemm.matmul(a, b, out_dtype=out_dtype)

    def by_invariant(self, a, b, out_dtype):
        return self.tcgemm.matmul(a, b, out_dtype=out_dtype, batch_invariant=True)

    def by_torch(self, a, b, out_dtype):
        """float32 from 16-bit operands: torch.mm's own out_dtype, which it has on CUDA only."""
        wide = getattr(self.torch, out_dtype)
        if wide == a.dtype:
            return self.torch.mm(a, b)
        return self.torch.mm(a, b, out_dtype=wide) if self.device == "cuda" else a.to(wide) @ b.to(wide)

    def random(self, rows, cols, dtype, data="normal"):
        draw = {"normal": self.torch.randn, "uniform": self.torch.rand}[data]
        return draw(rows, cols, device=self.device, generator=self.generator).to(getattr(self.torch, dtype))

    def operands(self, m, n, k, order, dtype, data="normal"):
        a = self.random(m, k, dtype, data) if order[0] == "n" else self.random(k, m, dtype, data).T
        b = self.random(k, n, dtype, data) if order[1] == "n" else self.random(n, k, dtype, data).T
        return a, b

    def plan(self, of, a, b, out_dtype):
        if of == "torch":
            return {"kernel": None, "splits": None}
        plan = self.tcgemm.explain(a, b, out_dtype=out_dtype, batch_invariant=True if of == "invariant" else None)
        return {"kernel": plan["kernel"], "splits": plan.get("splits")}

    def different(self, x, y):
        """How many elements have other bits."""
        bits = {2: self.torch.int16, 4: self.torch.int32}[x.element_size()]
        return int((x.contiguous().view(bits) != y.contiguous().view(bits)).sum())


# ---- error against float64 -----------------------------------------------------------------------------------------


def errors(lab, record):
    size = 64 if lab.small else ERROR_MN
    for in_dtype in DTYPES:
        for data in ("normal", "uniform"):
            for k in ERROR_K if not lab.small else ERROR_K[:6]:
                a, b = lab.operands(size, size, k, "nt", in_dtype, data)
                exact = a.double() @ b.double()
                for out_dtype in (in_dtype, "float32"):
                    for of, product in lab.products.items():
                        try:
                            result = product(a, b, out_dtype)
                        except Exception as error:  # a torch without float32 results
                            record.missing[f"{of}, {in_dtype} to {out_dtype}"] = timing.one_line(error)
                            continue
                        record.rows.append(
                            {"what": "error", "of": of, "data": data, "m": size, "n": size, "k": k, "order": "nt"}
                            | {"in_dtype": in_dtype, "out_dtype": out_dtype}
                            | measure(lab, result, exact, histogram=out_dtype == in_dtype)
                            | lab.plan(of, a, b, out_dtype)
                        )


def measure(lab, result, exact, histogram):
    """The statistics of one result's error."""
    torch = lab.torch
    bits, least = PRECISION[str(result.dtype).removeprefix("torch.")]
    finite = result.isfinite()
    exact = exact[finite]
    error = (result[finite].double() - exact).abs()
    # frexp's mantissa is in [0.5, 1): its exponent is one above that of IEEE 754.
    exponent = (torch.frexp(exact).exponent - 1).clamp_min(least)
    ulps = error * torch.exp2((bits - 1 - exponent).double())
    rms = exact.square().mean().sqrt()
    found = {
        "max_ulp": four_digits(ulps.max()),
        "mean_ulp": four_digits(ulps.mean()),
        "max_relative": four_digits(error.max() / rms),
        "rms_relative": four_digits(error.square().mean().sqrt() / rms),
        "nonfinite": int((~finite).sum()),
    }
    if histogram:
        bins = (torch.ceil(ulps / BIN_ULP) - 1).clamp(0, BINS - 1).long()  # half a unit is in the bin that it ends
        found["histogram"] = torch.bincount(bins, minlength=BINS).tolist()
    return found


def four_digits(value):
    return float(f"{float(value):.4g}")


# ---- run to run ----------------------------------------------------------------------------------------------------


def repeats(lab, record):
    runs = 3 if lab.small else RUNS
    for (m, n, k), order in REPEATED[3:4] if lab.small else REPEATED:
        for in_dtype in (*DTYPES, "float32"):
            a, b = lab.operands(m, n, k, order, in_dtype)
            for of, product in lab.products.items():
                first = product(a, b, in_dtype)
                different = 0
                for _ in range(runs - 1):
                    disturb(lab)
                    different += lab.different(product(a, b, in_dtype), first) > 0
                record.rows.append(
                    {"what": "repeat", "of": of, "m": m, "n": n, "k": k, "order": order, "in_dtype": in_dtype}
                    | {"out_dtype": in_dtype, "runs": runs, "different": different}
                    | lab.plan(of, a, b, in_dtype)
                )


def disturb(lab):
    """Work on another stream that still runs, with no end in step with what follows: blocks start in another order, and
    caches hold something else."""
    if lab.small:
        return
    torch = lab.torch
    if not hasattr(lab, "noise"):
        lab.noise = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    noise, stream = lab.noise
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(torch.randint(1, 20000, ()).item()))
        noise.mul_(1.0)


# ---- what a row's bits depend on -----------------------------------------------------------------------------------


def rows(lab, record):
    of_rows = 64 if lab.small else OF_ROWS
    for in_dtype in DTYPES:
        for n, k in ((96, 160),) if lab.small else WEIGHTS:
            x, others, w = (lab.random(count, k, in_dtype) for count in (of_rows, of_rows, n))
            for of, product in lab.products.items():
                whole = product(x, w.T, in_dtype)
                for m in (m for m in ROWS if m <= of_rows):
                    row = {"what": "rows", "of": of, "m": m, "n": n, "k": k, "in_dtype": in_dtype, "of_rows": of_rows}
                    alone = product(x[:m], w.T, in_dtype)
                    moved = product(lab.torch.cat([others[m:], x[:m]]), w.T, in_dtype)[of_rows - m :]
                    for place, result in (("first", alone), ("last", moved)):
                        different = lab.different(result, whole[:m])
                        record.rows.append(row | {"place": place, "elements": m * n, "different": different})


# ---- the terminal --------------------------------------------------------------------------------------------------


def report(rows):
    """Lines: the errors at the ends of K, what changed from run to run, what depended on the rows."""
    error = [row for row in rows if row["what"] == "error" and row["in_dtype"] == row["out_dtype"]]
    sizes = sorted({row["k"] for row in error})
    lines = [
        [f"{row['in_dtype']} {row['data']} K={row['k']}", row["of"], row["mean_ulp"], row["max_ulp"]]
        for row in error
        if row["k"] in (sizes[0], sizes[-1])
    ]
    yield from timing.table(lines, ["error", "of", "mean ulp", "max ulp"])
    repeat = [row for row in rows if row["what"] == "repeat"]
    for of in dict.fromkeys(row["of"] for row in repeat):
        mine = [row for row in repeat if row["of"] == of]
        runs, different = (sum(row[key] for row in mine) for key in ("runs", "different"))
        yield f"run to run, {of}: {different} of {runs} runs of {len(mine)} products differ from the first"
    alone = [row for row in rows if row["what"] == "rows"]
    for of in dict.fromkeys(row["of"] for row in alone):
        mine = [row for row in alone if row["of"] == of]
        changed = sum(row["different"] > 0 for row in mine)
        yield f"bits of a row, {of}: in {changed} of {len(mine)} cases they depend on the other rows"


if __name__ == "__main__":
    timing.run_main(main)
