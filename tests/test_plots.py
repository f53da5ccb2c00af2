"""What is made of recorded results: plots, tables and the notebook, from made-up records of every kind and, where there are
any, from those of benchmarks/results. No GPU."""

import json
import re
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("benchmarks/ is not in this tree", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import recorded  # noqa: E402
import tables  # noqa: E402
import timing  # noqa: E402
from shapes import ALL, SUITES, Problem  # noqa: E402

RECORDED = sorted((BENCHMARKS / "results").glob("*.json"))
needs_records = pytest.mark.skipif(not RECORDED, reason="nothing is recorded in benchmarks/results")
NOTEBOOK = BENCHMARKS / "performance.ipynb"


# ---- made-up records: no figure in them was measured -----------------------------------------------------------------

CARD = "made-up card"
STATE = dict.fromkeys(("sm_mhz", "sm_max_mhz", "memory_mhz", "power_w", "temperature_c"))


def record(kind, rows, date="2026-01-02T03:04:05Z", complete=True, card=CARD, **settings):
    return {
        "schema": timing.SCHEMA,
        "kind": kind,
        "command": f"python benchmarks/made-up.py {kind}",
        "date": date,
        "commit": None,
        "tcgemm": "0",
        "machine": {
            "card": card,
            "driver": "1.2",
            "torch": "3.4",
            "torch_cuda": "5.6",
            "before": STATE,
            "after": STATE,
        },
        "settings": settings,
        "missing": {},
        "complete": complete,
        "rows": rows,
    }


def time(us):
    return {"us": us, "q1_us": us * 0.99, "q3_us": us * 1.01, "rounds": 9, "graph": True}


def product(suite, problem, in_dtype="bfloat16", **us):
    us = us or {
        "tcgemm": 2 + problem.flops / 7e8,
        "torch": 3 + problem.flops / 6e8,
        "cublaslt": 2.5 + problem.flops / 6e8,
    }
    return {
        "suite": suite,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "batch": problem.batch,
        "order": problem.order,
        "in_dtype": in_dtype,
        "out_dtype": in_dtype,
        "set_bytes": problem.set_bytes(in_dtype),
        "flops": problem.flops,
        "times": {peer: time(value) for peer, value in us.items()},
        "failed": {},
    }


def products(dtype="bfloat16"):
    return [product(suite, problem, dtype) for suite in ALL for problem in SUITES[suite]]


def ceilings():
    rows = [
        {"what": what, "dtype": "bfloat16", "warps_per_sm": 8, "mode": mode, "us": 1.0, "tflops": rate}
        for what, mode, rate in (
            ("wgmma", "burst", 910.0),
            ("wgmma", "sustained", 850.0),
            ("mma.sync", "burst", 600.0),
        )
    ]
    rows += [{"what": "read", "bytes": mb << 20, "us": 1.0 + mb / 4, "tbytes_per_s": 4.0} for mb in (2, 8, 32, 128)]
    return [*rows, {"what": "launch", "us": 0.5}]


def rungs():
    for size in (512, 1024):
        for family, dtype, rate in (
            ("simt", "float32", "fma"),
            ("mma", "bfloat16", "mma.sync"),
            ("torch", "bfloat16", None),
        ):
            share = {"rate": rate, "rate_tflops": 600.0 if rate else None, "of_rate": 0.5 if rate else None}
            yield {
                "family": family,
                "kernel": family,
                "m": size,
                "n": size,
                "k": size,
                "order": "nt",
                "in_dtype": dtype,
            } | {
                "time": time(10.0),
                "tflops": 300.0,
                "of_torch": 0.9,
                **share,
            }


def calls():
    for case, framework in (
        ("tcgemm.matmul", "torch"),
        ("torch.matmul", "torch"),
        ("cupy.matmul", "cupy"),
        ("python", None),
    ):
        yield {
            "case": case,
            "framework": framework,
            "us": 5.0,
            "q1_us": 4.0,
            "q3_us": 6.0,
            "calls": 300,
            "rounds": 15,
        }


def numerics():
    for of in ("torch", "tcgemm", "invariant"):
        for dtype in ("float16", "bfloat16"):
            shared = {"of": of, "n": 64, "in_dtype": dtype}
            for k in (16, 256):
                for data in ("normal", "uniform"):
                    for out in (dtype, "float32"):
                        row = {"what": "error", "data": data, "m": 64, "k": k, "out_dtype": out, "max_ulp": 0.5}
                        row |= {"mean_ulp": 0.25, "max_relative": 1e-6, "rms_relative": 1e-7}
                        yield shared | row | ({"histogram": [4] * 25 + [1] * 5} if out == dtype else {})
            yield shared | {"what": "repeat", "m": 64, "k": 64, "runs": 25, "different": 0}
            for m in (1, 2, 64):
                different = 0 if of == "invariant" else m
                for place in ("first", "last"):
                    row = {"what": "rows", "m": m, "k": 64, "of_rows": 64, "place": place, "elements": 64 * m}
                    yield shared | row | {"different": different}


def over_gpus():
    yield {"case": "2 processes", "m": 8, "n": 8, "k": 8, "in_dtype": "bfloat16", "processes": 2} | {
        "times": {"tcgemm": time(1.0), "torch": time(2.0)}
    }


@pytest.fixture
def folder(tmp_path):
    """A folder with a record of everything."""
    folder = tmp_path / "made-up"
    for name, result in {
        "all": record("bench", products()),
        "half": record("bench", products("float16")),
        "random": record("bench", [product("random", problem) for problem in SUITES["random"]]),
        "cliff": record("bench", [product("cliff", problem) for problem in SUITES["cliff"]]),
        "steps": record("bench", [product("steps", problem) for problem in SUITES["steps"]]),
        "ceilings": record("ceilings", ceilings()),
        "ladder": record("ladder", [*rungs()]),
        "host": record("host", [*calls()]),
        "numerics": record("numerics", [*numerics()], bin_ulp=0.02),
        "distributed": record("distributed", [*over_gpus()]),
    }.items():
        timing.write(folder / f"{name}.json", result)
    return folder


@pytest.fixture
def plots():
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install '.[test]'")
    import plots

    return plots


# ---- what is found -------------------------------------------------------------------------------------------------


def store(folder, name, ratio, **about):
    row = product("square", Problem(64, 64, 64), tcgemm=1.0, torch=ratio)
    timing.write(folder / name, record("bench", [row], **about))


def test_the_newest_complete_run_is_shown(tmp_path):
    store(tmp_path, "a.json", 2.0, date="2026-01-01T00:00:00Z")
    store(tmp_path, "b.json", 3.0, date="2026-01-02T00:00:00Z")
    store(tmp_path, "c.json", 4.0, date="2026-01-03T00:00:00Z", complete=False)
    source = recorded.Recorded(tmp_path).suite("square", "bfloat16")
    assert source.path.name == "b.json" and recorded.ratios(source.rows) == [3.0]


def test_an_interrupted_run_is_named_so(tmp_path):
    store(tmp_path, "a.json", 2.0, complete=False)
    assert str(recorded.Recorded(tmp_path).suite("square", "bfloat16")).endswith("interrupted")


def test_rows_without_torch_are_left_out(tmp_path):
    rows = [product("llm", Problem(8, 8, 8), tcgemm=1.0), product("llm", Problem(8, 8, 8), tcgemm=1.0, torch=2.0)]
    timing.write(tmp_path / "a.json", record("bench", rows))
    assert len(recorded.Recorded(tmp_path).suite("llm", "bfloat16").rows) == 1


def test_what_is_missing_is_named_with_its_command(tmp_path):
    results = recorded.Recorded(tmp_path)
    with pytest.raises(
        recorded.Missing, match=r"suite llm, bfloat16: not recorded; python benchmarks/bench\.py --suite all"
    ):
        results.suite("llm", "bfloat16")
    with pytest.raises(recorded.Missing, match=r"benchmarks/numerics\.py"):
        results.numerics("error")


def test_ceilings_are_those_of_the_same_card(folder):
    results = recorded.Recorded(folder)
    assert results.ceilings(CARD).rows
    with pytest.raises(recorded.Missing, match="on another card"):
        results.ceilings("another card")


def test_a_file_that_is_no_result_is_refused_with_the_reason(tmp_path):
    (tmp_path / "a.json").write_text('{"schema": 1, "kind": "unheard of"}')
    (tmp_path / "b.json").write_text("{")
    store(tmp_path, "c.json", 2.0)
    results = recorded.Recorded(tmp_path)
    assert results.refused.keys() == {"a.json", "b.json"} and "unheard of" in results.refused["a.json"]
    assert len(results.results) == 1


def test_the_reading_floor_goes_through_the_measured_sizes(folder):
    source = recorded.Recorded(folder).ceilings(CARD)
    floor_us = recorded.read_floor(source)
    for row in source.rows:
        if row["what"] == "read":
            assert floor_us(row["bytes"]) == pytest.approx(row["us"])
    assert floor_us(0) == 0.5  # an empty launch
    assert floor_us(20 << 20) == pytest.approx(6.0)
    assert floor_us(512 << 20) == pytest.approx(129.0)  # beyond the largest size: at the last slope


def test_every_command_is_in_the_readme():
    text = (BENCHMARKS / "README.md").read_text()
    scripts = {command.split()[1] for command in recorded.COMMANDS.values()}
    assert all((ROOT / script).is_file() and Path(script).name in text for script in scripts)


# ---- plots ---------------------------------------------------------------------------------------------------------


def test_all_plots_are_drawn_for_light_and_dark_pages(plots, folder, tmp_path, capsys):
    assert plots.main(["--results", str(folder), "--out", str(tmp_path / "plots")]) == 0
    names = {f"{name}-{theme}.svg" for name in plots.PLOTS for theme in ("light", "dark")}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names
    assert "not recorded" not in capsys.readouterr().out
    for name in names:
        svg = xml.etree.ElementTree.parse(tmp_path / "plots" / name).getroot()
        assert float(svg.get("width").removesuffix("pt")) == pytest.approx(plots.WIDTH * 72)


def test_no_text_leaves_the_page_or_lies_on_another(plots, folder):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    results = recorded.Recorded(folder)
    for name in plots.PLOTS:
        figure = plots.draw(name, results)
        FigureCanvasAgg(figure).draw()
        boxes = [(text.get_text(), text.get_window_extent()) for text in figure.texts]
        for text, box in boxes:
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1, (name, text)
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1, name
            assert all(not box.overlaps(other) for _, other in boxes), name


def test_the_same_records_give_the_same_bytes(plots, folder, tmp_path):
    for out in ("a", "b"):
        plots.main(["square", "steps", "rows", "--results", str(folder), "--out", str(tmp_path / out)])
    assert len([*(tmp_path / "a").iterdir()]) == 6
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_plots_whose_records_are_missing_are_named(plots, folder, tmp_path, capsys):
    for name in ("all", "cliff", "numerics", "ceilings"):
        (folder / f"{name}.json").unlink()
    assert plots.main(["--results", str(folder), "--out", str(tmp_path / "plots")]) == 0
    printed = capsys.readouterr().out
    for name in ("square", "llm", "roofline", "cliff", "error", "ulp", "rows"):
        assert re.search(rf"^{name}: .*not recorded; python benchmarks/", printed, re.MULTILINE), name
    # Without ceilings there is no grey area, but a plot.
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {f"{name}-{theme}.svg" for name in ("steps", "ladder", "host") for theme in ("light", "dark")}


def test_plots_of_another_dtype_have_names_of_their_own(plots, folder, tmp_path):
    arguments = ["--results", str(folder), "--out", str(tmp_path / "plots"), "--dtype", "float16", "--format", "png"]
    assert plots.main(arguments) == 0
    assert (tmp_path / "plots" / "llm-float16-dark.png").is_file()
    assert not (tmp_path / "plots" / "cliff-float16-dark.png").exists()


def test_a_refused_file_fails_the_run(plots, folder, tmp_path, capsys):
    (folder / "broken.json").write_text("[]")
    assert plots.main(["host", "--results", str(folder), "--out", str(tmp_path / "plots")]) == 1
    assert "broken.json: left out" in capsys.readouterr().err


def test_colours_are_seen_on_their_page(plots):
    """WCAG 2 asks 3:1 of graphics and 4.5:1 of text."""

    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear))

    for theme in plots.THEMES:
        page = luminance(theme.page)
        for colour, least in [
            (theme.ink, 4.5),
            (theme.muted, 4.5),
            *((colour, 2.2) for colour in theme.peers.values()),
        ]:
            high, low = sorted((luminance(colour), page), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= least, (theme.name, colour)


@needs_records
def test_plots_of_what_is_recorded(plots, tmp_path, capsys):
    assert plots.main(["--out", str(tmp_path)]) == 0, capsys.readouterr().err
    assert [*tmp_path.iterdir()]


# ---- tables --------------------------------------------------------------------------------------------------------


def test_tables_hold_the_recorded_figures(tmp_path):
    rows = [
        product("square", Problem(4096, 4096, 4096), tcgemm=200.0, torch=250.0, cublaslt=220.0),
        product("square", Problem(512, 512, 512), tcgemm=4.0, torch=5.0),
    ]
    timing.write(tmp_path / "a.json", record("bench", rows))
    results = recorded.Recorded(tmp_path)
    (line,) = [line for line in tables.suites(results, "bfloat16") if "`square`" in line]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["2", "**1.25**", "1.25", "1.25", "1.10"]
    (line,) = [line for line in tables.shapes(results, "bfloat16") if "4096 x 4096" in line]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["200", "687", "250", "**1.25**", "1.10"]
    assert any("python benchmarks/made-up.py bench" in line for line in tables.suites(results, "bfloat16"))


def test_every_table_is_printed(folder, capsys):
    assert tables.main(["--results", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and all(f"<!-- {name} -->" in printed.out for name in tables.BLOCKS)
    # Every line of a table has as many cells as its header.
    for block in re.findall(r"(?:^\|.*\n)+", printed.out, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_blocks_are_written_and_checked(folder, tmp_path, capsys):
    path = tmp_path / "page.md"
    before, after = "# Title\n\n<!-- tables.py host -->\n@@host@@\n", "<!-- end host -->\n\nText with \\1.\n"
    path.write_text(before + after)
    results = ["--results", str(folder)]
    assert tables.main([*results, "--check", str(path)]) == 1
    assert tables.main([*results, "--write", str(path)]) == 0
    assert tables.main([*results, "--check", str(path)]) == 0
    text = path.read_text()
    assert "@@host@@" not in text and "`torch.matmul`, torch | 5.00 |" in text and text.endswith(after)
    (folder / "host.json").unlink()
    assert tables.main([*results, "--write", str(path)]) == 0
    assert path.read_text() == text and "host: what a call costs the host: not recorded" in capsys.readouterr().err


def test_an_unknown_block_is_an_error():
    with pytest.raises(ValueError, match="unheard_of"):
        tables.fill("<!-- tables.py unheard_of -->\n<!-- end unheard_of -->", recorded.Recorded("."), "bfloat16")


def test_the_readmes_figures_are_the_recorded_ones(capsys):
    assert tables.main(["--check", str(ROOT / "README.md")]) == 0, capsys.readouterr().err


# ---- the notebook --------------------------------------------------------------------------------------------------


def execute(folder):
    """The notebook's outputs, as text, on the results in a folder. A cell that raises fails the test."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is missing: pip install '.[test]'")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is missing: pip install '.[test]'")
    pytest.importorskip("ipykernel", reason="ipykernel is missing: pip install '.[test]'")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    found = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found += cell.source.count("RESULTS = recorded.RESULTS")
            cell.source = cell.source.replace("RESULTS = recorded.RESULTS", f"RESULTS = {str(folder)!r}")
    assert found == 1
    resources = {"metadata": {"path": str(BENCHMARKS)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_the_notebook_shows_everything(plots, folder):
    data = [output.get("data", {}) for output in execute(folder)]
    assert sum("image/png" in entry for entry in data) >= len(plots.PLOTS)
    missing = [entry["text/markdown"] for entry in data if "not recorded" in entry.get("text/markdown", "")]
    assert missing == []


def test_the_notebook_names_what_is_missing(plots, tmp_path):
    data = [output.get("data", {}) for output in execute(tmp_path)]
    assert data and all("not recorded; python benchmarks/" in entry["text/markdown"] for entry in data)


@needs_records
def test_the_notebook_runs_on_what_is_recorded(plots):
    assert any("image/png" in output.get("data", {}) for output in execute(recorded.RESULTS))


@needs_records
def test_the_notebook_is_committed_with_its_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert "MEASURE = False" in "".join(cells[0]["source"])
    assert all(cell["execution_count"] for cell in cells), "jupyter execute --inplace benchmarks/performance.ipynb"
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert NOTEBOOK.stat().st_size < 8 << 20
