"""Draws every plot from the recorded results, without a GPU: `python benchmarks/plots.py [PLOT ...] [--results DIR] [--out DIR]`.
One function a plot; each is drawn for light and for dark pages, and one whose results are missing says what records them."""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib

import recorded
import timing
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from recorded import Missing, Recorded, bench_command, peers, ratios, tflops, us

OUT = timing.ROOT / "benchmarks" / "plots"
WIDTH = 8.3  # inches: 830 pixels, the width of a README on GitHub


class Theme(NamedTuple):
    """Okabe and Ito's colours, which the colour-blind can tell apart, moved for contrast with the page."""

    name: str
    page: str
    ink: str
    muted: str
    grid: str
    peers: dict
    series: tuple  # for what is no peer
    slower: str  # the ends of the heat map, whose middle is `even`
    even: str
    faster: str


LIGHT = Theme(
    name="light",
    page="#ffffff",
    ink="#1f2328",
    muted="#59636e",
    grid="#e4e7eb",
    peers={
        "tcgemm": "#0072b2",
        "invariant": "#56b4e9",
        "torch": "#d55e00",
        "cublaslt": "#009e73",
        "cupy": "#cc79a7",
        "triton": "#9a7d0a",
    },
    series=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#9a7d0a", "#56b4e9"),
    slower="#d55e00",
    even="#f6f8fa",
    faster="#0072b2",
)
DARK = Theme(
    name="dark",
    page="#0d1117",
    ink="#f0f6fc",
    muted="#9198a1",
    grid="#262c36",
    peers={
        "tcgemm": "#56b4e9",
        "invariant": "#b3dcf7",
        "torch": "#f0883e",
        "cublaslt": "#2fc79a",
        "cupy": "#e39ac4",
        "triton": "#f0e442",
    },
    series=("#56b4e9", "#f0883e", "#2fc79a", "#e39ac4", "#f0e442", "#b3dcf7"),
    slower="#e8702a",
    even="#161b22",
    faster="#3a9bdc",
)
THEMES = (LIGHT, DARK)

MARKERS = {"tcgemm": "o", "invariant": "o", "torch": "s", "cublaslt": "^", "cupy": "D", "triton": "v"}
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "tcgemm",  # the same file from the same results
}


# ---- what the plots share ------------------------------------------------------------------------------------------


