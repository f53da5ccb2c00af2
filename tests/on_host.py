"""The kernels' own text, made ready for a C++ compiler and run on the CPU by a host_*.h."""

import ctypes
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "kernels"
CXX = next((tool for tool in ("c++", "g++", "clang++") if shutil.which(tool)), None)
needs_cxx = pytest.mark.skipif(CXX is None, reason="no C++ compiler")


def copy_kernels(folder, source, instead, edits=()):
    """A kernel file and all headers. instead: what functions of kernels/ptx do in place of their inline PTX. edits:
    (pattern, replacement) on every file, each of which has to be found somewhere."""
    missing = set(edits)
    for file in [*KERNELS.glob("*.cuh"), *KERNELS.glob("ptx/*.cuh"), KERNELS / "abi.h", KERNELS / source]:
        text = file.read_text()
        for edit in edits:
            text, count = re.subn(*edit, text)
            if count:
                missing.discard(edit)
        copy = folder / file.relative_to(KERNELS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(_without_ptx(text, instead if file.parent.name == "ptx" else {}))
    assert not missing


def _without_ptx(text, instead):
    text = re.sub(r"\basm( volatile)?\(", "TCG_ASM(", text)
    text = re.sub(r"extern __shared__ [^;]*?(\w+)\[\];", r"char *const \1 = host_smem;", text)
    for function, body in instead.items():
        backslash = r"(?:[^{};]|\\\n)*?" if "##" in function else "[^{};]*"
        text = re.sub(rf"(\b{re.escape(function)}\({backslash}\{{)", lambda m, body=body: f"{m[1]} {body}", text)
    return text


def copy_rows(folder, wanted):
    """kernels/table.def, but of its rows only those that match."""
    table = (KERNELS / "table.def").read_text().splitlines(keepends=True)
    is_row = re.compile(r"TCG_\w+\((f16|bf16|f32), ")
    (folder / "table.def").write_text(
        "".join(line for line in table if not is_row.match(line) or re.match(wanted, line))
    )


def build(folder, header, flags):
    """The library that the header makes of what was copied."""
    (folder / "host.cc").write_text(f'#include "{header}"\n')
    command = f"{CXX} -std=c++17 {flags} -w -shared -fPIC -I. -I{shlex.quote(str(TESTS))} -o host.so host.cc"
    built = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(folder / "host.so"))


def build_family(folder, header, flags, source, instead, rows, row, edits):
    """The library, and its rows as `row`, a ctypes struct, for a header that runs the rows of one family."""
    copy_kernels(folder, source, instead, edits)
    copy_rows(folder, rows)
    library = build(folder, header, f"{flags} -DTCG_IN_bf16 '-DTCG_SOURCE=\"{source}\"'")
    library.row_at.restype = ctypes.POINTER(row)
    return library, [library.row_at(index).contents for index in range(library.row_count())]


def row_struct(*numbers):
    """What a host_*.h says of a row: its name, its kernel, and these."""
    fields = [("name", ctypes.c_char_p), ("kernel", ctypes.c_void_p)]
    return type("Row", (ctypes.Structure,), {"_fields_": fields + [(number, ctypes.c_int) for number in numbers]})


def each_once(make, tmp_path_factory):
    """get(family, *edits) -> make(family, folder, edits), made at first use."""
    made = {}

    def get(family, *edits):
        if (family, edits) not in made:
            made[family, edits] = make(family, tmp_path_factory.mktemp(family), edits)
        return made[family, edits]

    return get
