"""Whole calls against a driver library that records, computes on the host, and fails when told to: streams, contexts,
launch arguments, every error, captures, lifetimes. Each test is a fresh process."""

import pytest


# ---- importing, opening ------------------------------------------------------------------------------------------------


def test_no_call_while_importing(run_fake):
    run_fake("""
        assert fake.calls() == []
        tcgemm.kernels()
        x = np.ones((4, 4), np.float32)
        tcgemm.matmul(x, x)
        tcgemm.explain(x, x)
        try:
            tcgemm.matmul(x, None)
        except TypeError:
            pass
        assert fake.calls() == []
        assert "fake" in open("/proc/self/maps").read()  # by this script's own doing
    """)


@pytest.mark.parametrize(
    "symbol", ["cuLibraryLoadData", "cuLaunchKernelEx", "cuMemAllocAsync", "cuStreamIsCapturing"]
)
def test_driver_without_a_symbol(run_fake, symbol):
    run_fake(f"""
        a, b = fake.pair(rng)
        lib.fake_hide(b"{symbol}")
        for _ in range(2):
            try:
                tcgemm.matmul(a.capsule(), b.capsule())
            except RuntimeError as error:
                assert not isinstance(error, tcgemm.CudaError) and "{symbol}" in str(error) and "driver" in str(error), error
            else:
                raise SystemExit("no error")
        gc.collect()
        assert not prod._live and not prod.stray
        x = np.ones((4, 4), np.float32)
        assert (tcgemm.matmul(x, x) == 4).all()
    """)


@pytest.mark.parametrize(
    "setting", ["lib.fake_set_version(11080)", "lib.fake_set_devices(0)", "fake.fail('cuInit', 999, 0)"]
)
def test_driver_that_cannot_be_used(run_fake, setting):
    run_fake(f"""
        a, b = fake.pair(rng)
        {setting}
        for _ in range(2):
            try:
                tcgemm.matmul(a.capsule(), b.capsule())
            except RuntimeError as error:
                assert "NVIDIA driver" in str(error), error
            else:
                raise SystemExit("no error")
        gc.collect()
        assert not prod._live
        try:
            assert tcgemm.devices() == []
        except RuntimeError as error:
            assert "NVIDIA driver" in str(error), error
    """)


def test_devices(run_fake):
    run_fake("""
        fake.device(0, 90, 227 << 10, 132, "First")
        fake.device(1, 86, 99 << 10, 84, "Second")
        found = tcgemm.devices()
        assert [d["name"] for d in found] == ["First", "Second"]
        assert [d["sm_count"] for d in found] == [132, 84]
        families = {row["family"] for row in tcgemm.kernels()}
        for d in found:
            assert set(d["families"]) <= families and {"simt", "mma"} <= set(d["families"])
    """)


# ---- numbers -----------------------------------------------------------------------------------------------------------

MAKERS = {
    "capsule": "lambda x: x.capsule()",
    "versioned": "lambda x: x.capsule(versioned=True)",
    "object": "lambda x: x.object()",
    "legacy object": "lambda x: x.object('legacy')",
    "interface": "lambda x: x.interface() if x.dtype != 'bfloat16' else x.capsule()",
    "managed": "lambda x: x.capsule(device=(prod.CUDA_MANAGED, 0))",
    "mixed": "lambda x: [x.capsule(), x.object(), x.exchanged(kind)][int(rng.integers(3))]",
}


@pytest.mark.parametrize("name", MAKERS)
def test_products(run_fake, name):
    """Random shapes, layouts and dtypes, all sides guarded, through every protocol."""
    run_fake(f"""
        kind = prod.exchange_type(stream=0x500)
        make = {MAKERS[name]}
        fake.reset()
        for i in range(250):
            shapes = ref.random_shapes(rng, 60)
            dtype = str(rng.choice(ref.DTYPES))
            out_dtype = str(rng.choice([dtype, "float32"]))
            a, b = (fake.operand(rng, dtype, ref.layout(rng.choice(ref.layout_names(torch=False)), s, rng)) for s in shapes)
            if i % 2 or 0 in ref.result_shape(*shapes):
                result = tcgemm.matmul(make(a), make(b), out_dtype=out_dtype)
                if type(result).__name__ == "Exchanged":
                    owner = result.owner.keep
                    fake.check(owner, a, b, out_dtype) if isinstance(owner, fake.Operand) else None
                    del owner
                else:
                    fake.check(result, a, b, out_dtype)
                del result
            else:
                out = fake.Operand(out_dtype, ref.layout(rng.choice(ref.layout_names(torch=False, out=True)), ref.result_shape(*shapes), rng))
                target = out.exchanged(kind)
                assert tcgemm.matmul(make(a), make(b), out=target, out_dtype=out_dtype) is target
                fake.check(out, a, b, out_dtype)
        assert len(fake.launches()) >= 250
        gc.collect()
        assert lib.fake_live_blocks() == 0 and not prod.stray
        lib.fake_reset()
    """)


def test_split_and_copied_operands(run_fake):
    run_fake("""
        fake.reset()
        kernels = set()
        for m, n, k in ((16, 64, 2048), (1, 8, 3000), (33, 17, 1025)):
            for dtype in ref.DTYPES:
                for name in ("row", "column", "stepped", "expanded_both", "windows", "flipped_all", "column_stepped"):
                    a, b = (fake.operand(rng, dtype, ref.layout(name, s, rng)) for s in ((m, k), (k, n)))
                    out = fake.Operand(dtype, ref.layout("stepped", (m, n), rng))
                    tcgemm.matmul(a.capsule(), b.capsule(), out=out.capsule())
                    fake.check(out, a, b)
                    kernels |= {l.name for l in fake.launches()}
                    lib.fake_reset()
        assert {"tcg_copy", "tcg_reduce"} <= kernels, kernels
        assert lib.fake_live_blocks() == 0
    """)


def test_every_forced_kernel(run_fake):
    run_fake(
        """
        fake.reset()
        families = tcgemm.devices()[0]["families"]
        ran = 0
        for row in tcgemm.kernels():
            if row["family"] not in families:
                continue
            m, n, k = row["tile"]
            orders = [row["order"]] if row["order"] in ref.ORDERS else list(ref.ORDERS)
            for order in orders:
                names = (ref.ALIGNED_ORDERS if row["align_bytes"] >= 16 else ref.ORDERS)[order]
                for shape in ((m + 1, n + 3, k + 5), (3, 2, 1), (m - 1, 1, 2 * k)):
                    a, b = (fake.operand(rng, row["in_dtype"], ref.layout(x, s, rng)) for x, s in zip(names, (shape[::2], shape[:0:-1])))
                    lib.fake_reset()
                    [x.declare() for x in (a, b)]
                    if why := ref.refusal(row, shape[2]):
                        with pytest.raises(RuntimeError, match=row["name"] + ".*" + why):
                            tcgemm.matmul(a.capsule(), b.capsule(), kernel=row["name"])
                        ran += 1
                        continue
                    result = tcgemm.matmul(a.capsule(), b.capsule(), kernel=row["name"])
                    assert row["name"] in [l.name for l in fake.launches()]
                    fake.check(result, a, b)
                    ran += 1
        assert ran >= 3 * sum(fake.runs(row, 90) for row in tcgemm.kernels()) > 0
    """,
        timeout=300,
    )