class Page:
    """A figure with a title, what one sees in one or two lines, room for a key where asked, and the source at its foot."""

    FOOT, FOOT_LINE = 0.26, 0.13  # inches, as all heights here

    def __init__(self, theme, title, subtitle, sources, height=4.2, rows=1, columns=1, key=False, **subplots):
        self.theme = theme
        self.height = height
        lines = subtitle.count("\n") + 1
        self.head = 0.5 + 0.17 * lines
        top = self.head + (0.25 if key else 0)
        machines = list(dict.fromkeys(map(str, sources)))
        foot = self.FOOT + self.FOOT_LINE * (len(machines) - 1)
        self.figure = Figure(figsize=(WIDTH, height), dpi=100, facecolor=theme.page, layout="constrained")
        self.figure.get_layout_engine().set(rect=(0.005, foot / height, 0.99, 1 - (top + foot) / height), w_pad=0.08)
        text = self.figure.text
        text(0.012, 1 - 0.12 / height, title, color=theme.ink, fontsize=13, weight="bold", va="top")
        text(0.012, 1 - 0.40 / height, subtitle, color=theme.muted, fontsize=9.5, va="top")
        files = ", ".join(dict.fromkeys(source.path.name for source in sources))
        source = ";\n".join(machines) + f" ({files})"
        text(0.012, 0.07 / height, source, color=theme.muted, fontsize=7.5, va="bottom")
        self.grid = self.figure.subplots(rows, columns, squeeze=False, **subplots)
        for axes in self.grid.flat:
            self.dress(axes)

    @property
    def axes(self):
        return self.grid[0, 0]

    def dress(self, axes):
        theme = self.theme
        axes.set_facecolor(theme.page)
        axes.tick_params(colors=theme.muted, labelcolor=theme.ink, labelsize=9)
        for spine in axes.spines.values():
            spine.set_color(theme.muted)
        axes.xaxis.label.set_color(theme.muted)
        axes.yaxis.label.set_color(theme.muted)
        axes.title.set_color(theme.ink)
        axes.grid(color=theme.grid, linewidth=0.8)
        axes.set_axisbelow(True)

    def line(self, axes, peer, x, y, **style):
        look = {
            "color": self.theme.peers.get(peer, self.theme.muted),
            "marker": MARKERS.get(peer, "x"),
            "markersize": 5,
        }
        look |= {"linewidth": 2 if peer == "tcgemm" else 1.4, "zorder": 4 if peer == "tcgemm" else 3}
        look |= {"linestyle": "--"} if peer == "invariant" else {}
        look |= {"label": recorded.PEERS.get(peer, peer)}
        axes.plot(x, y, **(look | style))

    def legend(self, axes, **where):
        axes.legend(labelcolor=self.theme.ink, fontsize=9, handlelength=2.4, **where)

    def key(self, axes):
        """The legend of one of the axes, as a line between the head and the axes."""
        handles, labels = axes.get_legend_handles_labels()
        found = dict(reversed([*zip(labels, handles)]))  # of several lines with one label, the first
        legend = self.figure.legend(
            [*found.values()][::-1], [*found][::-1], loc="upper left", bbox_to_anchor=(0, 1 - (self.head - 0.08) / self.height),
            ncols=len(found), labelcolor=self.theme.ink, fontsize=9, handlelength=2.4, columnspacing=1.6,
        )  # fmt: skip
        legend.set_in_layout(False)

    def note(self, axes, text):
        """Small print in the upper left corner of the axes."""
        axes.annotate(
            text, (0, 1), (6, -6), xycoords="axes fraction", textcoords="offset points", va="top",
            color=self.theme.muted, fontsize=8.5, zorder=6,
        )  # fmt: skip

    def level(self, axes, y, text, below=False, **style):
        """A horizontal line with its text above the left end, or below it."""
        axes.axhline(y, color=self.theme.muted, linewidth=1.1, zorder=2, **({"linestyle": (0, (5, 3))} | style))
        axes.annotate(
            text, (0, y), (4, -3 if below else 2), xycoords=("axes fraction", "data"), textcoords="offset points",
            color=self.theme.muted, fontsize=8.5, va="top" if below else "baseline",
        )  # fmt: skip

    def cells(self, values, colours, shade, text):
        """A table of coloured cells: values[row name, column number], each `shade`d from 0 to 1."""
        axes = self.axes
        names = list(dict.fromkeys(name for name, _ in values))
        columns = sorted({column for _, column in values})
        shades = {place: min(max(shade(value), 0), 1) for place, value in values.items()}
        image = [[shades.get((name, column), math.nan) for column in columns] for name in names]
        axes.imshow(image, cmap=colours, norm=Normalize(0, 1), aspect="auto")
        size = 9 if len(columns) < 15 else 8
        for (name, column), value in values.items():
            axes.text(
                columns.index(column), names.index(name), text(value), ha="center", va="center", fontsize=size,
                color=contrast(colours(shades[name, column])),
            )  # fmt: skip
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(names)), names)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        # The page shows between the cells.
        axes.set_xticks([x + 0.5 for x in range(len(columns) - 1)], minor=True)
        axes.set_yticks([y + 0.5 for y in range(len(names) - 1)], minor=True)
        axes.grid(False)
        axes.grid(which="minor", color=self.theme.page, linewidth=2)
        axes.tick_params(which="both", length=0)
        axes.tick_params(axis="x", labelsize=size)
        for spine in axes.spines.values():
            spine.set_visible(False)


def cells_height(values):
    """Of a page with such a table, in inches."""
    return 1.6 + 0.31 * len({name for name, _ in values})


def log2_axis(axis, values):
    """A logarithmic axis with these ticks and no others."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_minor_locator(NullLocator())


def plain(axis):
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def contrast(colour):
    """Black or white, whichever reads better on `colour`: WCAG 2's relative luminance and contrast."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def gain(values):
    """For titles: `1.08 x`."""
    return f"{timing.geomean(values):.2f} x"


def optional(find):
    """What find() gives, None where it is missing: a plot that is less without it, but still one."""
    try:
        return find()
    except Missing:
        return None


