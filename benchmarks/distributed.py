"""Outgrowing one GPU: y = x @ w.T with the rows of w, and so the columns of y, spread over the GPUs of a host by
torch.distributed, and tcgemm as the local product. Checked against float64, timed beside torch.

    torchrun --nproc-per-node 2 benchmarks/distributed.py
    python benchmarks/distributed.py                        # starts one process a GPU itself
    python benchmarks/distributed.py --backend gloo         # two processes on the CPU: tries it, measures nothing of interest
"""

import argparse
import math
import os
import tempfile
import time
from pathlib import Path

import timing

ROUNDS = 9
CHECKED_ROWS = 64


def columns(matmul, x, w_shard, y_shard, y):
    """What the example is about. y_shard holds this rank's columns of the product as rows, so that gathering the ranks'
    shards one after another gives all of y, transposed: no copy puts columns in their place."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    matmul(w_shard, x.T, out=y_shard)
    gather(y, y_shard)
    return y.T


def parse(argv=None):
    parser = argparse.ArgumentParser(description="A product's columns over several GPUs, beside torch.")
    parser.add_argument("--shape", type=_shape, metavar="MxNxK", help="4096x28672x8192; with gloo 64x192x128")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="nccl where there is a GPU; gloo runs on the CPU")
    parser.add_argument("--processes", type=int, metavar="N", help="without torchrun: the GPUs, or 2 on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _shape(text):
    try:
        m, n, k = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected MxNxK, got {text!r}") from None
    return m, n, k


def main():
    options = parse()
    try:
        import torch
    except ImportError as error:
        raise timing.Unusable(f"torch is needed and is missing: {error}") from error
    options.backend = options.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    on_gpu = options.backend == "nccl"
    options.shape = options.shape or ((4096, 28672, 8192) if on_gpu else (64, 192, 128))
    if on_gpu:
        timing.cuda_torch()
    if "RANK" in os.environ:  # torchrun
        return run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", options)
    world = options.processes or (torch.cuda.device_count() if on_gpu else 2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no name has to be resolved
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (world, f"file://{folder}/store", options), nprocs=world)
    return 0


def run(rank, world, init_method, options):
    """One rank."""
    import torch
    import torch.distributed as dist

    m, n, k = options.shape
    if n % world:
        raise ValueError(f"--shape: expected N to be a multiple of the {world} processes, got {n}")
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)  # the processes share the cores
    dist.init_process_group(
        options.backend, init_method, rank=rank, world_size=world, device_id=device if device.type == "cuda" else None
    )
    try:
        settings = {"shape": [m, n, k], "dtype": options.dtype, "backend": options.backend, "processes": world}
        record = timing.Record("distributed", settings, options.json if rank == 0 else None)
        with record:
            measure(rank, world, device, options, record.rows)
    finally:
        dist.destroy_process_group()
    return 130 if record.interrupted else 0


def measure(rank, world, device, options, rows):
    """Checks, then times; appends a row a case and, on rank 0, prints it."""
    import torch

    m, n, k = options.shape
    dtype = getattr(torch, options.dtype)
    products = {"tcgemm": timing.product().matmul, "torch": torch.mm}

    def normal(seed, count):
        """The same on every rank."""
        return torch.randn(count, k, device=device, generator=torch.Generator(device).manual_seed(seed)).to(dtype)

    x, shards = normal(world, m), [normal(other, n // world) for other in range(world)]
    w, w_shard = torch.cat(shards), shards[rank]
    y, y_shard = torch.empty(n, m, device=device, dtype=dtype), torch.empty(n // world, m, device=device, dtype=dtype)

    sample = torch.linspace(0, m - 1, min(m, CHECKED_ROWS), device=device).long()
    exact = torch.cat([x[sample].double() @ shard.double().T for shard in shards], dim=1)
    del shards
    for name, matmul in products.items():
        y.fill_(math.nan)
        error = timing.relative_error(columns(matmul, x, w_shard, y_shard, y)[sample], exact)
        if not error < timing.TOLERANCE[options.dtype]:
            raise ArithmeticError(f"rank {rank}: {name}: relative error {error:.2g} against float64")
        if rank == 0:
            print(f"{name}: {len(sample)} rows checked against float64, relative error {error:.2g}")

    cases = {
        "one process, whole": lambda matmul: matmul(w, x.T, out=y),
        f"{world} processes, columns": lambda matmul: matmul(w_shard, x.T, out=y_shard),
        f"{world} processes, columns, gathered": lambda matmul: columns(matmul, x, w_shard, y_shard, y),
    }
    lines = []
    for case, function in cases.items():
        times = time_ranks(device, {name: lambda f=f: function(f) for name, f in products.items()})
        rows.append(
            {"case": case, "m": m, "n": n, "k": k, "in_dtype": options.dtype, "processes": world, "times": times}
        )
        found = [times[name]["us"] for name in products]
        lines.append([case, f"{found[0]:.1f}", f"{found[1]:.1f}", f"{found[1] / found[0]:.3f}"])
    if rank == 0:
        header = [f"{m}x{n}x{k} {options.dtype}", "tcgemm us", "torch us", "ratio"]
        print("\n".join(timing.table(lines, header)))


def time_ranks(device, functions):
    """Name -> time as in README.md, of the slowest rank in each round; the functions take turns."""
    import torch
    import torch.distributed as dist

    def synchronize():
        if device.type == "cuda":
            torch.cuda.synchronize()

    def sample_us(function, launches):
        synchronize()
        dist.barrier()
        synchronize()
        started = time.perf_counter()
        for _ in range(launches):
            function()
        synchronize()
        slowest = torch.tensor((time.perf_counter() - started) / launches * 1e6, device=device, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    samples = {name: [] for name in functions}
    for function in functions.values():
        sample_us(function, 2)
    # How many launches take some 20 ms: the same number on every rank, as the slowest one's time is.
    launches = {name: max(1, min(50, int(20e3 / max(sample_us(f, 2), 1)))) for name, f in functions.items()}
    for number in range(ROUNDS):
        for name in list(functions) if number % 2 == 0 else reversed(list(functions)):
            samples[name].append(sample_us(functions[name], launches[name]))
    return {name: timing.summary(values, graph=False) for name, values in samples.items()}


if __name__ == "__main__":
    timing.run_main(main)
