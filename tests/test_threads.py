"""Threads on the host path: concurrent first calls, calls that release the GIL, and garbage collected meanwhile."""

import sys
import threading

import numpy as np
import pytest
import reference as ref

import tcgemm


def in_threads(count, work):
    """Runs work(i) in threads that start together, and raises what any of them raised."""
    barrier, raised = threading.Barrier(count), []

    def run(i):
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_in_threads_reports_what_fails():
    with pytest.raises(ZeroDivisionError):
        in_threads(3, lambda i: 1 / (i - 1))


@pytest.mark.parametrize("repeat", range(5))
def test_first_calls_together(run_python, repeat):
    run_python("""
        import numpy as np, tcgemm
        from test_threads import in_threads
        def work(i):
            for n in range(1, 30):
                x = np.full((i + 1, n), 2, np.float16)
                assert (tcgemm.matmul(x, x.T) == 4 * n).all()
        in_threads(16, work)
    """)


def test_many_threads(rng):
    torch = pytest.importorskip("torch")
    cases = []
    for _ in range(16):
        shapes = ref.random_shapes(rng, 60)
        a, b = (ref.operand(rng, "float16", ref.layout("any_order", s, rng)) for s in shapes)
        cases.append((a, b, a.values(), b.values()))

    def work(i):
        for j in range(60):
            a, b, x, y = cases[(i + j) % len(cases)]
            result = tcgemm.matmul(a.tensor, b.tensor) if j % 2 else tcgemm.matmul(a.array, b.array)
            ref.check_exact(result, x, y, "float16")
            with pytest.raises(TypeError):
                tcgemm.matmul(a.array, None)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        in_threads(8, work)
    finally:
        sys.setswitchinterval(interval)
    assert isinstance(tcgemm.matmul(cases[0][0].tensor, cases[0][1].tensor), torch.Tensor)


def test_another_thread_runs_during_a_long_product():
    """The host product is computed without the GIL."""
    x = np.ones((1500, 1500), np.float32)
    ticks, done = [0], threading.Event()

    def tick():
        while not done.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    tcgemm.matmul(x, x)
    counted = ticks[0] - before
    done.set()
    thread.join()
    assert counted > 10


def test_operands_dropped_by_other_threads():
    """An operand that another thread replaces while a call reads it lives until the call is done."""
    box = [np.ones((50, 50), np.float16)]
    done = threading.Event()

    def replace():
        while not done.is_set():
            box[0] = np.ones((50, 50), np.float16)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(3000):
            assert tcgemm.matmul(box[0], box[0])[0, 0] == 50
    finally:
        done.set()
        thread.join()


def test_free_threaded_builds_stay_free():
    if not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled() and not sys.abiflags.count("t"):
        pytest.skip("not a free-threaded build")
    assert not sys._is_gil_enabled()
