"""The kernels as built: every image for each of its targets, without spills, made of the instructions that its
family is named for. And the part of the build that decides this."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tcgemm
from tcgemm import _core

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from buildtools import images, toolkit  # noqa: E402

TABLE = images.read_table(ROOT / "kernels" / "table.def")
LARGEST_EXTENSION_BYTES = 15 << 20


@pytest.fixture(scope="module")
def report():
    return json.loads(Path(_core.__file__).with_name(images.REPORT).read_text())


@pytest.fixture(scope="module")
def cuobjdump(tmp_path_factory):
    """cuobjdump, with the nvdisasm that it runs on its PATH: the toolkit's, or the wheels' of the test extra."""

    def lines(*arguments):
        """Its output, line by line: a disassembly is too long to hold."""
        tool = shutil.which("cuobjdump")
        environment = {}
        for entry in sys.path if tool is None else []:
            folder = Path(entry, "nvidia", "cu13", "bin")
            if (folder / "cuobjdump").is_file() and (folder / "nvdisasm").is_file():
                tool, environment = str(folder / "cuobjdump"), {"PATH": f"{folder}:/usr/bin:/bin"}
        if tool is None:
            pytest.skip("cuobjdump is not installed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        command = [tool, *arguments, _core.__file__]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment or None) as process:
            yield from process.stdout
        assert process.returncode == 0, command

    return lines


# ---- what was built ------------------------------------------------------------------------------------------


def test_every_image_has_its_targets(report):
    assert {name: list(targets) for name, targets in report["images"].items()} == images.select(
        TABLE, report["archs"]
    )


def test_the_extension_holds_every_image(report, cuobjdump):
    expected = {"ELF": [], "PTX": []}
    for targets in report["images"].values():
        for target in targets:
            expected["PTX" if target.endswith("+ptx") else "ELF"].append(target.removesuffix("+ptx"))
    found = {"ELF": [], "PTX": []}
    for line in cuobjdump("-lelf", "-lptx"):
        if entry := re.match(r"(ELF|PTX) file +\d+: .*\.sm_(\w+)\.(?:cubin|ptx)$", line.strip()):
            found[entry[1]].append(entry[2])
    assert found == expected


def test_every_row_of_the_table_is_in_its_images(report):
    rows = [kernel["name"] for kernel in tcgemm.kernels()]
    for image in TABLE:
        family = re.sub(r"_(ptx_)?(f16|bf16|f32)$", "", image.name)
        expected = {name for name in rows if re.match(rf"tcg_{family}_sm\d+a?_{image.dtype}_", name)}
        for target, built in report["images"][image.name].items():
            assert built["kernels"], (image.name, target)
            if family == "util":
                assert all(name.startswith("tcg_") for name in built["kernels"])
            elif "_ptx_" in image.name:
                assert set(built["kernels"]) < expected, target
            else:
                assert set(built["kernels"]) == expected, target


def test_no_kernel_spills_or_uses_local_memory(report):
    for name, targets in report["images"].items():
        for target, built in targets.items():
            if target.endswith("+ptx"):
                continue
            for kernel, resources in built["kernels"].items():
                assert resources["spill_store_bytes"] == resources["spill_load_bytes"] == 0, (kernel, target)
                assert resources["stack_bytes"] == 0, (kernel, target)
                assert 0 < resources["registers"] <= 255, (kernel, target)
            assert built["warnings"] == [], (name, target)


def test_the_machine_code_holds_the_instructions_of_its_family(report, cuobjdump):
    wanted = {
        "simt": {"FFMA"},
        "wmma_naive": {"HMMA", "LDG"},
        "wmma": {"HMMA", "LDSM", "LDGSTS"},
        "mma_naive": {"HMMA", "LDSM", "LDG"},
        "mma": {"HMMA", "LDSM", "LDGSTS"},
        "mma_shift": {"HMMA", "LDSM", "LDGSTS"},
        "tma_mma": {"HMMA", "LDSM", "UTMALDG", "SYNCS"},
        "wgmma": {"HGMMA", "UTMALDG", "SYNCS"},
    }
    watched = set().union(*wanted.values(), {"LDL", "STL"})
    rows = {row["name"]: row for row in tcgemm.kernels()}
    kernel, arch, found = None, None, {}
    for line in cuobjdump("-sass"):
        if entry := re.match(r"\s*Function : (\w+)", line):
            kernel = entry[1]
            found[kernel, arch] = set()
        elif entry := re.match(r"arch = sm_(\w+)", line):
            arch = entry[1]
        elif entry := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9]+)[. ]", line):
            found[kernel, arch].update({entry[1]} & watched)
    built = {
        (kernel, target)
        for targets in report["images"].values()
        for target, content in targets.items()
        if not target.endswith("+ptx")
        for kernel in content["kernels"]
    }
    assert set(found) == built
    for (kernel, arch), instructions in found.items():
        assert not instructions & {"LDL", "STL"}, (kernel, arch)
        family = re.match(r"tcg_(\w+?)(_sm\d+a?_|$)", kernel)[1]
        # A block that needs more shared memory than the chip has is empty there.
        if arch != "120" or rows.get(kernel, {"smem_bytes": 0})["smem_bytes"] <= 101376:
            assert wanted.get(family, set()) <= instructions, (kernel, arch)


def test_the_extension_is_small():
    assert Path(_core.__file__).stat().st_size <= LARGEST_EXTENSION_BYTES


# ---- how it is decided -----------------------------------------------------------------------------------------


def chosen(wanted):
    table = [
        images.Image("mma_f16", "mma.cu", "f16", ("80", "90", "120")),
        images.Image("mma_ptx_f16", "mma.cu", "f16", ("80+ptx",)),
        images.Image("wgmma_f16", "wgmma.cu", "f16", ("90a",)),
    ]
    return list(images.select(table, wanted).values())


def test_archs_narrow_the_targets():
    everything = [["80", "90", "120"], ["80+ptx"], ["90a"]]
    assert chosen(None) == chosen("") == chosen(" ") == everything
    assert chosen("80") == [["80"], [], []]
    assert chosen("90") == [["90"], [], ["90a"]]
    assert chosen("90a") == [[], [], ["90a"]]
    assert chosen("80+ptx;120") == [["120"], ["80+ptx"], []]
    assert chosen("80;90,80+ptx 120;") == everything
    for wrong in ("86", "9", "sm_90", "90;100"):
        with pytest.raises(toolkit.BuildError, match="TCGEMM_CUDA_ARCHS: expected some of"):
            chosen(wrong)


def test_a_unit_depends_on_what_it_includes(tmp_path):
    (tmp_path / "ptx").mkdir()
    (tmp_path / "ptx" / "cp.cuh").write_text('#include "../abi.h"\n')
    (tmp_path / "abi.h").write_text("")
    (tmp_path / "mma.cu").write_text(
        '#include <a.h>\n#include "ptx/cp.cuh"\n#define TCG_MMA(x)\n#include "table.def"\n'
    )
    (tmp_path / "table.def").write_text("/* note */\nTCG_MMA(1)\nTCG_SIMT(2)\n")
    closure = images._closure(tmp_path, "mma.cu")
    assert set(closure) == {"mma.cu", "ptx/cp.cuh", "abi.h", "table.def"}
    assert closure["table.def"] == "TCG_MMA(1)"  # rows of other families and comments do not count
    with pytest.raises(toolkit.BuildError, match="names the image source 'simt.cu'"):
        images._closure(tmp_path, "simt.cu")


def test_the_compilers_report_is_read():
    log = """
