"""What a call costs the host: back-to-back calls on tiny operands, frameworks and floors in one run. `bench.py --suite host`."""

import ctypes
import itertools
import time

import ceilings
import peers
import timing

CALLS = 300  # in a row; fewer than a stream's queue holds, so that no call waits for the device
ROUNDS = 15
WARM_CALLS = 100
SIZE = 32


def measure(record, *, dtype="float16", rounds=ROUNDS, calls=CALLS):
    """Appends one row a case to the record, and names what is missing."""
    torch = timing.cuda_torch()
    cases = _torch_cases(torch, getattr(torch, dtype))
    try:
        cases |= _cupy_cases(peers._cupy(), dtype)
    except timing.Unusable as error:
        record.missing["cupy"] = str(error)
    timers = {case: _python_timer(torch, function, calls) for case, function in cases.items()}
    try:
        timers["cuLaunchKernelEx", None] = _launch_timer(torch, ceilings.library(), calls)
    except timing.Unusable as error:
        record.missing["cuLaunchKernelEx"] = str(error)
    samples = {case: [] for case in timers}
    for number in range(rounds):
        for case in timers if number % 2 == 0 else reversed(timers):
            samples[case].append(timers[case]())
    for (case, framework), values in samples.items():
        row = timing.summary(values)
        del row["graph"]
        record.rows.append({"case": case, "framework": framework, **row, "calls": calls})


def _torch_cases(torch, dtype):
    matmul = timing.product().matmul
    x, w, out = (torch.randn(SIZE, SIZE, device="cuda").to(dtype) for _ in range(3))
    shape = (SIZE, SIZE)
    return {
        ("torch.matmul", "torch"): lambda: torch.matmul(x, w),
        ("torch.mm(out=)", "torch"): lambda: torch.mm(x, w, out=out),
        ("tcgemm.matmul", "torch"): lambda: matmul(x, w),
        ("tcgemm.matmul(out=)", "torch"): lambda: matmul(x, w, out=out),
        ("x.new_empty", "torch"): lambda: x.new_empty(shape),
        ("python", None): lambda: None,
    }


def _cupy_cases(cupy, dtype):
    matmul = timing.product().matmul
    # CuPy has no bfloat16 product: float16 costs the host the same.
    x, w = (
        cupy.random.standard_normal((SIZE, SIZE)).astype("float32" if dtype == "float32" else "float16") for _ in "xw"
    )
    return {
        ("cupy.matmul", "cupy"): lambda: cupy.matmul(x, w),
        ("tcgemm.matmul", "cupy"): lambda: matmul(x, w),
        ("cupy.ndarray", "cupy"): lambda: cupy.ndarray((SIZE, SIZE), x.dtype),
    }


def _python_timer(torch, function, calls):
    for _ in range(WARM_CALLS):
        function()

    def sample_us():
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in itertools.repeat(None, calls):
            function()
        elapsed = time.perf_counter() - started
        torch.cuda.synchronize()
        return elapsed / calls * 1e6

    return sample_us


def _launch_timer(torch, library, calls):
    """The launch itself, in a loop in C."""
    us = ctypes.c_double()

    def sample_us():
        torch.cuda.synchronize()
        library.check(library.tcg_launch_cost(calls, ctypes.byref(us)))
        return us.value

    sample_us()
    return sample_us


def lines(rows):
    """The table, and the bounds that a call is held to."""
    body = [
        (row["case"], row["framework"] or "", f"{row['us']:.2f}", f"{row['q1_us']:.2f}", f"{row['q3_us']:.2f}")
        for row in rows
    ]
    yield from timing.table(body, ("us a call", "", "median", "q1", "q3"))
    us = {(row["case"], row["framework"]): row["us"] for row in rows}

    def quotient(case, peer, framework):
        if (case, framework) in us and (peer, framework) in us:
            yield f"{case} is {us[case, framework] / us[peer, framework]:.2f} x {peer} ({framework})"

    yield from quotient("tcgemm.matmul", "torch.matmul", "torch")
    yield from quotient("tcgemm.matmul(out=)", "torch.mm(out=)", "torch")
    yield from quotient("tcgemm.matmul", "cupy.matmul", "cupy")
    launch, empty = us.get(("cuLaunchKernelEx", None)), us.get(("x.new_empty", "torch"))
    if launch is not None and empty is not None:
        yield f"tcgemm.matmul is {us['tcgemm.matmul', 'torch'] - launch - empty:.2f} us above one launch and one new_empty"
        yield f"tcgemm.matmul(out=) is {us['tcgemm.matmul(out=)', 'torch'] - launch:.2f} us above one launch"
