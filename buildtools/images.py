"""Compiles the images of kernels/table.def: one nvcc run an image and target, in parallel, reused while nothing it
reads has changed; then one fatbin an image, and the compiler's resource report of every kernel."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from buildtools.toolkit import BuildError, Toolkit

REPORT = "_images.json"  # beside the extension; tests read it


@dataclass(frozen=True)
class Image:
    """A TCG_IMAGE row of kernels/table.def."""

    name: str
    source: str
    dtype: str  # f16 | bf16 | f32 | any
    targets: tuple[str, ...]  # "80": machine code; "90a": for that chip alone; "80+ptx": PTX

    @property
    def defines(self) -> list[str]:
        return [f"-DTCG_IN_{self.dtype}"] + (["-DTCG_PTX_ROWS"] if "_ptx_" in self.name else [])


def read_table(table: Path) -> list[Image]:
    text = re.sub(r"/\*.*?\*/", "", table.read_text(), flags=re.S)
    rows = re.findall(r'^TCG_IMAGE\((\w+), "([^"]+)", (\w+), "([^"]*)"\)', text, flags=re.M)
    return [Image(name, source, dtype, tuple(targets.split())) for name, source, dtype, targets in rows]


def select(images: list[Image], wanted: str | None) -> dict[str, list[str]]:
    """The targets to build of each image. `wanted` is TCGEMM_CUDA_ARCHS, e.g. "80;90a;80+ptx": a bare number also
    takes in that number's architecture-specific targets ("90": 90 and 90a); PTX is built where it is named."""
    known = sorted({target for image in images for target in image.targets})
    names = re.split(r"[;,\s]+", (wanted or "").strip(";, \t"))
    if names == [""]:
        return {image.name: list(image.targets) for image in images}
    for name in names:
        if not any(_selects(name, target) for target in known):
            raise BuildError(f"tcgemm: TCGEMM_CUDA_ARCHS: expected some of {' '.join(known)}, got {name!r}")
    return {
        image.name: [target for target in image.targets if any(_selects(name, target) for name in names)]
        for image in images
    }


def _selects(name: str, target: str) -> bool:
    return name == target or (name.isdigit() and re.fullmatch(f"{name}[a-z]", target) is not None)


def build(kernels: Path, out: Path, cache: Path, toolkit: Toolkit) -> dict:
    """Writes <image>.fatbin and tcg_built.h into `out`; returns the report: {"nvcc": version, "archs": what was asked
    for or null, "images": {image: {target: {"warnings": [...], "kernels": {symbol: resources}}}}}."""
    images = read_table(kernels / "table.def")
    wanted = os.environ.get("TCGEMM_CUDA_ARCHS")
    selected = select(images, wanted)
    out.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    units = [Unit(image, target, kernels, cache, toolkit) for image in images for target in selected[image.name]]
    keys = {unit: unit.key() for unit in units}
    with open(cache / ".lock", "w") as lock, ThreadPoolExecutor(_jobs()) as pool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"tcgemm: waiting for another build that uses {cache}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        # As far as the last build tells, so that no core idles at the end.
        slowest_first = sorted(units, key=Unit.expected_seconds, reverse=True)
        futures = {unit: pool.submit(unit.compile, keys[unit]) for unit in slowest_first}
        try:
            reports = {unit: futures[unit].result() for unit in units}
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        for image in images:
            _link(out / f"{image.name}.fatbin", [unit for unit in units if unit.image is image], toolkit)
    _check_resources(units, reports)
    header = ["/* The targets that were built of each image: written by setup.py. */"]
    header += [f'#define TCG_BUILT_{image.name} "{" ".join(selected[image.name])}"' for image in images]
    (out / "tcg_built.h").write_text("\n".join(header) + "\n")
    report: dict = {"nvcc": toolkit.version, "archs": wanted, "images": {image.name: {} for image in images}}
    for unit in units:
        report["images"][unit.image.name][unit.target] = {key: reports[unit][key] for key in ("warnings", "kernels")}
    return report