def test_boxes_are_swizzled_over_their_width(run_fake):
    """128 bytes (3), but for an operand of 16 or 32 columns that lies along them: 32 (1) or 64 (2)."""
    run_fake("""
        import re
        for columns, expected in ((16, 1), (32, 2), (64, 3)):
            row = fake.wgmma_row("tn", 64, columns)
            fake.reset()
            a = fake.Operand("bfloat16", ref.packed((64, 512), order=(1, 0)), rng.integers(-2, 3, (64, 512)))
            b = fake.Operand("bfloat16", ref.packed((512, columns)), rng.integers(-2, 3, (512, columns)))
            tcgemm.matmul(a.capsule(), b.capsule(), kernel=row + ":direct")
            found = [int(re.search(r"swizzle=(\\d)", line)[1]) for line in fake.calls("cuTensorMapEncodeTiled")]
            assert found[:2] == [3, expected], (columns, found)
    """)


def test_last_boxes_end_with_the_operand(run_fake):
    """What of a box is outside takes TMA up to three times as long. In maps beside those of whole boxes (`boxes`): the last
    of lines along M or N is so many elements wide, in whole 16 bytes; of lines along K the blocks of a cluster share what
    there is, in whole periods of the swizzle."""
    run_fake("""
        import re
        def boxes(order, m, n, cluster, width=128):
            row = fake.wgmma_row(order, 64, width, cluster)
            fake.reset()
            a_axes, b_axes = ((0, 1) if letter == "n" else (1, 0) for letter in order)
            a = fake.Operand("bfloat16", ref.packed((m, 64), order=a_axes), rng.integers(-2, 3, (m, 64)))
            b = fake.Operand("bfloat16", ref.packed((64, n), order=b_axes), rng.integers(-2, 3, (64, n)))
            fake.check(tcgemm.matmul(a.capsule(), b.capsule(), kernel=row + ":direct"), a, b)
            maps = fake.calls("cuTensorMapEncodeTiled")
            return [tuple(map(int, re.search(r"box=(\\d+)x(\\d+)", line).groups())) for line in maps]

        one = (1, 1, 1)
        assert boxes("tn", 64, 128, one)[:2] == [(64, 64), (64, 64)]
        assert boxes("tn", 8, 128, one)[:2] == [(64, 64), (8, 64)]
        assert boxes("tn", 64 + 24, 128 + 64 + 40, one)[:4] == [(64, 64), (24, 64), (64, 64), (40, 64)]
        assert boxes("nt", 64 + 24, 128 + 40, one)[:4] == [(64, 64), (64, 24), (64, 128), (64, 40)]
        assert boxes("nt", 128, 128 + 40, (2, 1, 1))[:3] == [(64, 64), (64, 64), (64, 24)]  # 40 lines for two blocks
        assert boxes("nt", 24, 256, (1, 2, 1))[:2] == [(64, 32), (64, 16)]
        assert boxes("tn", 128, 128 + 64 + 8, (2, 1, 1))[:3] == [(64, 64), (64, 64), (8, 64)]  # two boxes for two blocks
    """)


def test_small_copies_have_a_block_a_tile(run_fake):
    """Two rows stored as columns, alone or beside an operand that is copied too: not in a few blocks, tile after tile."""
    run_fake("""
        row = fake.wgmma_row("nt", 64, 64)
        for k, pad in ((2560, 0), (2560, 1)):
            fake.reset()
            a = fake.Operand("bfloat16", ref.packed((2, k), order=(1, 0)), rng.integers(-2, 3, (2, k)))
            b = fake.Operand("bfloat16", ref.packed((k, 256), order=(1, 0), pads={0: pad}), rng.integers(-2, 3, (k, 256)))
            fake.check(tcgemm.matmul(a.capsule(), b.capsule(), kernel=row + ":direct"), a, b)
            (copy,) = [launch for launch in fake.launches() if "copy" in launch.name]
            assert copy.grid[0] >= k // 64, (pad, copy.grid[0])
    """)


def test_copies_ask_for_shared_memory_where_they_turn(run_fake):
    """What they do not ask for is room for the GEMM's first blocks, which set themselves up meanwhile."""
    run_fake("""
        row = fake.wgmma_row("nt", 64, 64)
        for a_order, turned in (((0, 1), False), ((1, 0), True)):
            fake.reset()
            a = fake.Operand("bfloat16", ref.packed((33, 129), order=a_order), rng.integers(-2, 3, (33, 129)))
            b = fake.Operand("bfloat16", ref.packed((129, 80), order=(1, 0)), rng.integers(-2, 3, (129, 80)))
            fake.check(tcgemm.matmul(a.capsule(), b.capsule(), kernel=row + ":direct"), a, b)
            (copy,) = [launch for launch in fake.launches() if "copy" in launch.name]
            assert (copy.smem_bytes > 0) == turned, (a_order, copy.smem_bytes)
    """)


def test_tensor_maps_are_kept(run_fake):
    """Encoded once for operands that come back, anew for others and in another thread, and not kept where that failed."""
    run_fake("""
        import threading
        row = fake.wgmma_row("nn", 64, 64)
        operands = lambda n: (fake.Operand("bfloat16", ref.packed((64, n)), rng.integers(-2, 3, (64, n))),
                              fake.Operand("bfloat16", ref.packed((n, 64)), rng.integers(-2, 3, (n, 64))))
        fake.reset()
        (a, b), (c, d), keep = operands(64), operands(64), []

        def encoded(x, y, **options):
            before = len(fake.calls("cuTensorMapEncodeTiled"))
            out = tcgemm.matmul(x.capsule(), y.capsule(), kernel=row + ":direct", **options)
            if not options:
                fake.check(out, x, y)
                keep.append(out)  # its address is not used again
            return len(fake.calls("cuTensorMapEncodeTiled")) - before

        out = tcgemm.matmul(a.capsule(), b.capsule(), kernel=row + ":direct")
        assert encoded(a, b, out=out) == 0 and encoded(a, b, out=out) == 0
        fake.check(out, a, b)
        assert encoded(a, b) == 3  # another result
        assert encoded(c, b, out=out) == 3 and encoded(a, d, out=out) == 3
        fake.check(out, a, d)
        assert encoded(a, d, out=out) == 0

        found = []
        thread = threading.Thread(target=lambda: found.append(encoded(a, d, out=out)))
        thread.start()
        thread.join()
        assert found == [3], found

        for _ in range(2):
            fake.fail("cuTensorMapEncodeTiled")
            with pytest.raises(RuntimeError, match="tensor map"):
                tcgemm.matmul(c.capsule(), d.capsule(), kernel=row + ":direct", out=out)
        assert encoded(c, d, out=out) == 3
        fake.check(out, c, d)
    """)


def test_batch_invariance(run_fake):
    """Not only unsplit, but the same bits for every number of rows: computed, with operands that round."""
    run_fake("""
        import re
        fake.reset()
        values = rng.standard_normal((80, 3000)), rng.standard_normal((3000, 24))
        b = fake.Operand("bfloat16", ref.packed((3000, 24)), values[1])
        rows = {}
        for m in (1, 2, 7, 16, 17, 64, 80):
            a = fake.Operand("bfloat16", ref.packed((m, 3000)), values[0][:m])
            plan = tcgemm.explain(a.capsule(), b.capsule(), batch_invariant=True)
            assert plan["splits"] == 1 and not re.search(r"_c\\d+x\\d+x[^1]", plan["kernel"]), plan["kernel"]  # nor by a cluster
            bits, _ = fake.array_of(tcgemm.matmul(a.capsule(), b.capsule(), batch_invariant=True, out_dtype="float32"))
            for i, row in enumerate(bits):
                assert (rows.setdefault(i, row) == row).all()
        assert "tcg_reduce" not in [l.name for l in fake.launches()]
        a = fake.Operand("bfloat16", ref.packed((16, 3000)), values[0][:16])
        plan = tcgemm.explain(a.capsule(), b.capsule())
        assert plan["splits"] > 1 or re.search(r"_c\\d+x\\d+x[^1]", plan["kernel"]), plan["kernel"]
    """)