# ---- the plots -----------------------------------------------------------------------------------------------------


def square(results, theme, dtype):
    """TFLOP/s over N, with what the instructions can do."""
    source = results.suite("square", dtype)
    ceilings = optional(lambda: results.ceilings(source.card))
    rows = sorted(source.rows, key=lambda row: row["n"])
    page = Page(
        theme,
        f"Square products, {dtype}",
        f"N x N x N, TFLOP/s; higher is better. Geometric mean over torch: {gain(ratios(rows))}",
        [source, *filter(None, [ceilings])],
    )
    axes = page.axes
    for peer in peers(rows):
        timed = [row for row in rows if peer in row["times"]]
        page.line(axes, peer, [row["n"] for row in timed], [tflops(row, peer) for row in timed])
    top = max(tflops(row, peer) for row in rows for peer in row["times"])
    for mode, text in (("sustained", "at the power limit"), ("burst", "for 2 ms")):
        if ceilings and (rate := recorded.top_rate(ceilings, dtype, mode)):
            page.level(axes, rate[0], f"{rate[1]} alone, {text}: {rate[0]:.0f}", below=mode == "sustained")
            top = max(top, rate[0])
    log2_axis(axes.xaxis, [row["n"] for row in rows])
    axes.set(xlabel="N", ylabel="TFLOP/s", ylim=(0, top * 1.09))
    axes.xaxis.grid(False)
    page.legend(axes, loc="lower right")
    return page.figure


def llm(results, theme, dtype):
    """Speed-up over torch: M across, weights down."""
    source = results.suite("llm", dtype)
    cells = {(f"{row['n']} x {row['k']}", row["m"]): timing.ratio(row, "torch") for row in source.rows}
    page = Page(
        theme,
        f"Products of language models, {dtype}: {gain(cells.values())} torch's speed",
        "torch's time over tcgemm's, x[M, K] @ w[N, K].T. Above 1 (blue) tcgemm is faster, below (orange) torch.",
        [source],
        height=cells_height(cells),
    )
    page.cells(
        cells,
        LinearSegmentedColormap.from_list("speed", [theme.slower, theme.even, theme.faster]),
        shade=lambda ratio: (1 + math.log(ratio, 1.4)) / 2,
        text=lambda ratio: f"{ratio:.2f}",
    )
    page.axes.set(xlabel="M", ylabel="N x K")
    return page.figure


