"""Markers (`gpu`: skipped with the reason where there is no device; `slow`: run by --slow), fixtures, and the watchdog that
turns a hang into a traceback."""

import faulthandler
import functools
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parent
HANG_SECONDS = 240


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the long soaks too")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device and a torch that sees it")
    config.addinivalue_line("markers", "gpus2: needs two CUDA devices")
    config.addinivalue_line("markers", "slow: a long soak, run by --slow")
    # A copy of the terminal's stderr, which pytest's capture has not replaced yet.
    config.watchdog_file = os.fdopen(os.dup(2), "w")


def pytest_unconfigure(config):
    faulthandler.cancel_dump_traceback_later()
    config.watchdog_file.close()


@functools.cache
def no_gpu_reason(devices=1):
    try:
        import torch
    except ImportError as error:
        return f"torch is missing: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if torch.cuda.device_count() < devices:
        return f"needs {devices} CUDA devices, there is {torch.cuda.device_count()}"
    return None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="a long soak: --slow runs it"))
        if "gpus2" in item.keywords:
            item.add_marker(pytest.mark.gpu)
        if "gpu" in item.keywords and (reason := no_gpu_reason(2 if "gpus2" in item.keywords else 1)):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def first_device(request):
    """GPU tests begin on device 0: what another test or framework left current is not theirs."""
    if "gpu" in request.keywords and not no_gpu_reason():
        import torch

        torch.cuda.set_device(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    faulthandler.dump_traceback_later(
        HANG_SECONDS * (10 if "slow" in item.keywords else 1), exit=True, file=item.config.watchdog_file
    )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def rng(request):
    """A generator seeded by the test's name, so that a failure repeats and no two tests draw alike."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def run_python(tmp_path):
    """Runs Python code in a fresh process away from the source tree (where a bare `tcgemm` directory would be imported),
    with tests/ importable. It must exit with `code` and, unless told otherwise, write nothing to stderr."""

    def run(source, *, env=None, timeout=120, code=0, quiet=True, args=()):
        script = tmp_path / "script.py"
        script.write_text(f"import sys; sys.path.insert(0, {str(TESTS)!r})\n" + textwrap.dedent(source))
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", str(script), *map(str, args)],
            cwd=tmp_path,
            timeout=timeout,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
        )
        report = f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        assert done.returncode == code, report
        if quiet:
            assert done.stderr == "", report
        return done.stdout

    return run


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory):
    import fakedriver

    return fakedriver.build(tmp_path_factory.mktemp("fakecuda"))


@pytest.fixture
def run_fake(run_python, fake_library):
    """run_python with the fake driver, and what such scripts begin with."""

    def run(source, **keywords):
        prelude = """
            import ctypes, gc, sys
            import pytest
            import numpy as np
            import fakedriver as fake, producers as prod, reference as ref
            import tcgemm
            rng = np.random.default_rng(1)
            lib = fake.library()
        """
        env = {**keywords.pop("env", {}), "TCGEMM_LIBCUDA": str(fake_library)}
        return run_python(textwrap.dedent(prelude) + textwrap.dedent(source), env=env, **keywords)

    return run


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def refused(error, *words, call):
    """The call raises exactly this kind of error, and its message holds every word."""
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert str(word) in str(caught.value), f"{str(word)!r} is not in: {caught.value}"
    return caught.value
