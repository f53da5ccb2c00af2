"""The benchmark scripts without a GPU: suites, statistics, the record and its schema, arguments, and each script end to end
on a simulated device. Marked gpu: each script on one small shape."""

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("benchmarks/ is not in this tree", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import bench  # noqa: E402
import ceilings  # noqa: E402
import host  # noqa: E402
import ladder  # noqa: E402
import peers  # noqa: E402
import shapes  # noqa: E402
import timing  # noqa: E402
import tune  # noqa: E402

SCRIPTS = ("bench.py", "ceilings.py", "ladder.py", "tune.py")


# ---- suites --------------------------------------------------------------------------------------------------------


def test_suites_have_the_sizes_they_are_known_by():
    counts = {name: len(problems) for name, problems in shapes.SUITES.items()}
    assert counts == {
        "square": 8,
        "llm": 120,
        "odd": 12,
        "skinny": 9,
        "batched": 7,
        "layouts": 24,
        "random": 240,
        "cliff": 129,
        "steps": 234,
    }
    for name, problems in shapes.SUITES.items():
        assert len(set(problems)) == len(problems), name


def test_suites_hold_what_their_names_say():
    assert [problem.m for problem in shapes.SUITES["square"]] == [256, 512, 1024, 2048, 4096, 6144, 8192, 16384]
    assert {problem.m for problem in shapes.SUITES["llm"]} == {2**i for i in range(14)} - {2, 4}
    assert len({(problem.n, problem.k) for problem in shapes.SUITES["llm"]}) == 10
    assert [problem.n for problem in shapes.SUITES["cliff"]] == list(range(4032, 4161))
    assert {problem.order for problem in shapes.SUITES["layouts"]} == set(shapes.ORDERS)
    assert all(problem.batch > 1 for problem in shapes.SUITES["batched"])
    assert {problem.m for problem in shapes.SUITES["steps"]} >= {1, 2, 16, 24, 512}
    by_chance = shapes.SUITES["random"]
    assert by_chance == shapes.drawn(240, seed=1) and str(by_chance[3]) == "7x11212x8273:nn"
    assert 90 < sum(all(size % 8 == 0 for size in (p.m, p.n, p.k)) for p in by_chance) < 150
    assert min(sum(p.order == order for p in by_chance) for order in shapes.ORDERS) > 40
    assert sum(len(shapes.SUITES[name]) for name in shapes.ALL) == 180


def test_a_problem_knows_its_work():
    problem = shapes.Problem(2, 3, 5, "nn", 7)
    assert problem.flops == 2 * 2 * 3 * 5 * 7
    assert problem.set_bytes("bfloat16") == (2 * 5 + 5 * 3 + 2 * 3) * 2 * 7
    assert problem.set_bytes("bfloat16", "float32") == ((2 * 5 + 5 * 3) * 2 + 2 * 3 * 4) * 7


@pytest.mark.parametrize("suite", shapes.SUITES)
def test_a_problem_is_parsed_from_its_own_text(suite):
    for problem in shapes.SUITES[suite]:
        assert shapes.parse_shapes(str(problem)) == [problem]


def test_shapes_are_parsed():
    assert shapes.parse_shapes("1x2x3, 4x5x6x7:TN") == [shapes.Problem(1, 2, 3), shapes.Problem(4, 5, 6, "tn", 7)]
    for text in ("", "1x2", "1x2x0", "axbxc", "1x2x3:xx", "1x2x3x4x5"):
        with pytest.raises(ValueError, match="expected MxNxK"):
            shapes.parse_shapes(text)
    assert shapes.parse_suites("odd,all")[0] == "odd" and len(shapes.parse_suites("odd,all")) == 6
    with pytest.raises(ValueError, match="cubic"):
        shapes.parse_suites("cubic")


# ---- statistics ----------------------------------------------------------------------------------------------------


def test_a_time_is_the_median_with_its_quartiles():
    assert timing.summary([5.0, 1.0, 3.0, 2.0, 4.0]) == {"us": 3, "q1_us": 2, "q3_us": 4, "rounds": 5, "graph": True}
    assert timing.summary([2.5], graph=False) == {"us": 2.5, "q1_us": 2.5, "q3_us": 2.5, "rounds": 1, "graph": False}
    assert timing.summary([1234567.0])["us"] == 1234600
    assert timing.summary([0.123456789])["us"] == 0.12346


def test_means_and_ratios():
    assert timing.geomean([1, 4]) == pytest.approx(2) and math.isnan(timing.geomean([]))
    assert timing.tflops(2e12, 1e6) == 2
    row = {"times": {"tcgemm": {"us": 2.0}, "torch": {"us": 3.0}}}
    assert timing.ratio(row, "torch") == 1.5 and timing.ratio(row, "cupy") is None
    assert timing.ratio({"times": {"torch": {"us": 1}}}, "torch") is None
    assert timing.clock(75) == "1:15"
    assert timing.table([("a", 1), ("bbb", 22)], ("x", "y")) == ["x     y", "a     1", "bbb  22"]


# ---- the record ----------------------------------------------------------------------------------------------------

TIME = {"us": 2.0, "q1_us": 1.9, "q3_us": 2.1, "rounds": 9, "graph": True}
SHAPE = {"m": 1, "n": 2, "k": 3, "order": "nt", "in_dtype": "bfloat16"}
ROWS = {
    "bench": {
        "suite": "llm",
        **SHAPE,
        "batch": 1,
        "out_dtype": "bfloat16",
        "flops": 12,
        "times": {"tcgemm": TIME},
        "failed": {},
    },
    "host": {"case": "tcgemm.matmul", "framework": "torch", "us": 4.0, "q1_us": 3.9, "q3_us": 4.1, "calls": 300},
    "ladder": {"family": "mma", **SHAPE, "time": TIME, "tflops": 1.0, "of_torch": None},
    "ceilings": {"what": "launch", "us": 0.5},
    "tune": {
        **SHAPE,
        "batch": 1,
        "out_dtype": "bfloat16",
        "times": {"row": TIME},
        "choice": "row",
        "best": "row",
        "loss": 0.0,
    },
    "numerics": {},
    "distributed": {"case": "one process, whole", "m": 2, "n": 4, "k": 3, "processes": 2, "times": {"tcgemm": TIME}},
}


def result_of(kind, rows=None):
    record = timing.Record(kind, {})
    with record:
        record.rows.extend([ROWS[kind]] if rows is None else rows)
    return record.result


@pytest.mark.parametrize("kind", timing.KINDS)
def test_a_result_survives_its_file(kind, tmp_path):
    result = result_of(kind)
    path = tmp_path / "new" / "result.json"
    timing.write(path, result)
    assert timing.read(path) == result == json.loads(path.read_text())
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]
    assert result["complete"] and result["machine"]["python"].startswith("3.") and "after" in result["machine"]
    timing.write(path, result_of(kind, []))
    assert timing.read(path)["rows"] == []