def roofline(results, theme, dtype):
    """All shapes below what memory and instructions allow."""
    found = {suite: optional(lambda suite=suite: results.suite(suite, dtype)) for suite in ROOFLINE_SUITES}
    found = {suite: source for suite, source in found.items() if source}
    if not found:
        raise Missing(f"any suite, {dtype}", bench_command(dtype))
    first = next(iter(found.values()))
    ceilings = results.ceilings(first.card)
    shown = {
        suite: [
            row for row in source.rows if tflops(row) >= ROOFLINE_LEAST and tflops(row, "torch") >= ROOFLINE_LEAST
        ]
        for suite, source in found.items()
    }
    count, total = sum(map(len, shown.values())), sum(len(source.rows) for source in found.values())
    left_out = f" ({total - count} below {ROOFLINE_LEAST:g} TFLOP/s are left out)" if count < total else ""
    page = Page(
        theme,
        f"Roofline, {dtype}: {count} shapes{left_out}",
        "TFLOP/s over FLOP a byte of A, B and C. Bounds are measured; small products are bound by latency instead.",
        [*found.values(), ceilings],
        height=4.8,
    )
    axes = page.axes
    points = [row for rows in shown.values() for row in rows]
    x = [row["flops"] / row["set_bytes"] for row in points]
    axes.plot(
        x, [tflops(row, "torch") for row in points], linestyle="none", marker="_", markersize=6, color=theme.muted,
        zorder=2, label="torch, all suites",
    )  # fmt: skip
    for (suite, rows), colour, marker in zip(shown.items(), theme.series, "oDs^vP"):
        axes.plot(
            [row["flops"] / row["set_bytes"] for row in rows], [tflops(row) for row in rows], linestyle="none",
            marker=marker, markersize=5.5, color=colour, markeredgecolor=theme.page, markeredgewidth=0.5, zorder=3,
            label=f"tcgemm, {suite}",
        )  # fmt: skip
    low, high = min(x) / 1.5, max(x) * 1.5
    tops = [recorded.top_rate(ceilings, dtype, mode) for mode in ("sustained", "burst")]
    rate, read = next(filter(None, tops), None), recorded.read_rate(ceilings)
    if rate and read:
        knee = rate[0] / read
        axes.plot([low, knee, high], [low * read, rate[0], rate[0]], color=theme.ink, linewidth=1.4, zorder=1)
        axes.annotate(
            f"{rate[1]} alone: {rate[0]:.0f}", (high, rate[0]), (-4, 4), textcoords="offset points", ha="right",
            color=theme.muted, fontsize=8.5,
        )  # fmt: skip
        axes.annotate(
            f"reading memory: {read:.2f} TB/s", (knee / 16, rate[0] / 16), (-8, 6), textcoords="offset points",
            ha="right", color=theme.muted, fontsize=8.5,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOP a byte", ylabel="TFLOP/s")
    plain(axes.xaxis)
    plain(axes.yaxis)
    page.legend(axes, loc="lower right")
    return page.figure


ROOFLINE_SUITES = ("llm", "square", "skinny", "odd", "batched", "layouts")
ROOFLINE_LEAST = 0.5  # TFLOP/s: a product of one element would set the scale for all


def cliff(results, theme, dtype):
    """What one row, column and k more costs."""
    source = results.suite("cliff", dtype)
    rows = sorted(source.rows, key=lambda row: row["n"])
    worst = max(rows, key=lambda row: us(row, "torch"))
    page = Page(
        theme,
        f"One more row and column, {dtype}",
        f"N x N x N for N = {rows[0]['n']} to {rows[-1]['n']}, microseconds; lower is better. "
        f"At N = {worst['n']} torch takes {timing.ratio(worst, 'torch'):.1f} x tcgemm's time.",
        [source],
        key=True,
    )
    axes = page.axes
    for peer in peers(rows):
        timed = [row for row in rows if peer in row["times"]]
        style = {"markersize": 3.2, "linewidth": 0.6}
        page.line(axes, peer, [row["n"] for row in timed], [us(row, peer) for row in timed], **style)
    step = 16 if rows[-1]["n"] - rows[0]["n"] > 64 else 8
    first = math.ceil(rows[0]["n"] / step) * step
    axes.set_xticks(range(first, rows[-1]["n"] + 1, step))
    axes.set(xlabel="N", ylabel="microseconds", ylim=(0, None))
    page.key(axes)
    return page.figure


def steps(results, theme, dtype):
    """Latency over few rows, beside the time it takes to read the operands."""
    source = results.suite("steps", dtype)
    ceilings = optional(lambda: results.ceilings(source.card))
    floor_us = recorded.read_floor(ceilings) if ceilings else None
    weights = list(dict.fromkeys((row["n"], row["k"]) for row in source.rows))
    page = Page(
        theme,
        f"Few rows, {dtype}: microseconds over M",
        "x[M, K] @ w[N, K].T; lower is better."
        + (" Grey: the time to read x and w alone, as measured on this card." if floor_us else ""),
        [source, *filter(None, [ceilings])],
        height=4.1,
        columns=len(weights),
        key=True,
    )
    for axes, (n, k) in zip(page.grid[0], weights):
        rows = sorted((row for row in source.rows if (row["n"], row["k"]) == (n, k)), key=lambda row: row["m"])
        if floor_us:
            # C is left out: what is written need not have arrived when a launch ends.
            floors = [floor_us(row["set_bytes"] - row["m"] * n * _BYTES[row["out_dtype"]]) for row in rows]
            axes.fill_between([row["m"] for row in rows], 0, floors, color=theme.grid, zorder=1, linewidth=0)
            axes.plot(
                [row["m"] for row in rows], floors, color=theme.muted, linewidth=1, zorder=2, label="reading alone"
            )
        for peer in peers(rows):
            timed = [row for row in rows if peer in row["times"]]
            style = {"markersize": 2.6 if len(timed) > 16 else 4, "linewidth": 1.6 if peer == "tcgemm" else 1.1}
            page.line(axes, peer, [row["m"] for row in timed], [us(row, peer) for row in timed], **style)
        sizes = [row["m"] for row in rows]
        log2_axis(axes.xaxis, [2**i for i in range(0, 14, 2) if sizes[0] <= 2**i <= sizes[-1]])
        axes.set(xlabel="M", title=f"w {n} x {k}", ylim=(0, None))
    page.grid[0, 0].set_ylabel("microseconds")
    page.key(page.grid[0, 0])
    return page.figure


_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def ladder(results, theme, dtype):
    """One bar a kernel family, beside what its instruction can do."""
    source = results.ladder()
    rows = [row for row in source.rows if row["in_dtype"] in (dtype, "float32")]
    sizes = sorted({(row["m"], row["n"], row["k"]) for row in rows}, key=math.prod)[-2:]
    if not rows:
        raise Missing(f"the ladder of families, {dtype}", "ladder")
    counts = [sum((row["m"], row["n"], row["k"]) == size for row in rows) for size in sizes]
    page = Page(
        theme,
        f"The ladder: every family of kernels, {dtype}",
        "TFLOP/s. The tick is what the family's instruction can do, measured in the same run without memory traffic.",
        [source],
        height=1.3 + sum(0.42 + 0.29 * count for count in counts),
        rows=len(sizes),
        sharex=True,
        height_ratios=counts,
    )
    top = max(max(row["tflops"], row.get("rate_tflops") or 0) for row in rows)
    for axes, size in zip(page.grid[:, 0], sizes):
        bars = [row for row in rows if (row["m"], row["n"], row["k"]) == size]
        for y, row in enumerate(bars):
            colour = theme.peers["torch" if row["family"] == "torch" else "tcgemm"]
            axes.barh(y, row["tflops"], 0.66, color=colour, zorder=3)
            reach = row["tflops"]
            notes = [f"{row['tflops']:.0f}" if row["tflops"] >= 10 else f"{row['tflops']:.1f}"]
            if row.get("rate_tflops"):
                axes.plot([row["rate_tflops"]] * 2, [y - 0.4, y + 0.4], color=theme.ink, linewidth=2, zorder=4)
                reach = max(reach, row["rate_tflops"])
                notes.append(f"{100 * row['of_rate']:.0f} % of {row['rate']}")
            if row["family"] != "torch" and row.get("of_torch"):
                notes.append(f"{row['of_torch']:.2f} x torch")
            axes.annotate(
                ", ".join(notes), (reach, y), (6, 0), textcoords="offset points", va="center", fontsize=8.5,
                color=theme.ink,
            )  # fmt: skip
        axes.set_yticks(range(len(bars)), [family_label(row, dtype) for row in bars])
        axes.invert_yaxis()
        axes.yaxis.grid(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title("{} x {} x {}".format(*size), loc="left", color=theme.ink)
    page.grid[-1, 0].set(xlabel="TFLOP/s", xlim=(0, top * 1.46))
    return page.figure


def family_label(row, dtype):
    return row["family"] + (" (float32)" if row["in_dtype"] != dtype else "")


def host(results, theme, dtype):
    """What a call costs the host, whatever the dtype."""
    source = results.host()
    groups = {}
    for row in source.rows:
        groups.setdefault(row["framework"], []).append(row)
    names = [name for name in groups if name] + [name for name in groups if not name]
    bars = [(name, row) for name in names for row in sorted(groups[name], key=lambda row: row["us"])]
    page = Page(
        theme,
        "What a call costs the host",
        "Microseconds a call on 32 x 32 operands, back to back; lower is better. Grey: floors, which are no product.",
        [source],
        height=1.5 + 0.29 * len(bars) + 0.1 * len(names),
    )
    axes = page.axes
    y, places = 0.0, []
    for i, (name, row) in enumerate(bars):
        y += 0.45 if i and name != bars[i - 1][0] else 0
        library = row["case"].split(".")[0]
        colour = theme.peers.get(library) if name and library in theme.peers else theme.muted
        axes.barh(y, row["us"], 0.68, color=colour, zorder=3)
        axes.plot([row["q1_us"], row["q3_us"]], [y, y], color=theme.ink, linewidth=1, zorder=4)
        axes.annotate(
            f"{row['us']:.2f}" if row["us"] < 10 else f"{row['us']:.1f}", (max(row["us"], row["q3_us"]), y), (6, 0),
            textcoords="offset points", va="center", fontsize=9, color=theme.ink,
        )  # fmt: skip
        places.append(y)
        y += 1
    labels = [
        row["case"] + (f", {name} arrays" if name and row["case"].startswith("tcgemm") else "") for name, row in bars
    ]
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.yaxis.grid(False)
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="microseconds a call", xlim=(0, 1.15 * max(row["us"] for _, row in bars)))
    return page.figure


def error(results, theme, dtype):
    """Error against float64 over K, rounded results and fp32 ones, for every dtype that was measured."""
    source = results.numerics("error")
    dtypes = list(dict.fromkeys(row["in_dtype"] for row in source.rows))
    page = Page(
        theme,
        "Error against float64 over K",
        "Above: results rounded to the operands' type, in its units in the last place (one rounding: 0.5 at most, 0.25 on\n"
        "average). Below: float32 results, the largest error over the root mean square of the exact result.",
        [source],
        height=6.4,
        rows=2,
        columns=len(dtypes),
        key=True,
        sharex=True,
        sharey="row",
    )
    for (upper, lower), in_dtype in zip(page.grid.T, dtypes):
        rows = [row for row in source.rows if row["in_dtype"] == in_dtype]
        for of in sorted({row["of"] for row in rows}, key=list(recorded.PEERS).index):
            for axes, out_dtype, data, value, style in (
                (upper, in_dtype, "normal", "max_ulp", "-"),
                (upper, in_dtype, "normal", "mean_ulp", ":"),
                (lower, "float32", "uniform", "max_relative", "-"),
                (lower, "float32", "normal", "max_relative", ":"),
            ):
                chosen = {"of": of, "out_dtype": out_dtype, "data": data}
                line = sorted((row["k"], row[value]) for row in rows if chosen.items() <= row.items())
                if line:
                    page.line(axes, of, *zip(*line), markersize=3.5, linewidth=1.3, linestyle=style)
        upper.set_title(in_dtype)
        upper.set_yscale("log", base=2)
        plain(upper.yaxis)
        lower.set(yscale="log", xlabel="K")
        sizes = sorted({row["k"] for row in rows})
        log2_axis(lower.xaxis, sizes[:: max(1, len(sizes) // 6)])
    page.grid[0, 0].set_ylabel("ulp")
    page.grid[1, 0].set_ylabel("relative error")
    page.note(page.grid[0, 0], "normal data; solid: largest, dotted: mean")
    page.note(page.grid[1, 0], "solid: data uniform in [0, 1), dotted: normal data")
    page.key(page.grid[0, 0])
    return page.figure


def ulp(results, theme, dtype):
    """How the error of rounded results is spread at the largest K, for every dtype that was measured."""
    source = results.numerics("error", data="normal")
    rows = [row for row in source.rows if row["out_dtype"] == row["in_dtype"]]
    k = max(row["k"] for row in rows)
    dtypes = list(dict.fromkeys(row["in_dtype"] for row in rows))
    page = Page(
        theme,
        f"Distribution of the error at K = {k}",
        "Share of the results by error in units in the last place, normal data. Up to 0.5: correctly rounded.",
        [source],
        height=3.8,
        columns=len(dtypes),
        key=True,
        sharey=True,
    )
    width = source.result["settings"]["bin_ulp"]
    for axes, in_dtype in zip(page.grid[0], dtypes):
        mine = [row for row in rows if (row["in_dtype"], row["k"]) == (in_dtype, k)]
        beyond = []
        for row in sorted(mine, key=lambda row: list(recorded.PEERS).index(row["of"])):
            counts = row["histogram"]
            total = sum(counts)
            name = recorded.PEERS[row["of"]]
            beyond.append(f"{100 * sum(counts[round(0.5 / width) :]) / total:.2g} %: {name}")
            axes.stairs(
                [100 * count / total for count in counts], [i * width for i in range(len(counts) + 1)], label=name,
                color=theme.peers[row["of"]], linewidth=1.6, linestyle="--" if row["of"] == "invariant" else "-",
            )  # fmt: skip
        axes.axvline(0.5, color=theme.muted, linewidth=1, linestyle=(0, (5, 3)))
        axes.annotate(
            "beyond 0.5\n" + "\n".join(beyond), (1, 1), (-6, -6), xycoords="axes fraction",
            textcoords="offset points", ha="right", va="top", color=theme.muted, fontsize=8.5,
        )  # fmt: skip
        axes.set(xlabel="error, ulp", title=in_dtype, yscale="log", ylim=(1e-4, 30), xlim=(0, width * len(counts)))
        plain(axes.yaxis)
    page.grid[0, 0].set_ylabel(f"% of the results, bins of {width} ulp")
    page.key(page.grid[0, 0])
    return page.figure


def row_bits(results, theme, dtype):
    """What the bits of a row depend on: M across, products down."""
    source = results.numerics("rows", place="first", in_dtype=dtype)
    rows = sorted(source.rows, key=lambda row: list(recorded.PEERS).index(row["of"]))
    cells = {
        (f"{recorded.PEERS[row['of']]}, {row['n']} x {row['k']}", row["m"]): 100 * row["different"] / row["elements"]
        for row in rows
    }
    page = Page(
        theme,
        f"Do the bits of a row depend on how many rows there are? {dtype}",
        f"% of the elements of M rows that have other bits than as part of {rows[0]['of_rows']} rows. Empty: none has.",
        [source],
        height=cells_height(cells),
    )
    page.cells(
        cells,
        LinearSegmentedColormap.from_list("share", [theme.even, theme.slower]),
        # Any difference is seen: from a quarter of the range at 0.01 % and less, by the logarithm, to all of it at 10 %.
        shade=lambda percent: 0.25 + 0.75 * max(0, math.log10(percent) + 2) / 3 if percent else 0,
        text=lambda percent: "" if not percent else "<0.1" if percent < 0.1 else f"{percent:.2g}",
    )
    page.axes.set(xlabel="M")
    return page.figure


PLOTS = {
    "square": square,
    "llm": llm,
    "roofline": roofline,
    "cliff": cliff,
    "steps": steps,
    "ladder": ladder,
    "host": host,
    "error": error,
    "ulp": ulp,
    "rows": row_bits,
}


def draw(name, results, theme=LIGHT, dtype="bfloat16"):
    """The figure `name` of PLOTS; Missing where nothing recorded has it."""
    with matplotlib.rc_context(STYLE):
        figure = PLOTS[name](results, theme, dtype)
        # The layout's solver repeats itself but for the last bits: rounded, the same results give the same file.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes in figure.axes:
            axes.set_position([round(edge, 4) for edge in axes.get_position().bounds])
        return figure


def main(argv=None):
    parser = argparse.ArgumentParser(description="Draws every plot from the recorded results.")
    parser.add_argument("plots", nargs="*", metavar="PLOT", help=f"all of {', '.join(PLOTS)}")
    parser.add_argument("--results", type=Path, default=recorded.RESULTS, metavar="DIR", help="benchmarks/results")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="benchmarks/plots")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--format", default="svg", choices=("svg", "png", "pdf"))
    options = parser.parse_args(argv)
    if unknown := set(options.plots) - PLOTS.keys():
        parser.error(f"PLOT: expected some of {', '.join(PLOTS)}, got {', '.join(sorted(unknown))}")
    results = Recorded(options.results)
    for name, reason in results.refused.items():
        print(f"{name}: left out: {reason}", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.plots or PLOTS:
        for theme in THEMES:
            try:
                figure = draw(name, results, theme, options.dtype)
            except Missing as missing:
                print(f"{name}: {missing}")
                break
            suffix = "" if options.dtype == "bfloat16" else f"-{options.dtype}"
            path = options.out / f"{name}{suffix}-{theme.name}.{options.format}"
            with matplotlib.rc_context(STYLE):
                figure.savefig(path, metadata={"Date": None} if options.format == "svg" else None)
            print(f"{name}: {path}")
    return 1 if results.refused else 0


if __name__ == "__main__":
    sys.exit(main())