def test_launch_arguments(run_fake):
    run_fake("""
        from abi import Gemm
        a, b = fake.pair(rng, "float16", 256, 128, 64)
        fake.reset(execute=False)
        out = fake.Operand("float16", ref.packed((256, 128)))
        kind = prod.exchange_type(stream=0x700)
        a_, b_, out_ = (x.exchanged(kind) for x in (a, b, out))
        [x.declare() for x in (a, b)]
        tcgemm.matmul(a_, b_, out=out_, kernel="mma")
        (launch,) = fake.launches()
        row = next(r for r in tcgemm.kernels() if r["name"] == launch.name)
        args = Gemm.from_buffer_copy(launch.parameters)
        assert launch.parameter_bytes == ctypes.sizeof(Gemm)
        pointers = (args.a, args.b) if args.m == 256 else (args.b, args.a)
        assert pointers == (a.pointer, b.pointer) and args.c == out.pointer
        assert sorted((args.m, args.n)) == [128, 256] and args.k == 64
        m, n, k = row["tile"]
        assert (args.tiles_m, args.tiles_n) == (-(-args.m // m), -(-args.n // n))
        assert args.tiles == args.tiles_m * args.tiles_n * args.splits
        assert 1 <= launch.grid[0] <= args.tiles and list(launch.grid[1:]) == [1, 1]
        assert launch.block[0] == row["threads"] and launch.smem_bytes == row["smem_bytes"]
        assert launch.stream == 0x700 and launch.device == 0 and launch.primary == 1
        plan = tcgemm.explain(a_, b_, out=out_, kernel="mma")
        assert plan["kernel"] == launch.name and plan["grid"] == launch.grid[0]
    """)


# ---- streams -----------------------------------------------------------------------------------------------------------


def test_streams(run_fake):
    run_fake("""
        a, b = fake.pair(rng)
        kind = prod.exchange_type(stream=0x700)
        default = prod.exchange_type(stream=0)
        class Named:
            def __init__(self, **attributes):
                self.__dict__.update(attributes)
        class Protocol:
            def __cuda_stream__(self):
                return (0, 0x900)
        cases = [
            (a.interface(stream=0x600), {}, 0x600), (a.interface(stream=1), {}, 1), (a.interface(stream=2), {}, 2), (a.interface(stream=None), {}, 1),
            (a.capsule(), {}, 1), (a.capsule(versioned=True), {}, 1), (a.object(), {}, 1), (a.exchanged(kind), {}, 0x700), (a.exchanged(default), {}, 1),
            (a.capsule(), {"stream": 0x800}, 0x800), (a.capsule(), {"stream": 0}, 1), (a.capsule(), {"stream": 1}, 1), (a.capsule(), {"stream": 2}, 2),
            (a.exchanged(kind), {"stream": 0x800}, 0x800), (a.object(), {"stream": 0x800}, 0x800), (a.interface(stream=0x600), {"stream": 0x800}, 0x800),
            (a.capsule(), {"stream": Named(cuda_stream=0x801)}, 0x801), (a.capsule(), {"stream": Named(ptr=0x802)}, 0x802), (a.capsule(), {"stream": Protocol()}, 0x900),
        ]
        for left, keywords, stream in cases:
            fake.reset()
            [x.declare() for x in (a, b)]
            right = b.object()
            tcgemm.matmul(left, right, **keywords)
            assert {l.stream for l in fake.launches()} == {stream}, (left, keywords, [hex(l.stream) for l in fake.launches()])
            assert right.streams == [stream]  # the producer is told which stream will read
            if isinstance(left, prod.DLPackObject):
                assert left.streams == [stream]
    """)


def test_other_streams_are_waited_for(run_fake):
    """An operand under way on another stream: an event there, a wait here, before the launch."""
    run_fake("""
        a, b = fake.pair(rng)
        out = fake.Operand("float16", ref.packed((33, 17)))
        kind, other = prod.exchange_type(stream=0x700), prod.exchange_type(stream=0x701)
        def steps(*args, **kwargs):
            fake.reset()
            [x.declare() for x in (a, b, out)]
            tcgemm.matmul(*args, **kwargs)
            return [" ".join(line.split()[:2]) for line in fake.calls() if line.split()[0] in ("cuEventRecord", "cuStreamWaitEvent") or
                    line.startswith("cuLaunchKernelEx") and not line.split()[1].startswith("kernel=tcg_copy")]
        def before(lines):
            at = next(i for i, line in enumerate(lines) if line.startswith("cuLaunchKernelEx"))
            return lines[:at]
        found = before(steps(a.interface(stream=0x600), b.interface(stream=0x601)))
        assert found == ["cuEventRecord stream=0x601", "cuStreamWaitEvent stream=0x600"], found
        found = before(steps(a.interface(stream=0x600), b.interface(stream=0x600)))
        assert found == [], found
        found = before(steps(a.interface(stream=0x600), b.interface(stream=None)))
        assert found == [], found
        found = before(steps(a.interface(stream=0x600), b.interface(stream=0x601), stream=0x800))
        assert sorted(found) == sorted(["cuEventRecord stream=0x600", "cuStreamWaitEvent stream=0x800", "cuEventRecord stream=0x601", "cuStreamWaitEvent stream=0x800"]), found
        found = before(steps(a.exchanged(kind), b.exchanged(other)))
        assert found == ["cuEventRecord stream=0x701", "cuStreamWaitEvent stream=0x700"], found
        found = before(steps(a.interface(stream=0x600), b.interface(stream=0x600), out=out.interface(stream=0x602)))
        assert found == ["cuEventRecord stream=0x602", "cuStreamWaitEvent stream=0x600"], found
        assert tcgemm.matmul(a.capsule(), b.capsule()) is not None
    """)


def test_results_order_their_consumers(run_fake):
    run_fake("""
        fake.reset()
        a, b = fake.pair(rng)
        result = tcgemm.matmul(a.capsule(), b.capsule(), stream=0x800)
        assert result.__cuda_array_interface__["stream"] == 0x800
        fake.reset()
        for stream, expected in ((0x900, 0x900), (None, 1), (1, 1), (2, 2)):
            fake.reset()
            capsule = result.__dlpack__(stream=stream)
            lines = [" ".join(line.split()[:2]) for line in fake.calls() if line.split()[0] in ("cuEventRecord", "cuStreamWaitEvent")]
            assert lines == ["cuEventRecord stream=0x800", f"cuStreamWaitEvent stream={expected:#x}"], (stream, lines)
        for stream in (-1, 0x800):
            fake.reset()
            result.__dlpack__(stream=stream)
            assert not fake.calls("cuStreamWaitEvent")
        for keywords in ({"stream": 0}, {"stream": -2}):
            try:
                result.__dlpack__(**keywords)
            except ValueError:
                pass
            else:
                raise SystemExit("no error")
        # To the host: after the stream, by a copy.
        fake.reset()
        [x.declare() for x in (a, b)]
        host = type("Host", (), {"__dlpack__": lambda self, **kw: result.__dlpack__(dl_device=(1, 0), max_version=kw.get("max_version")), "__dlpack_device__": lambda self: (1, 0)})()
        np.testing.assert_array_equal(np.from_dlpack(host).astype(np.float64), a.values() @ b.values())
        assert fake.calls("cuStreamSynchronize") == ["cuStreamSynchronize stream=0x800 ctx=0"]
    """)