@pytest.mark.parametrize(
    "change, place",
    [
        (lambda result: result.update(schema=2), "schema: expected 1, got 2"),
        (lambda result: result.update(kind="race"), "kind: expected one of bench"),
        (lambda result: result.pop("command"), "command: is missing"),
        (lambda result: result.update(complete=1), "complete: expected bool"),
        (lambda result: result["machine"].pop("after"), "machine.after: is missing"),
        (lambda result: result["rows"].append(3), r"rows\[1\]: expected an object"),
        (lambda result: result["rows"][0].update(m="1"), r"rows\[0\].m: expected int"),
        (lambda result: result["rows"][0].update(m=True), r"rows\[0\].m: expected int"),
        (
            lambda result: result["rows"][0]["times"].update(torch={"us": 1.0}),
            r"rows\[0\].times.torch.q1_us: is missing",
        ),
    ],
)
def test_a_wrong_result_is_refused_with_the_place(change, place):
    result = json.loads(json.dumps(result_of("bench")))
    change(result)
    with pytest.raises(ValueError, match=place):
        timing.check(result)


def test_an_interrupt_keeps_what_was_done(tmp_path, capsys):
    path = tmp_path / "part.json"
    with timing.Record("bench", {}, path) as record:
        record.rows.append(ROWS["bench"])
        raise KeyboardInterrupt
    assert record.interrupted and "what was done is kept" in capsys.readouterr().err
    result = timing.read(path)
    assert not result["complete"] and len(result["rows"]) == 1