ptxas info    : Compiling entry function 'tcg_a' for 'sm_90'
ptxas info    : Function properties for tcg_a
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for helper
    32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compiling entry function 'tcg_b' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
    spilt = {
        "stack_bytes": 48,
        "spill_store_bytes": 8,
        "spill_load_bytes": 4,
        "registers": 255,
        "static_smem_bytes": 1024,
    }
    clean = {"stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0, "registers": 40, "static_smem_bytes": 0}
    assert images._resources(log) == {"tcg_a": spilt, "tcg_b": clean}


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    """A toolkit whose nvcc only tells a version."""
    for name in ("CUDA_HOME", "TCGEMM_IGNORE_SYSTEM_CUDA", "NVCC_CCBIN", "CXX"):
        monkeypatch.delenv(name, raising=False)

    def make(version):
        home = tmp_path / version
        (home / "bin").mkdir(parents=True)
        for tool in ("nvcc", "fatbinary"):
            (home / "bin" / tool).write_text(f'#!/bin/sh\necho "Cuda compilation tools, release x, V{version}"\n')
            (home / "bin" / tool).chmod(0o755)
        return home

    return make


def test_the_toolkit_is_found_or_the_error_says_what_to_do(fake_nvcc, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc("13.1.80")))
    assert toolkit.find().version == "13.1.80"
    assert toolkit.requirements() == []
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(toolkit.BuildError, match=r"no-such-compiler not found.*apt-get install g\+\+"):
        toolkit.find()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc("12.4.131")))
    with pytest.raises(toolkit.BuildError, match=r"expected CUDA 13.0 or newer, found 12.4.131"):
        toolkit.find()
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(toolkit.BuildError, match=r"CUDA_HOME=/nowhere: .*found no bin/nvcc"):
        toolkit.requirements()
    monkeypatch.setenv("TCGEMM_IGNORE_SYSTEM_CUDA", "1")
    assert toolkit.requirements() == toolkit.WHEELS
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(toolkit.BuildError, match="found none.\nInstall one and set CUDA_HOME to it, or take"):
        toolkit.find()