# ---- contexts and devices --------------------------------------------------------------------------------------------------


def test_contexts(run_fake):
    """The primary context of the tensor's device, whatever is current; what was is current again, and nothing is left."""
    run_fake("""
        operands = [fake.pair(rng, device=d) for d in (0, 1)]
        states = {"none": [], "primary 0": [lib.fake_primary(0)], "primary 1": [lib.fake_primary(1)], "foreign 0": [lib.fake_context(0)],
                  "foreign 1": [lib.fake_context(1)], "two": [lib.fake_primary(0), lib.fake_context(1)]}
        def run(stack, device):
            for context in stack:
                lib.fake_push(context)
            a, b = operands[device]
            for attempt in range(2):
                fake.reset()
                for x in operands[0] + operands[1]:
                    x.declare()
                result = tcgemm.matmul(a.capsule(), b.capsule(), stream=1)
                fake.check(result, a, b)
                assert {(l.device, l.primary) for l in fake.launches()} == {(device, 1)}
                assert tuple(result.__dlpack_device__()) == (2, device)
                del result
                assert lib.fake_depth() == len(stack) and lib.fake_current() == (stack[-1] if stack else None)
                assert len(fake.calls("cuCtxPushCurrent")) == len(fake.calls("cuCtxPopCurrent"))
                if stack and stack[-1] == lib.fake_primary(device):
                    assert not fake.calls("cuCtxPushCurrent")
                try:
                    tcgemm.matmul(a.capsule(), a.capsule())
                except ValueError:
                    pass
                assert lib.fake_depth() == len(stack)
            for _ in stack:
                lib.fake_pop()
        from test_threads import in_threads
        for name, stack in states.items():
            for device in (1, 0):
                run(stack, device)
                in_threads(1, lambda i: run(stack, device))
        assert lib.fake_depth() == 0
    """)


def test_attributes_once_a_kernel_and_device(run_fake):
    """Once for each device, not once for the process (bitsandbytes PR#1952), and never again (cudf#23074)."""
    run_fake("""
        lib.fake_set_devices(3)
        seen = []
        for turn in range(3):
            for device in (1, 0, 2):
                for dtype in ref.DTYPES:
                    a, b = fake.pair(rng, dtype, 200, 136, 64, device)
                    fake.check(tcgemm.matmul(a.capsule(), b.capsule()), a, b) if turn else tcgemm.matmul(a.capsule(), b.capsule())
            if turn == 0:
                lib.fake_set_execute(1)
        attributes = fake.calls("cuKernelSetAttribute")
        assert attributes and len(set(attributes)) == len(attributes), attributes
        # Which kernel it is may depend on where the operands happen to lie.
        launched = {(l.name, l.device) for l in fake.launches() if l.smem_bytes}
        assert len({device for _, device in launched}) == 3
        assert len(attributes) == len(launched), (attributes, launched)
        assert len(fake.calls("cuLibraryGetKernel")) == len({l.name for l in fake.launches()})
        assert len(fake.calls("cuLibraryLoadData")) <= len(fake.calls("cuLibraryGetKernel"))
        assert len(fake.calls("cuInit")) == 1 and len(fake.calls("cuDevicePrimaryCtxRetain")) == 3
        assert len(fake.calls("cuDeviceGetName")) == 3
    """)


def test_what_a_warm_call_asks_of_the_driver(run_fake):
    """With `out=` and a framework's own operands: the context and the launch. No query, no attribute, no allocation."""
    run_fake("""
        kind = prod.exchange_type(stream=0x700)
        out = fake.Operand("float16", ref.packed((128, 128)))
        a, b = fake.pair(rng, "float16", 128, 128, 64)
        lib.fake_push(lib.fake_primary(0))
        operands = [x.exchanged(kind) for x in (a, b, out)]
        def call(kernel):
            fake.reset(execute=False)
            tcgemm.matmul(operands[0], operands[1], out=operands[2], kernel=kernel)
            # Descriptors are encoded by the driver's library, on the host alone.
            return [symbol for symbol in fake.symbols() if symbol != "cuTensorMapEncodeTiled"]
        for kernel in ("mma", None):
            call(kernel)
            assert call(kernel) == ["cuCtxGetCurrent", "cuLaunchKernelEx"], fake.symbols()
        lib.fake_pop()
        for kernel in ("mma", None):
            assert call(kernel) == ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"], fake.symbols()
    """)


def test_mixed_devices(run_fake):
    run_fake("""
        (a, b), (c, d) = fake.pair(rng), fake.pair(rng, device=1)
        out = fake.Operand("float16", ref.packed((33, 17)), device=1)
        host = np.ones((40, 17), np.float16)
        tcgemm.matmul(a.capsule(), b.capsule())
        fake.reset()
        for x in (a, b, c, d, out):
            x.declare()
        for call, words in (
            (lambda: tcgemm.matmul(a.capsule(), d.capsule()), ("cuda:0", "cuda:1", "b")), (lambda: tcgemm.matmul(c.capsule(), b.capsule()), ("cuda:0", "cuda:1", "b")),
            (lambda: tcgemm.matmul(a.interface(), d.interface()), ("cuda:0", "cuda:1")), (lambda: tcgemm.matmul(a.capsule(), b.capsule(), out=out.capsule()), ("cuda:0", "cuda:1", "out")),
            (lambda: tcgemm.matmul(a.capsule(), host), ("cuda:0", "host", "b")), (lambda: tcgemm.matmul(host.T, b.capsule()), ("cuda:0", "host")),
            (lambda: tcgemm.matmul(a.capsule(), b.capsule(), out=np.ones((33, 17), np.float16)), ("cuda:0", "host", "out")),
            (lambda: tcgemm.matmul(np.ones((33, 40), np.float16), host, out=out.capsule()), ("cuda:1", "host", "out")),
        ):
            try:
                call()
            except ValueError as error:
                assert all(word in str(error) for word in words), error
            else:
                raise SystemExit("no error")
        assert not fake.launches()
        for ordinal in (2, 63, 64, 1000, -1, 2**31 - 1):
            pair = a.capsule(device=(2, ordinal)), b.capsule(device=(2, ordinal))
            try:
                tcgemm.matmul(*pair)
            except ValueError as error:
                assert str(ordinal) in str(error), error
            else:
                raise SystemExit("no error")
        assert not fake.launches() and lib.fake_depth() == 0
        pair = None
        gc.collect()
        assert not prod._live and not prod.stray
    """)


def test_capabilities(run_fake):
    """Smaller tiles where shared memory is small (sglang#8513); a message that names what there is where nothing runs."""
    run_fake("""
        def run(cc, smem):
            fake.device(0, cc, smem, 80)
            fake.reset()
            families = tcgemm.devices()[0]["families"]
            assert cc >= 80 or not families
            for dtype in ref.DTYPES:
                rows = [row for row in tcgemm.kernels() if row["in_dtype"] == dtype]
                somewhere = any(row["family"] in families for row in rows)
                assert somewhere or not any(fake.runs(row, cc) for row in rows)
                for m, n, k in ((100, 130, 64), (1, 40, 100), (16, 64, 1024)):
                    a, b = fake.pair(rng, dtype, m, n, k)
                    try:
                        result = tcgemm.matmul(a.capsule(), b.capsule())
                    except RuntimeError as error:
                        assert not isinstance(error, tcgemm.CudaError), error
                        assert f"{cc // 10}.{cc % 10}" in str(error), error
                        assert not somewhere, error
                    else:
                        assert somewhere
                        fake.check(result, a, b)
                        assert all(l.smem_bytes <= smem for l in fake.launches())
        for cc, smem in ((75, 64 << 10), (80, 163 << 10), (86, 99 << 10), (89, 99 << 10), (90, 227 << 10), (90, 48 << 10), (100, 227 << 10), (103, 227 << 10), (110, 227 << 10), (120, 99 << 10), (121, 99 << 10)):
            fake.in_child(lambda: run(cc, smem))
    """)