def test_an_error_keeps_what_was_done_and_goes_on(tmp_path):
    path = tmp_path / "part.json"
    with pytest.raises(ZeroDivisionError), timing.Record("bench", {}, path) as record:
        record.rows.append(ROWS["bench"])
        1 / 0
    assert not timing.read(path)["complete"] and not record.interrupted


def test_the_command_is_as_seen_from_the_root():
    assert (
        timing.command([str(BENCHMARKS / "bench.py"), "--suite", "odd"]) == "python benchmarks/bench.py --suite odd"
    )
    assert timing.command(["/else/where.py", "a b"]) == "python where.py 'a b'"


def test_a_copy_of_the_tree_can_be_told_its_commit(monkeypatch):
    monkeypatch.setenv("TCGEMM_BENCH_COMMIT", "abc+")
    assert timing.commit() == "abc+"


def test_the_format_that_is_documented_is_the_one_that_is_checked():
    text = (BENCHMARKS / "README.md").read_text()
    for kind in timing.KINDS:
        assert f"**`{kind}`**" in text
    for key in (*timing._HEAD, *timing._TIME, *timing.machine()):
        assert f"`{key}`" in text or f'"{key}"' in text, key
    for kind, columns in timing._COLUMNS.items():
        for key in columns:
            assert f'"{key}"' in text, (kind, key)
    for name in (*peers.PEERS, *shapes.SUITES):
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.name)
def test_recorded_results_are_whole(path):
    result = timing.read(path)
    assert result["rows"] and result["machine"]["card"]


# ---- arguments -----------------------------------------------------------------------------------------------------


def test_arguments_of_bench():
    options = bench.parse([])
    assert options.suite == ["square"] and options.peers == ["torch", "cublaslt"] and options.dtype == "bfloat16"
    options = bench.parse(["--suite", "all", "--peers", "triton,torch"])
    assert options.suite == [*shapes.ALL, "host"] and options.peers == ["torch", "triton"]
    assert len(bench.select(options)) == 180
    assert bench.parse(["--suite", "host"]).suite == ["host"] and not bench.select(bench.parse(["--suite", "host"]))
    options = bench.parse(["--shapes", "1x2x3", "--peers", "none"])
    assert bench.select(options) == [("shapes", shapes.Problem(1, 2, 3))] and options.peers == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--suite", "cubic"], "suite: expected one of square, llm"),
        (["--peers", "blas"], "peer: expected one of torch, cublaslt"),
        (["--shapes", "1x2"], "shape: expected MxNxK"),
        (["--dtype", "int8"], "invalid choice"),
        (["--rounds", "0"], "expected at least 1"),
    ],
)
def test_wrong_arguments_are_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.parse(arguments)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_arguments_of_the_others():
    assert ladder.parse(["--size", "4096,8192"]).size == [4096, 8192]
    assert ceilings.parse(["--warps", "8"]).warps == (8,)
    with pytest.raises(SystemExit):
        ceilings.parse(["--warps", "64"])
    assert tune.parse([]).suite == ["square", "llm"] and tune.parse(["--shapes", "1x2x3"]).suite == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_list_need_nothing(script):
    for argument in ("--help", "--list"):
        done = subprocess.run([sys.executable, str(BENCHMARKS / script), argument], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr


# ---- peers ---------------------------------------------------------------------------------------------------------


def test_missing_peers_are_named_and_left_out(monkeypatch):
    def missing():
        raise timing.Unusable("is not installed")

    monkeypatch.setitem(peers.PEERS, "cupy", (missing, None))
    monkeypatch.setitem(peers.PEERS, "torch", (lambda: None, "build"))
    assert peers.available(["torch", "cupy"]) == ({"torch": "build"}, {"cupy": "is not installed"})


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "triton_gemm", raising=False)
    peers._cupy.cache_clear()
    _, missing = peers.available(["cupy", "triton"])
    assert "CuPy is not installed" in missing["cupy"] and "Triton is not installed" in missing["triton"]


