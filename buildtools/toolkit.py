"""Finds the CUDA compiler: CUDA_HOME, PATH, /usr/local/cuda, else NVIDIA's wheels on sys.path.
TCGEMM_IGNORE_SYSTEM_CUDA=1 looks at the wheels alone."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

OLDEST = (13, 0)
_OLDEST_TEXT = ".".join(map(str, OLDEST))

# One toolkit release, 13.0 update 2: nvcc takes any version of the others, so each is pinned.
WHEELS = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]


class BuildError(SystemExit):
    """What the person who builds can do something about: pip shows the text, without a traceback."""


@dataclass(frozen=True)
class Toolkit:
    nvcc: Path
    version: str  # "13.0.88"
    host_cxx: tuple[str, ...]  # what nvcc preprocesses with: () is its own choice, g++

    @property
    def fatbinary(self) -> Path:
        return self.nvcc.with_name("fatbinary")

    @property
    def include(self) -> list[Path]:
        """Where cuda.h is, unless it is where the C compiler looks anyway."""
        root = self.nvcc.parent.parent
        found = [path for path in (root / "include", *root.glob("targets/*/include")) if (path / "cuda.h").is_file()]
        return found[:1]


def find() -> Toolkit:
    """The first toolkit that is new enough, or a BuildError that says what to do."""
    toolkit, too_old = _search()
    if toolkit is None:
        raise BuildError(
            f"tcgemm: expected a CUDA toolkit {_OLDEST_TEXT} or newer, found {', '.join(too_old) or 'none'}.\n"
            "Install one and set CUDA_HOME to it, or take NVIDIA's compiler from PyPI:\n"
            f"  pip install {' '.join(WHEELS)}"
        )
    if not toolkit.fatbinary.is_file():
        raise BuildError(f"tcgemm: {toolkit.fatbinary} not found: the CUDA toolkit is incomplete.")
    host_cxx = toolkit.host_cxx[0] if toolkit.host_cxx else "g++"
    if shutil.which(host_cxx) is None:
        raise BuildError(
            f"tcgemm: {host_cxx} not found, which nvcc needs. Install g++ (Debian and Ubuntu: apt-get install g++), "
            "or name another host compiler in CXX or NVCC_CCBIN."
        )
    return toolkit


def requirements() -> list[str]:
    """Wheels to add to the build requirements: none where the system has a toolkit."""
    return [] if _search(wheels=False)[0] else list(WHEELS)


def _search(wheels: bool = True) -> tuple[Toolkit | None, list[str]]:
    """The first toolkit that will do, and those that were passed over because they are too old."""
    home = os.environ.get("CUDA_HOME")
    candidates = []
    if os.environ.get("TCGEMM_IGNORE_SYSTEM_CUDA", "0") in ("", "0"):
        if home:
            nvcc = Path(home, "bin", "nvcc")
            found = _version(nvcc) if nvcc.is_file() else "no bin/nvcc"
            if not _new_enough(found):
                raise BuildError(
                    f"tcgemm: CUDA_HOME={home}: expected CUDA {_OLDEST_TEXT} or newer, found {found}. Set it to a "
                    "newer toolkit, or set TCGEMM_IGNORE_SYSTEM_CUDA=1 to build with NVIDIA's compiler from PyPI."
                )
            candidates = [nvcc]
        else:
            candidates = [Path(nvcc) for nvcc in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc") if nvcc]
    if wheels:
        candidates += [Path(entry, "nvidia", "cu13", "bin", "nvcc") for entry in sys.path if entry]
    too_old = []
    for nvcc in filter(Path.is_file, candidates):
        version = _version(nvcc)
        if not _new_enough(version):
            too_old.append(f"{nvcc} ({version})")
            continue
        host_cxx = shlex.split(os.environ.get("NVCC_CCBIN") or os.environ.get("CXX") or "")
        return Toolkit(_real(nvcc), version, tuple(host_cxx)), too_old
    return None, too_old


def _real(nvcc: Path) -> Path:
    """nvcc in its toolkit, where fatbinary and the headers are; on PATH there may be a link to it or a script."""
    said = _output(nvcc, "--dryrun", "--cubin", "-x", "cu", "-o", os.devnull, os.devnull)
    here = re.search(r"^#\$ _HERE_=(.+)$", said, flags=re.M)
    inside = Path(here.group(1), "nvcc") if here else nvcc
    return inside.resolve() if inside.is_file() else nvcc


def _version(nvcc: Path) -> str:
    found = re.search(r"\bV(\d+\.\d+\.\d+)", _output(nvcc, "--version"))
    return found.group(1) if found else "no version"


def _output(*command: str | Path) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout + run.stderr


def _new_enough(version: str) -> bool:
    return version[:1].isdigit() and tuple(int(part) for part in version.split(".")[:2]) >= OLDEST