# ---- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["mma", None])
def test_every_driver_call_fails_in_turn(run_fake, kernel):
    """Each call of a first call and of a warm one is made to fail: an exception with the driver's name and text, or
    none where the call may fail unseen; nothing leaked, nothing left pushed, the next call right."""
    run_fake(
        """
        kernel = sys.argv[1] if len(sys.argv) > 1 else None
        a, b = fake.pair(rng, "float16", 4, 8, 2048)
        odd = fake.operand(rng, "float16", ref.layout("stepped", (4, 2048), rng))
        assert not fake.calls()
        def product():
            left = odd.interface(stream=0x600)
            return tcgemm.matmul(left, b.object(), stream=0x800, kernel=kernel)
        # May fail without a word: asking whether something is over, giving memory back, restoring; and all that follows
        # the last launch, where the result is on its way.
        quiet = {"cuEventQuery", "cuMemFreeAsync", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode", "cuEventDestroy", "cuGetErrorName", "cuGetErrorString"}
        seen = []
        def dry(warm):
            def work():
                if warm:
                    product()
                fake.reset()
                [x.declare() for x in (a, b, odd)]
                result = product()
                lines = fake.symbols()
                kinds = {l.name.split("_")[1] for l in fake.launches()}
                assert "copy" in kinds and ("reduce" in kinds or not kernel), kinds
                open("calls", "w").write(" ".join(lines))
            fake.in_child(work)
            return open("calls").read().split()
        def attempt(symbol, nth, warm, launched):
            if warm:
                lib.fake_set_execute(1)
                fake.check(product(), odd, b)
                gc.collect()
                product()
            fake.reset()
            [x.declare() for x in (a, b, odd)]
            blocks, events = lib.fake_live_blocks(), lib.fake_live_events()
            fake.fail(symbol, 719, nth)
            raised = None
            try:
                result = product()
            except Exception as error:
                raised = error
            if raised is not None:
                assert isinstance(raised, RuntimeError), repr(raised)
                assert "CUDA_ERROR_LAUNCH_FAILED" in str(raised) and "unspecified launch failure" in str(raised), raised
                if symbol not in ("cuInit", "cuDeviceGetCount"):
                    assert isinstance(raised, tcgemm.CudaError) and raised.code == 719, repr(raised)
                raised = None
            else:
                called = fake.symbols().count(symbol) >= nth  # tensor maps of the same addresses are kept
                assert symbol in quiet or launched or not called, f"{symbol} number {nth} failed unseen"
                fake.check(result, odd, b)
                result = None
            gc.collect()
            if symbol != "cuCtxPopCurrent":
                assert lib.fake_depth() == 0
            while lib.fake_depth():
                lib.fake_pop()
            if symbol != "cuThreadExchangeStreamCaptureMode":
                assert lib.fake_capture_mode() == 0
            lib.fake_reset()
            [x.declare() for x in (a, b, odd)]
            if symbol in ("cuInit", "cuDeviceGetCount"):
                return
            for _ in range(3):
                fake.check(product(), odd, b)
            assert lib.fake_depth() == 0 and not prod.stray
            gc.collect()
            product()
            gc.collect()
            assert lib.fake_live_blocks() <= (1 if symbol == "cuMemFreeAsync" else 0), (symbol, nth, lib.fake_live_blocks())
            assert lib.fake_live_events() <= events + 4, (symbol, nth)
            assert len(prod._live) <= 1, (symbol, nth, len(prod._live))
        for warm in (False, True):
            lines = dry(warm)
            assert len(lines) > 10
            turn, last = {}, len(lines) - 1 - lines[::-1].index("cuLaunchKernelEx")
            for at, symbol in enumerate(lines):
                turn[symbol] = turn.get(symbol, 0) + 1
                if symbol in ("cuGetErrorName", "cuGetErrorString"):
                    continue
                try:
                    fake.in_child(lambda: attempt(symbol, turn[symbol], warm, at > last))
                except AssertionError as error:
                    raise SystemExit(f"warm={warm} {symbol} number {turn[symbol]}: {error}")
    """,
        timeout=300,
        args=[kernel] if kernel else [],
    )


def test_launch_error(run_fake):
    """A launch that did not happen is an error with its name (pytorch#91758), and the next one works."""
    run_fake("""
        a, b = fake.pair(rng)
        fake.reset()
        [x.declare() for x in (a, b)]
        out = fake.Operand("float16", ref.packed((33, 17)))
        for result, name in ((1, "CUDA_ERROR_INVALID_VALUE"), (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"), (999, "unknown error"), (400, "CUDA_ERROR_INVALID_HANDLE")):
            fake.fail("cuLaunchKernelEx", result)
            try:
                tcgemm.matmul(a.capsule(), b.capsule(), out=out.capsule())
            except tcgemm.CudaError as error:
                assert name in str(error) and error.code == result and "tcg_" in str(error), error
            else:
                raise SystemExit("no error")
            tcgemm.matmul(a.capsule(), b.capsule(), out=out.capsule())
            fake.check(out, a, b)
        assert lib.fake_live_blocks() == 0
    """)


def test_out_of_memory(run_fake):
    run_fake("""
        a, b = fake.pair(rng, "float32", 300, 300, 8)
        tiny = fake.pair(rng, "float32", 4, 4, 4)
        fake.reset()
        for x in (a, b, *tiny):
            x.declare()
        lib.fake_set_memory(1000)
        for _ in range(3):
            try:
                tcgemm.matmul(a.capsule(), b.capsule())
            except MemoryError as error:
                assert "360000 bytes" in str(error), error
            else:
                raise SystemExit("no error")
            gc.collect()
            assert lib.fake_live_blocks() == 0 and not prod._live and not prod.stray and lib.fake_depth() == 0
            fake.check(tcgemm.matmul(*(x.capsule() for x in tiny)), *tiny)
        # The result fits and the workspace does not.
        a, b = fake.pair(rng, "float16", 16, 64, 8192)
        lib.fake_set_memory(16 * 64 * 2 + 100)
        try:
            tcgemm.matmul(a.capsule(), b.capsule())
        except MemoryError:
            assert tcgemm.explain(a.capsule(), b.capsule())["workspace_bytes"] > 0
        gc.collect()
        assert lib.fake_live_blocks() == 0 and lib.fake_depth() == 0
    """)


