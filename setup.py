"""Builds tcgemm/_core: kernels/ with nvcc (buildtools), csrc/ with the C compiler, the fatbins embedded in it.

Environment: CUDA_HOME, CC, CXX, NVCC_CCBIN, and
  TCGEMM_CUDA_ARCHS          targets to build, e.g. "80;90a" (all those of kernels/table.def)
  TCGEMM_IGNORE_SYSTEM_CUDA  1: build with the compiler of NVIDIA's wheels
  TCGEMM_NVCC_FLAGS          more flags for nvcc, e.g. -lineinfo for a profiler
  TCGEMM_BUILD_JOBS          nvcc runs at a time (the number of cores)
  TCGEMM_BUILD_CACHE         where compiled kernels are kept (build/kernels)
  TCGEMM_WERROR              1: warnings are errors
  TCGEMM_SANITIZE            e.g. address,undefined: for the C code
"""

import json
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from buildtools import images, toolkit  # noqa: E402


def numpy_include():
    """NumPy is in the `requires` of pyproject.toml, which --no-build-isolation does not enforce."""
    try:
        import numpy
    except ImportError:
        found = "none"
    else:
        found = numpy.__version__
        if int(found.split(".")[0]) >= 2:
            return numpy.get_include()
    raise toolkit.BuildError(
        f"tcgemm: expected NumPy 2 or newer for its headers, found {found}: pip install -U numpy"
    )


class BuildWithKernels(build_ext):
    """Kernels first; then the extension that embeds them. images.REPORT goes where the extension goes."""

    def finalize_options(self):
        super().finalize_options()
        self.force = True  # what the extension embeds is no dependency that setuptools knows

    def build_extension(self, ext):
        out = Path(self.build_temp).resolve() / "images"
        cache = Path(os.environ.get("TCGEMM_BUILD_CACHE") or ROOT / "build" / "kernels").resolve()
        cuda = toolkit.find()
        report = images.build(ROOT / "kernels", out, cache, cuda)
        ext.include_dirs.append(str(out))
        ext.extra_compile_args += [f"-isystem{path}" for path in (*cuda.include, numpy_include())]
        ext.define_macros.append(("TCG_IMAGE_DIR", f'"{out}"'))
        super().build_extension(ext)
        Path(self.get_ext_fullpath(ext.name)).with_name(images.REPORT).write_text(json.dumps(report, indent=1))

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        for built, in_source in self._report_paths():
            self.copy_file(built, in_source)

    def get_outputs(self):
        return super().get_outputs() + [built for built, _ in self._report_paths()]

    def get_output_mapping(self):
        return {**super().get_output_mapping(), **(dict(self._report_paths()) if self.inplace else {})}

    def _report_paths(self):
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            in_source, built = self._get_inplace_equivalent(build_py, ext)
            yield tuple(str(Path(path).with_name(images.REPORT)) for path in (built, in_source))


def core():
    compile_args = ["-std=c11", "-O2", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
    link_args = ["-pthread"]
    if os.environ.get("TCGEMM_WERROR") == "1":
        compile_args.append("-Werror")
    if sanitize := os.environ.get("TCGEMM_SANITIZE"):
        compile_args += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-UNDEBUG"]
        link_args.append(f"-fsanitize={sanitize}")
    return Extension(
        "tcgemm._core",
        sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.c")),
        define_macros=[("_GNU_SOURCE", None)],
        libraries=["dl"],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


setup(ext_modules=[core()], cmdclass={"build_ext": BuildWithKernels})
