"""benchmarks/distributed.py and benchmarks/numerics.py end to end: on the CPU here, on GPUs where there are some."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("benchmarks/ is not in this tree", allow_module_level=True)


@pytest.fixture
def run(torch, tmp_path):
    """Runs a script as a user would; gives its record and what it printed."""

    def run(script, *arguments, launcher=()):
        path = tmp_path / "result.json"
        command = [sys.executable, *launcher, f"benchmarks/{script}", *arguments, "--json", path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return json.loads(path.read_text()), done.stdout

    return run


def check_distributed(result, printed, processes):
    assert (result["kind"], result["complete"]) == ("distributed", True)
    assert [row["processes"] for row in result["rows"]] == [processes] * 3
    for row in result["rows"]:
        assert all(time["us"] > 0 for time in row["times"].values()) and row["times"].keys() == {"tcgemm", "torch"}
    for name in ("tcgemm", "torch"):
        error = float(re.search(rf"{name}: .* relative error ([\d.e-]+)", printed)[1])
        assert 0 < error < 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_columns_over_processes_on_the_cpu(run, dtype):
    result, printed = run("distributed.py", "--backend", "gloo", "--dtype", dtype, "--shape", "33x64x48")
    check_distributed(result, printed, 2)


def test_columns_over_processes_of_torchrun(run):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    result, printed = run("distributed.py", "--backend", "gloo", launcher=launcher)
    check_distributed(result, printed, 2)


@pytest.mark.gpus2
def test_columns_over_gpus(run, torch):
    result, printed = run("distributed.py", "--shape", "256x1024x512", "--processes", "2")
    check_distributed(result, printed, 2)
    assert result["settings"]["backend"] == "nccl"


def check_numerics(result, peers):
    rows = {what: [row for row in result["rows"] if row["what"] == what] for what in ("error", "repeat", "rows")}
    for what, found in rows.items():
        assert {row["of"] for row in found} == peers, what
    for row in rows["error"]:
        assert row["nonfinite"] == 0
        assert sum(row.get("histogram", [row["m"] * row["n"]])) == row["m"] * row["n"]
        if row["out_dtype"] == row["in_dtype"] and row["k"] == 16 and row["data"] == "uniform":
            assert row["max_ulp"] < 0.501 and 0.23 < row["mean_ulp"] < 0.27  # one rounding, of nearly exact sums
    for row in rows["rows"]:
        assert 0 <= row["different"] <= row["elements"]
        assert row["place"] == "last" or row["m"] < row["of_rows"] or row["different"] == 0
    for row in (*rows["repeat"], *rows["rows"]):
        if row["of"] == "invariant" or (row["of"] == "tcgemm" and row["what"] == "repeat"):
            assert row["different"] == 0, row


def test_numerics_on_the_cpu(run):
    result, printed = run("numerics.py", "--device", "cpu")
    check_numerics(result, {"tcgemm", "torch"})
    assert re.search(r"run to run, tcgemm: 0 of \d+ runs", printed)


@pytest.mark.gpu
def test_numerics_on_a_gpu(run):
    result, _ = run("numerics.py")
    check_numerics(result, {"tcgemm", "torch", "invariant"})