def test_refusals_make_no_launch(run_fake):
    """Interfaces and capsules that make no sense; each deleter once."""
    run_fake("""
        fake.reset()
        a = fake.operand(rng, "float16", ref.packed((20, 20)))
        for entries, error in prod.BAD_INTERFACES:
            for order in (1, -1):
                pair = [a.interface(**entries), a.interface()][::order]
                try:
                    tcgemm.matmul(*pair)
                except error as found:
                    assert str(found)[:2] in (("a:", "a ") if order == 1 else ("b:", "a ")), (entries, found)
                else:
                    raise SystemExit(f"no error for {entries}")
        for whole in (None, 3, [], {}):
            odd = prod.CaiObject({})
            odd.interface = whole
            try:
                tcgemm.matmul(odd, a.interface())
            except (TypeError, ValueError):
                pass
            else:
                raise SystemExit(f"no error for {whole}")
        for fields in ({"ndim": -1}, {"ndim": 65}, {"shape": (-1, 20)}, {"shape": (2**62, 20)}, {"data": None}, {"strides": (2**62, 1)}, {"byte_offset": 2**63}, {"data": a.pointer + 1}):
            for versioned in (False, True):
                export = a.export(versioned=versioned, **fields)
                pair = export.capsule(), a.capsule()
                try:
                    tcgemm.matmul(*pair)
                except ValueError as error:
                    assert "a" in str(error)
                else:
                    raise SystemExit(f"no error for {fields}")
                gc.collect()
                assert export.deleted == 1
        assert not fake.launches() and not prod.stray and not prod._live
    """)


def test_interfaces(run_fake):
    run_fake("""
        fake.reset()
        a, b = fake.pair(rng, "float16", 20, 40, 30)
        column = fake.operand(rng, "float16", ref.layout("column", (20, 30), rng))
        for left in (a.interface(), a.interface(strides=...), a.interface(strides=None), column.interface(), a.interface(version=2, stream=...), a.interface(data=(a.pointer, True)),
                     a.interface(descr=[("", "<f2")]), a.interface(mask=None), a.interface(stream=1)):
            source = column if left.keep is column else a
            fake.check(tcgemm.matmul(left, b.interface()), source, b)
        for data in ((0, False), (None, False), (b.pointer, False)):
            empty = prod.CaiObject({"shape": (0, 30), "typestr": "<f2", "data": data, "version": 3})
            assert tcgemm.matmul(empty, b.interface()).shape == (0, 40)
        # bfloat16 has no code of its own: known by the array's dtype, refused without one, never taken for float16.
        x = fake.operand(rng, "bfloat16", ref.packed((16, 16)))
        try:
            tcgemm.matmul(x.interface(), x.interface())
        except TypeError as error:
            assert "V2" in str(error)
        else:
            raise SystemExit("no error")
        named = [x.interface(), x.interface()]
        for one in named:
            one.dtype = type("dtype", (), {"name": "bfloat16"})()
        fake.check(tcgemm.matmul(*named), x, x)
        out = fake.Operand("float16", ref.packed((20, 40)))
        target = out.interface()
        assert tcgemm.matmul(a.interface(), b.interface(), out=target) is target
        fake.check(out, a, b)
        try:
            tcgemm.matmul(a.interface(), b.interface(), out=out.interface(data=(out.pointer, True)))
        except ValueError as error:
            assert "out" in str(error) and "read-only" in str(error)
        else:
            raise SystemExit("no error")
    """)


# ---- captures and lifetimes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "warm"])
def test_capture(run_fake, warm):
    """Loading, allocating, waiting and letting go while a stream is captured in the strictest mode."""
    run_fake(f"""
        a, b = fake.pair(rng, "float16", 16, 64, 8192)
        kind = prod.exchange_type(stream=0x700)
        out = fake.Operand("float16", ref.packed((16, 64)))
        kept = []
        if {warm}:
            kept = [tcgemm.matmul(a.capsule(), b.capsule()) for _ in range(3)]
            kept.append(kept)
        fake.reset()
        [x.declare() for x in (a, b, out)]
        lib.fake_set_capturing(0x700, 1)
        tcgemm.matmul(a.exchanged(kind), b.exchanged(kind), out=out.exchanged(kind))
        fake.check(out, a, b)
        result = tcgemm.matmul(a.capsule(), b.capsule(), stream=0x700)
        fake.check(result, a, b)
        left = a.object()
        tcgemm.matmul(left, b.interface(stream=0x700), out=out.capsule(), stream=0x700)
        assert left.streams == [0x700]
        kept = None
        gc.collect()
        result = None
        assert lib.fake_broken_captures() == 0
        for line in fake.calls():
            assert line.split()[0] not in ("cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyDtoH", "cuMemcpyHtoD"), line
        frees = [line for line in fake.calls("cuMemFreeAsync") if "stream=0x700" not in line]
        assert not frees, frees  # memory of other streams stays until the capture is over
        lib.fake_set_capturing(0x700, 0)
        for _ in range(2):
            fake.check(tcgemm.matmul(a.capsule(), b.capsule()), a, b)
        gc.collect()
        assert lib.fake_live_blocks() > 0  # the graph's workspaces
        lib.fake_destroy_graph()
        fake.check(tcgemm.matmul(a.capsule(), b.capsule()), a, b)
        gc.collect()
        assert lib.fake_broken_captures() == 0 and lib.fake_live_blocks() == 0
    """)


def test_operands_are_held_until_the_stream_has_read_them(run_fake):
    run_fake("""
        fake.reset()
        a, b = fake.pair(rng)
        make = {"capsule": lambda x: x.export(), "versioned": lambda x: x.export(versioned=True)}
        for stream in (0x700, 1, 2):
            for kind in make:
                lib.fake_set_busy(stream, 1)
                exports = [make[kind](x) for x in (a, b)]
                result = tcgemm.matmul(*(x.capsule() for x in exports), stream=stream)
                for _ in range(3):
                    tcgemm.matmul(a.capsule(), b.capsule(), stream=0x900)
                assert [x.deleted for x in exports] == [0, 0]
                lib.fake_set_busy(stream, 0)
                tcgemm.matmul(a.capsule(), b.capsule(), stream=0x900)
                assert [x.deleted for x in exports] == [1, 1]
                del result
        # An interface's object, too.
        import weakref
        class Owner:
            pass
        lib.fake_set_busy(0x700, 1)
        left = a.interface()
        left.owner = Owner()
        alive = weakref.ref(left.owner)
        tcgemm.matmul(left, b.interface(), stream=0x700)
        del left
        gc.collect()
        assert alive() is not None
        lib.fake_set_busy(0x700, 0)
        tcgemm.matmul(a.capsule(), b.capsule())
        gc.collect()
        assert alive() is None
        assert lib.fake_live_events() < 20
    """)


def test_memory_outlives_its_stream(run_fake):
    """A stream that was destroyed before the array it worked on."""
    run_fake("""
        a, b = fake.pair(rng)
        result = tcgemm.matmul(a.capsule(), b.capsule(), stream=0x700)
        lib.fake_set_dead(0x700, 1)
        del result
        for _ in range(3):
            tcgemm.matmul(a.capsule(), b.capsule())
        gc.collect()
        tcgemm.matmul(a.capsule(), b.capsule())
        assert lib.fake_live_blocks() == 0 and lib.fake_depth() == 0
    """)


def test_exports_share_the_memory(run_fake):
    run_fake("""
        fake.reset()
        a, b = fake.pair(rng)
        result = tcgemm.matmul(a.capsule(), b.capsule())
        capsules = [result.__dlpack__(), result.__dlpack__(max_version=(1, 0)), result.__dlpack__(stream=2)]
        assert [prod.capsule_name(c) for c in capsules] == ["dltensor", "dltensor_versioned", "dltensor"]
        again = tcgemm.matmul(capsules[0], fake.operand(rng, "float16", ref.packed((17, 5))).capsule())
        del result
        gc.collect()
        assert lib.fake_live_blocks() == 2
        capsules.clear()
        tcgemm.matmul(a.capsule(), b.capsule())
        gc.collect()
        assert lib.fake_live_blocks() == 1
        del again
        assert lib.fake_live_blocks() == 0
    """)


