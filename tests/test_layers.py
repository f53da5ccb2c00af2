"""Who may include, import, export and spell what: the layers of the project, read off its files and its extension."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tcgemm
from tcgemm import _core

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tcgemm"
KERNELS, CUDA, PYTHON = ROOT / "kernels", ROOT / "csrc" / "cuda", ROOT / "csrc" / "python"
DEVICE_FILES = sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".def"))
PYTHON_HEADERS = {"Python.h", "structmember.h"}
CUDA_HEADERS = {"cuda.h", "cudaTypedefs.h", "cuda_runtime.h", "cuda_runtime_api.h", "driver_types.h"}


def code(path):
    """The file without comments and string literals, except that #include lines keep their names."""
    text = re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(
        r"^(?!\s*#\s*include)(.*)$", lambda line: re.sub(r'"(?:\\.|[^"\\])*"', '""', line[0]), text, flags=re.M
    )


def includes(path, seen=None):
    """Every header that the file includes, with those of the project's own headers."""
    seen = set() if seen is None else seen
    names = set()
    for name in re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', code(path), flags=re.M):
        own = (path.parent / name).resolve()
        names.add(name)
        if own.is_file() and own not in seen:
            seen.add(own)
            names |= includes(own, seen)
    return names


def sources(folder):
    found = sorted(path for path in folder.rglob("*") if path.suffix in (".c", ".h"))
    assert found, f"no C files in {folder}"
    return found


def test_csrc_cuda_knows_no_python():
    for path in sources(CUDA):
        assert not includes(path) & PYTHON_HEADERS, path
        assert not re.search(r"\bPy[A-Z]\w*", code(path)), path
        assert not any("python/" in name for name in includes(path)), path


def test_csrc_python_knows_no_cuda():
    for path in sources(PYTHON):
        assert not includes(path) & CUDA_HEADERS, path
        assert not re.search(r"\b(cu[A-Z]\w*|CU[a-z]\w+|CUDA_[A-Z_]+)\b", code(path)), path


def test_kernels_know_neither():
    for path in DEVICE_FILES:
        assert not includes(path) & (PYTHON_HEADERS | CUDA_HEADERS), path
        assert not any("csrc" in name for name in includes(path)), path


def test_inline_ptx_lives_in_kernels_ptx():
    for path in DEVICE_FILES:
        if path.parent.name != "ptx":
            assert not re.search(r"\b(__)?asm(__)?\b", code(path)), path


def test_ptx_wrappers_are_named_as_their_instruction():
    wrappers = 0
    for path in sorted((KERNELS / "ptx").glob("*.cuh")):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(), flags=re.S)
        for function in text.split("__forceinline__")[1:]:
            instructions = " ".join(re.findall(r'"([^"]*)"', function.partition("asm")[2]))
            if re.search(r"[a-z]{2}", instructions):  # an empty asm statement is a barrier to the optimiser
                name = re.search(r"(\w+)\(", function)[1]
                assert re.search(rf"\b{name.split('_')[0]}", instructions), (path.name, name)
                wrappers += 1
    assert wrappers


def test_device_code_launches_nothing():
    for path in DEVICE_FILES:
        assert "<<<" not in code(path), path
        assert not re.search(r"__host__(?! __device__)", code(path)), path


def test_the_table_of_images_names_existing_sources():
    rows = re.findall(r'^TCG_IMAGE\(\w+, "([^"]+)"', (KERNELS / "table.def").read_text(), flags=re.M)
    assert rows
    for source in rows:
        assert (KERNELS / source).is_file(), source


def test_the_package_imports_no_framework():
    allowed = sys.stdlib_module_names | {"numpy", "tcgemm"}
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                # ml_dtypes only lends NumPy a bfloat16, and only where it is installed.
                assert name.split(".")[0] in allowed | ({"ml_dtypes"} if path.name == "__main__.py" else set()), path


def test_the_version_has_one_home():
    assert importlib.metadata.version("tcgemm") == tcgemm.__version__
    homes = [ROOT / name for name in ("setup.py", "pyproject.toml", "README.md")]
    homes += [*ROOT.glob("csrc/**/*.[ch]"), *PACKAGE.glob("*.py*")]
    version = re.compile(rf"(?<![\d.]){re.escape(tcgemm.__version__)}\b")
    # README's <sub> lines say what was measured, and with which version.
    holders = [path.name for path in homes if version.search(re.sub(r"<sub>.*?</sub>", "", path.read_text()))]
    assert holders == ["__init__.py"]


def run_tool(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (binutils)")
    return subprocess.run([*command, _core.__file__], capture_output=True, text=True, check=True).stdout


def test_the_extension_exports_its_init_function_alone():
    exported = [line.split()[-1] for line in run_tool("nm", "-D", "--defined-only").splitlines()]
    sanitizer = re.compile(r"__(asan|ubsan|odr_asan|start_asan|stop_asan)")
    assert [name for name in exported if not sanitizer.match(name)] == ["PyInit__core"]


def test_names_shared_between_files_carry_the_prefix():
    """Whatever is defined at file scope without `static`."""
    names = set()
    for path in sorted((ROOT / "csrc").rglob("*.c")):
        definition = r"^(?!static\b|typedef\b|extern\b|return\b|else\b)[A-Za-z_][\w *]*[ *](\w+)(?:\(|\[| = |;)"
        names |= set(re.findall(definition, code(path), flags=re.M))
    assert {"tcg_image_data", "tcg_image_names", "PyInit__core"} <= names
    assert not [name for name in names if not re.match(r"tcg_|py_|PyInit_", name)]


def test_the_extension_needs_no_cuda_library():
    dynamic = run_tool("readelf", "-dW")
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic)
    assert not [name for name in needed if re.match(r"lib(cuda|nv|cublas)", name)]
    undefined = re.findall(r"undefined symbol: (\w+)", run_tool("ldd", "-r"))
    assert not [name for name in undefined if not re.match(r"_?Py", name)]  # the interpreter brings those