@dataclass(eq=False)
class Unit:
    """One image for one target: what one run of nvcc makes."""

    image: Image
    target: str
    kernels: Path
    cache: Path
    toolkit: Toolkit

    @property
    def ptx(self) -> bool:
        return self.target.endswith("+ptx")

    @property
    def arch(self) -> str:
        return self.target.removesuffix("+ptx")

    @property
    def output(self) -> Path:
        return self.cache / f"{self.image.name}.{self.arch}.{'ptx' if self.ptx else 'cubin'}"

    @property
    def _record(self) -> Path:
        return self.output.with_name(self.output.name + ".json")

    def _last(self) -> dict:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._record.read_text())
        return {}

    def expected_seconds(self) -> float:
        return self._last().get("seconds", float(not self.ptx))

    def command(self) -> list[str]:
        kind, code = ("--ptx", f"compute_{self.arch}") if self.ptx else ("--cubin", f"sm_{self.arch}")
        return [
            *("-std=c++17", "-O3", kind, f"-gencode=arch=compute_{self.arch},code={code}"),
            *("-Xptxas=-v,-warn-spills,-warn-lmem-usage", *self.image.defines),
            *(f"-ccbin={word}" for word in self.toolkit.host_cxx[:1]),
            *(f"-Xcompiler={word}" for word in self.toolkit.host_cxx[1:]),
            *shlex.split(os.environ.get("TCGEMM_NVCC_FLAGS", "")),
        ]

    def key(self) -> str:
        """A hash of all that the output depends on: compiler, flags, and each file of ours that is included."""
        environment = [os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")]
        digest = hashlib.sha256(json.dumps([self.toolkit.version, self.command(), environment]).encode())
        for name, text in sorted(_closure(self.kernels, self.image.source).items()):
            digest.update(json.dumps([name, text]).encode())
        return digest.hexdigest()

    def compile(self, key: str) -> dict:
        """Runs nvcc unless the last output was made from the same key; returns the record of the run."""
        last = self._last()
        if last.get("key") == key and self.output.is_file() and last["sha256"] == _sha256(self.output):
            return last
        command = self.command()
        started = time.monotonic()
        run = subprocess.run(
            [self.toolkit.nvcc, *command, "-o", self.output, self.kernels / self.image.source],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        log = run.stdout + run.stderr
        if run.returncode != 0:
            failed = shlex.join(map(str, run.args))
            raise BuildError(f"tcgemm: {self.image.source} for {self.target}: nvcc failed:\n{failed}\n{log}")
        seconds = round(time.monotonic() - started, 1)
        print(f"tcgemm: {self.image.name} for {self.target}: {seconds} s", flush=True)
        record = {
            "key": key,
            "sha256": _sha256(self.output),
            "seconds": seconds,
            "warnings": [line for line in log.splitlines() if "warning" in line.lower()],
            "kernels": _ptx_kernels(self.output) if self.ptx else _resources(log),
        }
        self._record.write_text(json.dumps(record, indent=1))
        return record


def _jobs() -> int:
    return int(os.environ.get("TCGEMM_BUILD_JOBS") or 0) or len(os.sched_getaffinity(0))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _closure(kernels: Path, source: str) -> dict[str, str]:
    """The source and all that it includes from this repository, by path, without comments. Of table.def only the rows
    that can expand into something there: those whose macro another of the files names. Of abi.h without the macros that
    none names, which are other families'."""
    if not (kernels / source).is_file():
        raise BuildError(f"tcgemm: kernels/table.def names the image source {source!r}, which is not in {kernels}")
    texts: dict[str, str] = {}
    waiting = [(kernels / source).resolve()]
    while waiting:
        path = waiting.pop()
        name = os.path.relpath(path, kernels)
        if name in texts:
            continue
        texts[name] = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.S)
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', texts[name], flags=re.M):
            if (path.parent / included).is_file():
                waiting.append((path.parent / included).resolve())
    if "abi.h" in texts:
        others = "\n".join(text for name, text in texts.items() if name not in ("abi.h", "table.def"))
        texts["abi.h"] = _used_macros(texts["abi.h"], others)
    if "table.def" in texts:
        others = "\n".join(text for name, text in texts.items() if name != "table.def")
        used = set(re.findall(r"\bTCG_\w+\b", others))
        texts["table.def"] = "\n".join(
            line for line in texts["table.def"].splitlines() if line.startswith("TCG_") and line.split("(")[0] in used
        )
    return texts


def _used_macros(header: str, others: str) -> str:
    """The header without those of its own macros that neither the others name nor what is left of it."""
    lines = [line for line in header.replace("\\\n", " ").splitlines() if line.strip()]
    macros = {found.group(1): line for line in lines if (found := re.match(r"#define (TCG_\w+)\b", line))}
    rest = [line for line in lines if line not in macros.values()]
    waiting = re.findall(r"\bTCG_\w+\b", "\n".join([others, *rest]))
    kept = set()
    while waiting:
        name = waiting.pop()
        if name in macros and name not in kept:
            kept.add(name)
            waiting += re.findall(r"\bTCG_\w+\b", macros[name])
    unused = {line for name, line in macros.items() if name not in kept}
    return "\n".join(line for line in lines if line not in unused)


def _resources(log: str) -> dict[str, dict[str, int]]:
    """What ptxas -v says of each kernel."""
    kernels: dict[str, dict[str, int]] = {}
    entry = None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            entry = kernels.setdefault(found.group(1), {})
        elif entry is not None and (
            found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        ):
            # A device function that was not inlined has its own line and counts to the kernel before it.
            for field, value in zip(("stack_bytes", "spill_store_bytes", "spill_load_bytes"), found.groups()):
                entry[field] = entry.get(field, 0) + int(value)
        elif entry is not None and (found := re.search(r"Used (\d+) registers", line)):
            entry["registers"] = int(found.group(1))
            static = re.search(r"(\d+) bytes smem", line)
            entry["static_smem_bytes"] = int(static.group(1)) if static else 0
    return kernels


def _ptx_kernels(ptx: Path) -> dict[str, dict[str, int]]:
    return {name: {} for name in re.findall(r"^\s*\.visible\s+\.entry\s+(\w+)", ptx.read_text(), flags=re.M)}


def _check_resources(units: list[Unit], reports: dict[Unit, dict]) -> None:
    """A kernel that spills, or keeps an array in local memory, is a fault of its row: no build has one."""
    faults = []
    for unit in units:
        kernels = reports[unit]["kernels"]
        if not kernels:
            faults.append(f"{unit.image.name} for {unit.target}: expected kernels, found none")
        for name, resources in kernels.items():
            if any(resources.get(field) for field in ("stack_bytes", "spill_store_bytes", "spill_load_bytes")):
                faults.append(f"{name} for {unit.target}: expected no spills and no stack, found {resources}")
        if reports[unit]["warnings"] and os.environ.get("TCGEMM_WERROR") == "1":
            faults += [f"{unit.image.name} for {unit.target}: {line}" for line in reports[unit]["warnings"]]
    if faults:
        raise BuildError("tcgemm: kernels failed their checks:\n  " + "\n  ".join(faults))


def _link(fatbin: Path, units: list[Unit], toolkit: Toolkit) -> None:
    """One fatbin of an image's targets; an empty file where none was built."""
    if not units:
        fatbin.write_bytes(b"")
        return
    parts = [f"--image3=kind={'ptx' if unit.ptx else 'elf'},sm={unit.arch},file={unit.output}" for unit in units]
    command = [str(toolkit.fatbinary), "-64", "--compress-all", f"--create={fatbin}", *parts]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if run.returncode != 0:
        raise BuildError(f"tcgemm: fatbinary failed:\n{shlex.join(command)}\n{run.stdout}{run.stderr}")