def test_soak(run_fake):
    """20,000 calls: nothing on the device, no event, no memory of the process, no reference more than before."""
    run_fake("""
        import os
        from test_leaks import WARM, resident_bytes
        a, b = fake.pair(rng)
        kind = prod.exchange_type(stream=0x700)
        odd = fake.operand(rng, "float16", ref.layout("stepped", (33, 40), rng))
        bad = fake.operand(rng, "float16", ref.packed((39, 17)))
        ready = a.exchanged(kind), b.exchanged(kind)
        def some(times):
            for i in range(times):
                tcgemm.matmul(a.capsule(), b.capsule(versioned=True))
                tcgemm.matmul(odd.interface(), b.interface(), stream=0x800)
                for other in (bad.capsule(), None, bad.interface(stream=0)):
                    try:
                        tcgemm.matmul(a.capsule(), other)
                    except (TypeError, ValueError):
                        pass
                if i % 50 == 0:
                    lib.fake_reset()
                    [x.declare() for x in (a, b, odd, bad)]
            gc.collect()
        some(WARM)
        resident, events, counts = resident_bytes(), lib.fake_live_events(), [sys.getrefcount(x) for x in (a, b, kind, odd)]
        some(4000)
        tcgemm.matmul(a.capsule(), b.capsule())
        assert lib.fake_live_blocks() <= 1 and lib.fake_live_events() <= events + 2
        assert [sys.getrefcount(x) for x in (a, b, kind, odd)] == counts
        if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # whose quarantine looks like a leak
            assert resident_bytes() - resident < 2**21, resident_bytes() - resident
        assert not prod.stray
    """)


# ---- processes and threads -------------------------------------------------------------------------------------------------


def test_fork(run_fake):
    run_fake("""
        a, b = fake.pair(rng)
        def fine():
            fake.reset()
            [x.declare() for x in (a, b)]
            fake.check(tcgemm.matmul(a.capsule(), b.capsule()), a, b)
        fake.in_child(fine)
        result = tcgemm.matmul(a.capsule(), b.capsule())
        def told():
            global result
            for _ in range(2):
                try:
                    tcgemm.matmul(a.capsule(), b.capsule())
                except RuntimeError as error:
                    assert "fork" in str(error), error
                else:
                    raise AssertionError("no error")
            before = fake.calls()
            result = None
            gc.collect()
            assert fake.calls() == before  # a child frees nothing of its parent's
            x = np.ones((4, 4), np.float32)
            assert (tcgemm.matmul(x, x) == 4).all()
        fake.in_child(told)
        fine()
    """)


@pytest.mark.parametrize("repeat", range(10))
def test_first_calls_together(run_fake, repeat):
    """16 threads: one opens the driver, one loads each kernel, all are right (numba#7387)."""
    run_fake("""
        from test_threads import in_threads
        sys.setswitchinterval(1e-5)
        cases = [fake.pair(rng, ref.DTYPES[i % 3], 10 + i, 20 + i, 30 + 5 * i, device=i % 2) for i in range(16)]
        lib.fake_set_execute(1)
        def work(i):
            for _ in range(5):
                result = tcgemm.matmul(*(x.capsule() for x in cases[i]), stream=0x700 + i)
                fake.check(result, *cases[i])
                del result
            assert lib.fake_depth() == 0 and lib.fake_capture_mode() == 0
        in_threads(16, work)
        assert len(fake.calls("cuInit")) == 1 and len(fake.calls("cuDevicePrimaryCtxRetain")) == 2
        loads = fake.calls("cuLibraryGetKernel")
        assert len(set(loads)) == len(loads)
        attributes = fake.calls("cuKernelSetAttribute")
        assert len(set(attributes)) == len(attributes)
        gc.collect()
        tcgemm.matmul(*(x.capsule() for x in cases[0]))
        gc.collect()
        tcgemm.matmul(*(x.capsule() for x in cases[0]))
        gc.collect()
        assert lib.fake_live_blocks() == 0 and not prod.stray
    """)


EXITS = {
    "globals": "kept = [make(), make()]",
    "a capsule": "kept = make().__dlpack__()",
    "a cycle": "kept = [make()]; kept.append(kept); tcgemm.kept = kept",
    "a busy stream": "lib.fake_set_busy(1, 1); kept = make()",
    "a daemon thread": "import threading, time\ndef loop():\n    while True:\n        make()\nthreading.Thread(target=loop, daemon=True).start()\ntime.sleep(0.2)",
    "an exit function": "import atexit; atexit.register(make)",
}


@pytest.mark.parametrize("name", EXITS)
def test_exit(run_fake, name):
    run_fake("a, b = fake.pair(rng)\nmake = lambda: tcgemm.matmul(a.capsule(), b.capsule())\nmake()\n" + EXITS[name])


def test_a_result_dropped_without_the_interpreters_lock(run_fake):
    """A consumer may call the deleter in any thread, holding no lock (numpy#22507)."""
    run_fake("""
        a, b = fake.pair(rng)
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
        libc = ctypes.CDLL(None)
        libc.pthread_create.argtypes, libc.pthread_join.argtypes = [ctypes.c_void_p] * 4, [ctypes.c_ulong, ctypes.c_void_p]
        used = b"used_dltensor"
        for _ in range(20):
            capsule = tcgemm.matmul(a.capsule(), b.capsule()).__dlpack__()
            managed = api.PyCapsule_GetPointer(capsule, b"dltensor")
            api.PyCapsule_SetName(capsule, used)
            thread = ctypes.c_ulong()
            deleter = prod.DLManagedTensor.from_address(managed).deleter
            assert libc.pthread_create(ctypes.byref(thread), None, deleter, managed) == 0
            assert libc.pthread_join(thread, None) == 0
            del capsule
        assert lib.fake_live_blocks() == 0
    """)


@pytest.mark.parametrize("right", [True, False])
def test_the_module_on_a_fake_device(run_python, fake_library, right):
    """python -m tcgemm finds the device, runs, and checks its own product: wrong numbers are told and end in exit code 1."""
    out = run_python(
        f"""
        import runpy, sys
        import fakedriver as fake
        fake.library().fake_set_execute({int(right)})
        sys.argv = ["tcgemm", "--size", "70x50x60"]
        runpy.run_module("tcgemm", run_name="__main__", alter_sys=True)
    """,
        env={"TCGEMM_LIBCUDA": str(fake_library)},
        code=0 if right else 1,
    )
    assert "Fake H200" in out and ("MISMATCH" in out) != right


@pytest.mark.parametrize(
    "cc, version, expected",
    [(90, 13000, True), (90, 12030, True), (90, 12020, False), (80, 13000, False), (120, 13000, False)],
)
def test_launches_overlap_on_hopper_alone(run_fake, cc, version, expected):
    """Programmatic dependent launch: for kernels that wait by themselves, on the device and drivers where it is proven."""
    run_fake(f"""
        import re
        lib.fake_set_version({version})
        fake.device(0, {cc}, (227 if {cc} == 90 else 99) << 10, 132)
        for dtype, k in (("float16", 64), ("float16", 1023), ("bfloat16", 1 << 16), ("float32", 64)):
            tcgemm.matmul(*(x.capsule() for x in fake.pair(rng, dtype, 64, 64, k)))
        launches = fake.launches()
        assert any("copy" in l.name for l in launches) or {cc} != 90
        for launch in launches:
            cluster = re.search(r"_c(\\d)x(\\d)x(\\d)", launch.name)
            clustered = bool(cluster and cluster.group(0) != "_c1x1x1")
            waits = bool(re.search(r"_(mma_sm80|mma_shift_sm80|wgmma_sm90|copy|reduce)", launch.name)) and "naive" not in launch.name
            assert launch.attributes == clustered + (waits and {expected}), (launch.name, launch.attributes)
    """)