def test_without_torch_a_script_ends_with_one_line(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run([sys.executable, str(BENCHMARKS / "bench.py")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "bench.py: torch is needed to measure and is missing: not here\n"


# ---- the scripts on a simulated device -----------------------------------------------------------------------------


class Device:
    """A torch whose device is the host and whose clock advances by what each product is said to cost."""

    def __init__(self, torch):
        self.torch, self.now_us, self.capturing, self.cuda = torch, 0.0, None, self
        self.order = []  # of replays
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now_us

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e3

        class CUDAGraph:
            def capture_begin(self):
                self.work, device.capturing = [], self

            def capture_end(self):
                device.capturing = None

            def replay(self):
                device.order.append(self.work[0][0])
                device.now_us += sum(cost for _, cost in self.work)

        self.Event, self.CUDAGraph = Event, CUDAGraph
        self.OutOfMemoryError = torch.OutOfMemoryError

    def __getattr__(self, name):
        return getattr(self.torch, name)

    def spend(self, name, us):
        if self.capturing:
            self.capturing.work.append((name, us))
        else:
            self.now_us += us

    def randn(self, *shape, device):
        return self.torch.randn(*shape)

    def empty(self, *shape, device, dtype):
        return self.torch.empty(*shape, dtype=dtype)

    def mm(self, a, b, out):
        self.spend("torch", 12.0)
        return self.torch.matmul(a, b, out=out)

    bmm = mm

    def Stream(self):
        return self

    def current_stream(self):
        return self

    def wait_stream(self, other):
        pass

    def stream(self, stream):
        return contextlib.nullcontext()

    def synchronize(self):
        pass

    def empty_cache(self):
        pass

    def _sleep(self, cycles):
        assert not self.capturing
        self.now_us += 100.0


class Product:
    """A tcgemm of three kernels on that device."""

    COST_US = {
        "tcg_mma_sm80_bf16_nt_64x64x64_w2x2_s4_a16": 20.0,
        "tcg_wgmma_sm90_bf16_nt_128x256x64_s4_w2_coop_c1x1x1": 10.0,
    }
    __version__ = "0"
    __path__ = ()
    chosen = "tcg_wgmma_sm90_bf16_nt_128x256x64_s4_w2_coop_c1x1x1"

    def __init__(self, device):
        self.device, self.wrong = device, None

    def kernels(self):
        def kernel(name, family, in_dtype, warps, threads, smem_bytes):
            return {
                "name": name,
                "family": family,
                "in_dtype": in_dtype,
                "warps": warps,
                "threads": threads,
                "smem_bytes": smem_bytes,
            }

        mma, wgmma = self.COST_US
        return [
            kernel("tcg_simt_sm80_f32_128x128x8", "simt", "float32", None, 256, 0),
            kernel(mma, "mma", "bfloat16", (2, 2), 128, 65536),
            kernel(wgmma, "wgmma", "bfloat16", None, 384, 230480),
        ]

    def devices(self):
        return [
            {
                "compute_capability": (9, 0),
                "smem_sm_bytes": 233472,
                "sm_count": 132,
                "families": ["simt", "mma", "wgmma"],
            }
        ]

    def _name(self, a, kernel):
        kernel, _, way = (kernel or "").partition(":")
        if way == "swapped":
            raise ValueError("not that way round")
        named = [entry["name"] for entry in self.kernels() if kernel in (entry["name"], entry["family"])]
        name = named[0] if kernel else self.chosen
        if ("f32" in name) != (a.dtype == self.device.torch.float32) and kernel:
            raise ValueError("wrong dtype")
        return name

    def matmul(self, a, b, out, kernel=None, batch_invariant=None):
        name = self._name(a, kernel)
        self.device.spend("tcgemm", self.COST_US.get(name, 30.0))
        self.device.torch.matmul(a, b, out=out)
        if self.wrong == name:
            out.zero_()
        return out

    def explain(self, a, b, out, kernel=None):
        name = self._name(a, kernel)
        family = next(entry["family"] for entry in self.kernels() if entry["name"] == name)
        return {"kernel": name, "family": family, "swap": False, "splits": 1, "copies": [], "grid": 132}


@pytest.fixture
def simulated(monkeypatch, torch):
    device = Device(torch)
    product = Product(device)
    timing._stream.cache_clear()
    monkeypatch.setattr(timing, "cuda_torch", lambda: device)
    monkeypatch.setattr(timing, "product", lambda: product)
    monkeypatch.setitem(peers.PEERS, "torch", (timing.cuda_torch, peers.PEERS["torch"][1]))
    monkeypatch.setattr(
        timing,
        "card",
        lambda: {"card": "simulated", "compute_capability": [9, 0], "sms": 132, "uuid": None, "cuda": None},
    )
    yield product
    timing._stream.cache_clear()


def test_peers_are_interleaved_and_rotated(simulated):
    device = simulated.device
    sets = timing.make_sets(shapes.Problem(8, 8, 8), "bfloat16")
    assert len(sets) == timing.SETS_MAX
    functions = {"torch": peers.torch_function(shapes.Problem(8, 8, 8)), "tcgemm": peers.tcgemm_function()}
    device.order.clear()
    times, failed = timing.time_together(functions, sets, rounds=3)
    assert not failed and times["torch"]["us"] == 12 and times["tcgemm"]["us"] == 10 and times["torch"]["rounds"] == 3
    assert device.order[2:] == ["torch", "tcgemm", "tcgemm", "torch", "torch", "tcgemm"]


def test_a_wrong_result_has_no_time(simulated):
    simulated.wrong = simulated.chosen
    sets = timing.make_sets(shapes.Problem(8, 8, 8), "bfloat16", sets_max=2)
    functions = {"torch": peers.torch_function(shapes.Problem(8, 8, 8)), "tcgemm": peers.tcgemm_function()}
    times, failed = timing.time_together(functions, sets, rounds=1, tolerance=1e-2)
    assert list(times) == ["torch"] and failed["tcgemm"].startswith("wrong: relative error 1 against torch")


def test_what_cannot_be_captured_is_launched_back_to_back(simulated):
    def shy(a, b, c):
        if simulated.device.capturing:
            raise RuntimeError("not in a capture")
        simulated.device.spend("shy", 7.0)

    sets = timing.make_sets(shapes.Problem(8, 8, 8), "bfloat16", sets_max=2)
    times, _ = timing.time_together({"shy": shy}, sets, rounds=1)
    assert times["shy"]["us"] == 7 and times["shy"]["graph"] is False


def test_bench_end_to_end(simulated, tmp_path, capsys):
    path = tmp_path / "bench.json"
    code = bench.main(
        ["--shapes", "8x8x8,4x4x4x3:nn,16x8x8:tt", "--peers", "torch", "--rounds", "3", "--json", str(path)]
    )
    assert code == 0
    result = timing.read(path)
    assert result["complete"] and [row["batch"] for row in result["rows"]] == [1, 3, 1]
    for row in result["rows"]:
        assert list(row["times"]) == ["tcgemm", "torch"] and not row["failed"]
        assert timing.ratio(row, "torch") == pytest.approx(1.2) and row["family"] == "wgmma"
    said = capsys.readouterr().out
    assert "torch 12.00 x1.200" in said and "geometric mean" in said


def test_bench_interrupted(simulated, tmp_path, monkeypatch, capsys):
    path = tmp_path / "bench.json"
    once = iter([bench.measure])

    def measure(*arguments):
        try:
            return next(once)(*arguments)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(bench, "measure", measure)
    assert bench.main(["--shapes", "8x8x8,4x4x4", "--peers", "torch", "--json", str(path)]) == 130
    result = timing.read(path)
    assert len(result["rows"]) == 1 and not result["complete"] and "geometric mean" in capsys.readouterr().out


def test_bench_measures_the_slow_again(simulated, tmp_path):
    path = tmp_path / "bench.json"
    assert bench.main(["--shapes", "8x8x8", "--peers", "torch", "--again", "1.3", "--json", str(path)]) == 0
    assert [row["measured"] for row in timing.read(path)["rows"]] == [2]


def test_ladder_end_to_end(simulated, tmp_path, monkeypatch, capsys):
    def rate(what, dtype, warps, mode, seconds):
        return {"tflops": {"fma": 1.0, "mma.sync": 2.0, "wgmma": 4.0}[what]}

    monkeypatch.setattr(ceilings, "library", lambda: None)
    monkeypatch.setattr(ceilings, "rate", rate)
    path = tmp_path / "ladder.json"
    assert ladder.main(["--size", "16", "--rounds", "1", "--no-ncu", "--json", str(path)]) == 0
    rows = {(row["family"], row["in_dtype"]): row for row in timing.read(path)["rows"]}
    assert set(rows) == {
        ("torch", "float32"),
        ("simt", "float32"),
        *((name, "bfloat16") for name in ("torch", "mma", "wgmma")),
    }
    mma = rows["mma", "bfloat16"]
    assert mma["of_torch"] == 0.6 and mma["rate"] == "mma.sync" and mma["rate_tflops"] == 2.0
    assert mma["warps_per_sm"] == 4  # the grid holds one block an SM
    assert rows["wgmma", "bfloat16"]["rate"] == "wgmma" and rows["simt", "float32"]["rate"] == "fma"
    assert "mma.sync 2" in capsys.readouterr().out


def test_warps_an_sm():
    device = {"compute_capability": (9, 0), "smem_sm_bytes": 233472, "sm_count": 132}
    kernel = {"name": "k", "threads": 128, "smem_bytes": 98304, "warps": (2, 2)}
    assert ladder.warps_per_sm(kernel, {"grid": 1000}, device, {}) == 8  # two blocks' shared memory
    assert ladder.warps_per_sm(kernel, {"grid": 100}, device, {}) == 4
    kernel["smem_bytes"] = 0
    assert ladder.warps_per_sm(kernel, {"grid": 10000}, device, {}) == 64
    report = {"k": {"registers": 250, "static_smem_bytes": 0}}
    assert ladder.warps_per_sm(kernel, {"grid": 10000}, device, report) == 8


def test_ncu_output_is_parsed():
    text = (
        '==PROF== Connected\n"ID","Kernel Name","pipe.avg"\n"","","%"\n"0","tcg_mma_a(tcg_args)","91.256"\n'
        '"1","tcg_mma_a","12"\n"2","tcg_b","1,000.5"\n"3","tcg_c","n/a"\n'
    )
    assert ladder.parse_ncu(text, "pipe.avg") == {"tcg_mma_a": 91.26, "tcg_b": 1000.5}
    with pytest.raises(timing.Unusable, match="ncu printed no"):
        ladder.parse_ncu("==ERROR== no", "pipe.avg")


def test_tune_end_to_end(simulated, tmp_path, capsys):
    mma, wgmma = simulated.COST_US
    simulated.chosen = mma
    path = tmp_path / "tune.json"
    assert tune.main(["--shapes", "8x8x8", "--rounds", "1", "--json", str(path)]) == 0
    (row,) = timing.read(path)["rows"]
    assert (row["choice"], row["best"], row["loss"]) == (mma, f"{wgmma}:direct", 1.0)
    assert list(row["times"]) == [f"{wgmma}:direct", f"{mma}:direct"]
    assert "+100.0% over 10.00 us" in capsys.readouterr().out
    assert tune.main(["--from", str(path), "--emit"]) == 0
    assert capsys.readouterr().out == (
        "TCG_EXCEPTION(8, 8, 8, 8, 1, wgmma, 128, 256, 64, coop, 1, 1, 1, 0, 0)"
        " /* any; 100.0% faster than mma 64x64x64_w2x2_s4_a16 */\n"
    )


def test_tune_finds_nothing_where_the_choice_is_best(simulated, tmp_path, capsys):
    path = tmp_path / "tune.json"
    assert tune.main(["--shapes", "8x8x8", "--rounds", "1", "--emit", "--json", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out == "" and "0 over 3%" in said.err and timing.read(path)["rows"][0]["loss"] == 0


def test_exceptions_of_two_dtypes_are_one_where_they_agree():
    def result(dtype, short, loss, m=8):
        best = f"tcg_mma_sm80_{short}_nt_64x64x64_w2x2_s4_a16"
        row = {
            **SHAPE,
            "m": m,
            "batch": 1,
            "in_dtype": dtype,
            "times": {best: {"splits": 2, "swap": False}},
            "choice": "other",
            "best": best,
        }
        return {"rows": [row | {"loss": loss}]}

    both = tune.exceptions([result("bfloat16", "bf16", 0.05), result("float16", "f16", 0.07)])
    assert [(entry["in_dtype"], entry["loss"], entry["splits"]) for entry in both] == [("any", 0.07, 2)]
    apart = tune.exceptions([result("bfloat16", "bf16", 0.05), result("float16", "f16", 0.02, m=9)])
    assert [(entry["in_dtype"], entry["m"]) for entry in apart] == [("any", 8)]


def test_constants_are_fitted_to_times_by_the_planners_own_estimate():
    """Times made of other constants come back as such an estimate."""
    name = "tcg_wgmma_sm90_bf16_nt_128x128x64_s6_w2_coop_c1x1x1:direct"
    made, us_per_cycle, rows = (1.4, 1.2, 4000.0), 1 / 1755, []
    device = {"cc": 90, "sm_count": 132, "smem_block_bytes": 232448, "smem_sm_bytes": 233472, "l2_bytes": 60 << 20}
    for m, n, k in [
        (64, 28672, 4096),
        (128, 57344, 8192),
        (8192, 8192, 64),
        (4096, 4096, 4096),
        (8192, 8192, 512),
        (512, 4096, 4096),
    ]:
        row = {"m": m, "n": n, "k": k, "batch": 1, "order": "nt", "in_dtype": "bfloat16", "out_dtype": "bfloat16"}
        point = tune.Point(row | {"times": {"": {"us": 1.0}}}, name, {"us": 1.0}, device)
        try:
            point.cycles()
        except RuntimeError:
            pytest.skip("built without wgmma")
        rows.append(
            row | {"times": {name: TIME | {"us": point.cycles(made) * us_per_cycle, "splits": 1, "swap": False}}}
        )
    machine = {"compute_capability": [9, 0], "sms": 132, "l2_bytes": 60 << 20}
    fitted = tune.fit([{"machine": machine, "rows": rows}])
    ((line, constants),) = fitted.items()
    assert line == "128, 128, 64, coop, 1, 1, 1"
    scale = [tune.Point(row, name, row["times"][name], device) for row in rows]
    ratios = [point.cycles(tuple(constants)) / point.us for point in scale]
    assert max(ratios) / min(ratios) < 1.05, (constants, ratios)


def test_host_table():
    def row(case, framework, us):
        return {"case": case, "framework": framework, "us": us, "q1_us": us, "q3_us": us, "calls": 300}

    rows = [row("torch.matmul", "torch", 10.0), row("tcgemm.matmul", "torch", 6.0), row("x.new_empty", "torch", 2.0)]
    rows += [
        row("torch.mm(out=)", "torch", 9.0),
        row("tcgemm.matmul(out=)", "torch", 3.5),
        row("cuLaunchKernelEx", None, 3.0),
    ]
    said = list(host.lines(rows))
    assert "tcgemm.matmul is 0.60 x torch.matmul (torch)" in said
    assert "tcgemm.matmul is 1.00 us above one launch and one new_empty" in said
    assert not any("cupy" in line for line in said)


def test_progress_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(timing.Progress, "EVERY_SECONDS", 0)
    with timing.Progress(2, "shapes") as progress:
        progress.print("a row")
        progress.step()
    said = capsys.readouterr()
    assert said.out == "a row\n" and said.err == "shapes 1/2, 0:00 left\n"


# ---- on a GPU ------------------------------------------------------------------------------------------------------


def run_script(script, *arguments):
    done = subprocess.run([sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.gpu
def test_bench_on_a_gpu(tmp_path):
    path = tmp_path / "bench.json"
    run_script(
        "bench.py", "--shapes", "256x256x256,64x72x80x3:tn", "--rounds", "3", "--target-ms", "1", "--json", str(path)
    )
    result = timing.read(path)
    assert result["complete"] and result["machine"]["card"]
    for row in result["rows"]:
        assert {"tcgemm", "torch", "cublaslt"} <= set(row["times"]) and not row["failed"], row["failed"]


@pytest.mark.gpu
def test_host_on_a_gpu(tmp_path):
    path = tmp_path / "host.json"
    run_script("bench.py", "--suite", "host", "--json", str(path))
    cases = {row["case"] for row in timing.read(path)["rows"]}
    assert cases >= {"torch.matmul", "torch.mm(out=)", "tcgemm.matmul", "tcgemm.matmul(out=)", "x.new_empty"}


@pytest.mark.gpu
def test_ladder_on_a_gpu(tmp_path):
    path = tmp_path / "ladder.json"
    run_script("ladder.py", "--size", "256", "--rounds", "1", "--seconds", "0.1", "--no-ncu", "--json", str(path))
    assert {row["family"] for row in timing.read(path)["rows"]} >= {"torch", "simt", "mma"}


def test_ceilings_compile(tmp_path, monkeypatch):
    """It is compiled where it runs, long after the kernels whose headers it shares."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # the sanitizer's is not for nvcc
    try:
        path = ceilings.compiled((9, 0))
    except timing.Unusable as error:
        if "cannot be compiled" not in str(error):
            raise
        pytest.skip(str(error))
    assert path.is_relative_to(tmp_path) and path.stat().st_size > 0


@pytest.mark.gpu
def test_ceilings_on_a_gpu(tmp_path):
    try:
        ceilings.library()
    except timing.Unusable as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(str(error))
    path = tmp_path / "ceilings.json"
    run_script("ceilings.py", "--seconds", "0.1", "--warps", "8", "--read-mb", "2", "--json", str(path))
    assert {row["what"] for row in timing.read(path)["rows"]} >= {"mma.sync", "fma", "read", "launch"}


@pytest.mark.gpu
def test_tune_on_a_gpu(tmp_path):
    path = tmp_path / "tune.json"
    run_script("tune.py", "--shapes", "64x256x256", "--rounds", "1", "--json", str(path))
    (row,) = timing.read(path)["rows"]
    assert row["best"] in row["times"] and not any(reason.startswith("wrong") for reason in row["failed"].values())