# ---- frameworks, stood in for by modules of their names ----------------------------------------------------------------

# A manager that says when it is entered and left, and what is current in between.
MANAGER = """
        import types

        class Device:
            def __init__(self, ordinal):
                self.ordinal = ordinal

            def __enter__(self):
                global current
                if broken:
                    raise LookupError("no such device")
                self.before, current = current, self.ordinal
                scopes.append(("in", self.ordinal))

            def __exit__(self, *error):
                global current
                current = self.before
                scopes.append(("out", self.ordinal))

        current, scopes, broken = 0, [], False
        fake.reset()
"""


def test_how_torch_allocates(run_fake):
    """By _empty_strided_cuda what its small blocks hold, on the current device, while no mode is on; else by new_empty."""
    run_fake(
        MANAGER
        + """
        kind = prod.exchange_type(stream=0x500)
        kind.__module__, kind.__name__ = "torch", "Tensor"
        kind.requires_grad, kind.is_neg = False, lambda self: False
        made, modes = [], {"dispatch": 0, "function": False}

        def allocate(way, size, dtype, strides=None):
            assert strides is None or strides == ref.packed(size).strides
            made.append((way, dtype, size))
            if dtype == "uint8":
                buffer = fake.Operand("float16", ref.packed([size[0] // 2 + 128]))
                result = kind(lambda versioned: buffer.export(versioned=versioned, data=buffer.pointer + -buffer.pointer % 256))
            else:
                buffer = fake.Operand(dtype, ref.packed(size))
                result = buffer.exchanged(kind)
            result.buffer = buffer
            return result

        kind.new_empty = lambda self, size, dtype: allocate("new_empty", size, dtype)
        torch = sys.modules["torch"] = types.ModuleType("torch")
        torch.Tensor, torch.float16, torch.float32, torch.uint8 = kind, "float16", "float32", "uint8"
        guards = types.SimpleNamespace(_empty_strided_cuda=lambda size, strides, dtype: allocate("at once", size, dtype, strides))
        torch._C = types.SimpleNamespace(
            _dynamo=types.SimpleNamespace(guards=guards),
            _cuda_getDevice=lambda: current,
            _len_torch_dispatch_stack=lambda: modes["dispatch"],
            _is_torch_function_mode_enabled=lambda: modes["function"],
        )

        def ways(m, n, k, out_dtype="float16", layout="row"):
            a, b = (fake.operand(rng, "float16", ref.layout(layout, shape, rng)) for shape in ((m, k), (k, n)))
            made.clear()
            result = tcgemm.matmul(a.exchanged(kind), b.exchanged(kind), out_dtype=out_dtype)
            assert made[0][1:] == (out_dtype, (m, n))
            fake.check(result.buffer, a, b, out_dtype)
            return [way for way, dtype, size in made], made[-1][2] if made[1:] else None

        for m, n, out_dtype, way in (
            (3, 8, "float16", "at once"),
            (512, 1024, "float16", "at once"),
            (513, 1024, "float16", "new_empty"),
            (256, 1024, "float32", "at once"),
            (257, 1024, "float32", "new_empty"),
        ):
            assert ways(m, n, 8, out_dtype) == ([way], None), made
        # Workspaces, here for copies, by their own size.
        assert ways(16, 8, 100, layout="stepped")[0] == ["at once"] * 2, made
        found, (size,) = ways(16, 1024, 1024, layout="stepped")
        assert found == ["at once", "new_empty"] and size > 1 << 20, made
        for name in modes:
            modes[name] = 1
            assert ways(3, 8, 8) == (["new_empty"], None)
            modes[name] = None
            with pytest.raises(TypeError):
                ways(3, 8, 8)
            modes[name] = 0
        current = 1
        assert ways(3, 8, 8) == (["new_empty"], None)
        current = 0
        assert ways(3, 8, 8) == (["at once"], None)
        current = None
        with pytest.raises(TypeError):
            ways(3, 8, 8)
    """
    )


def test_torch_without_the_exchange_api_exports_on_the_tensors_device(run_fake):
    run_fake(
        MANAGER
        + """
        class Tensor:
            requires_grad = False
            is_neg = lambda self: False
            detach = lambda self: self
            data_ptr = lambda self: self.operand.pointer
            __dlpack_device__ = lambda self: (prod.CUDA, 0)
            new_empty = lambda self, size, dtype: Tensor(fake.Operand(dtype, ref.packed(size)))

            def __init__(self, operand):
                self.operand, self.capsules = operand, []

            def __dlpack__(self, stream=None, max_version=None):
                scopes.append(("export", current))
                self.capsules.append(self.operand.capsule())
                return self.capsules[-1]

        Tensor.__module__ = "torch"
        torch = sys.modules["torch"] = types.ModuleType("torch")
        torch.Tensor, torch.float16 = Tensor, "float16"
        torch._C = types.SimpleNamespace(_cuda_getDevice=lambda: current, _cuda_getCurrentRawStream=lambda device: 0x500)
        sys.modules["torch.cuda"] = types.ModuleType("torch.cuda")
        sys.modules["torch.cuda"].device = Device
        a, b = fake.pair(rng, n=24)  # aligned: nothing is copied
        for current in (0, 1):
            scopes.clear()
            fake.check(tcgemm.matmul(Tensor(a), Tensor(b)).operand, a, b)
            assert scopes == [[("export", 0)], [("in", 0), ("export", 0), ("out", 0)]][current] * 2, scopes
            assert current == (scopes[0][0] == "in")
        broken = True
        with pytest.raises(LookupError, match="no such device"):
            tcgemm.matmul(Tensor(a), Tensor(b))
        assert current == 1
    """
    )


def test_cupy_without_functions_for_others(run_fake):
    """Its current device and stream by Python, and arrays by their constructor."""
    run_fake(
        MANAGER
        + """
        class ndarray:
            __cuda_array_interface__ = property(lambda self: 1 / 0)
            _c_contiguous = True

            def __init__(self, size, dtype, operand=None):
                where.append(current)
                self.operand = operand or fake.Operand(str(np.dtype(dtype)), ref.packed(size))
                self.shape, self.dtype = tuple(size), np.dtype(dtype)
                self.data = types.SimpleNamespace(ptr=self.operand.pointer, device_id=self.operand.device)

        ndarray.__module__ = "cupy"
        where = []
        for name in ("cupy", "cupy.cuda"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["cupy"].ndarray = ndarray
        cuda = sys.modules["cupy.cuda"]
        cuda.runtime, cuda.Device = types.SimpleNamespace(getDevice=lambda: current), Device
        cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0x600)
        a, b = fake.pair(rng, n=24)  # aligned: nothing is copied
        x, y = (ndarray(o.where.shape, "float16", o) for o in (a, b))
        for current in (0, 1):
            scopes.clear(), where.clear(), fake.reset()
            a.declare(), b.declare()
            fake.check(tcgemm.matmul(x, y).operand, a, b)
            assert where == [0] and scopes == [[], [("in", 0), ("out", 0)]][current], (where, scopes)
            assert {launch.stream for launch in fake.launches()} == {0x600}
        broken = True
        with pytest.raises(LookupError, match="no such device"):
            tcgemm.matmul(x, y)
        broken, current = False, None
        with pytest.raises(TypeError):
            tcgemm.matmul(x, y)
    """
    )
