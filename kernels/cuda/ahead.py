"""Compiles every CUDA source for real cards, without one: `python -m vkit.kernels.cuda.ahead [--write FILE]`.

For each kernel and target it reports the registers a thread, the bytes of stack, of spilled stores and loads, of shared
memory, and the number of 16-byte loads and of tile products in the machine code.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vkit.kernels.compiler import BuildError, run
from vkit.kernels.cuda import sources

TARGETS = ("sm_80", "sm_90", "sm_100")
WIDE_LOAD = re.compile(r"\bLDG\.[\w.]*128\b")
PRODUCT = re.compile(r"\bHMMA\.")
_ABOUT = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '\w+'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def fingerprint() -> str:
    """Changes with the sources and flags that are compiled; comments and layout do not count."""
    files = [unit.source for unit in sources.units()] + sources.headers()
    texts = [" ".join(re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8")).split()) for path in files]
    return hashlib.sha256("\0".join([*texts, *sources.FLAGS]).encode()).hexdigest()[:16]


def compile_ahead(source: Path, target: str) -> dict[str, dict[str, int]]:
    """Kernel -> what it takes on `target`, of all kernels in a source.

    Raises:
        BuildError: there is no nvcc, or it failed.
    """
    compiler = sources.find_nvcc()
    if compiler is None:
        raise BuildError("nvcc is not found")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        command = [compiler, *sources.FLAGS, "-cubin", f"-arch={target}", "-Xptxas=-v", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.splitlines() or ["no message"]
            raise BuildError(f"nvcc failed: {next((line for line in lines if 'error' in line), lines[0])}")
        instructions = _instructions(cubin)
    return {
        kernel_name(found["name"]): {**_resources(found), **instructions.get(found["name"], {})}
        for found in _ABOUT.finditer(done.stderr)
    }


def _resources(found: re.Match[str]) -> dict[str, int]:
    shared = re.search(r"(\d+) bytes smem", found["rest"])
    names = {"registers": "registers", "stack": "stack", "spill_stores": "stores", "spill_loads": "loads"}
    return {
        **{name: int(found[group]) for name, group in names.items()},
        "shared": int(shared[1]) if shared else 0,
    }


def _instructions(cubin: Path) -> dict[str, dict[str, int]]:
    """Mangled name -> counts of instructions in the machine code. Empty without a disassembler (triton brings one)."""
    tool = _disassembler()
    if tool is None:
        return {}
    texts = re.split(r"\.section\s+\.text\.", run([tool, "-c", str(cubin)]))[1:]
    counted = {"wide_loads": WIDE_LOAD, "products": PRODUCT}
    return {
        re.split(r"[,\s]", text, maxsplit=1)[0]: {name: len(pattern.findall(text)) for name, pattern in counted.items()}
        for text in texts
    }


def _disassembler() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    tool: str = triton.knobs.nvidia.nvdisasm.path
    return tool


def kernel_name(mangled: str) -> str:
    """A kernel's name as the source writes it, with template arguments: "decode<bf16, 128, 1>"."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(mangled.encode(), None, None, ctypes.byref(status))
    if status.value or not text:
        return mangled
    whole = ctypes.string_at(text).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return whole.removeprefix("void ").rpartition("(")[0]


def table(targets: Sequence[str] = TARGETS) -> dict[str, Any]:
    """The compiler, the fingerprint of the sources, and kernel -> target -> resources."""
    compiler = sources.find_nvcc()
    if compiler is None:
        raise BuildError("nvcc is not found")
    release = re.search(r"V([\d.]+)", run([compiler, "--version"]))
    jobs = [(unit.source, target) for unit in sources.units() for target in targets]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        compiled = list(pool.map(lambda job: compile_ahead(*job), jobs))
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    for (_, target), found in zip(jobs, compiled, strict=True):
        for name, row in found.items():
            kernels.setdefault(name, {})[target] = row
    return {
        "nvcc": release[1] if release else "unknown",
        "source": fingerprint(),
        "kernels": dict(sorted(kernels.items())),
    }


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m vkit.kernels.cuda.ahead")
    parser.add_argument("--write", type=Path, help="file to write the table to; stdout without it")
    parser.add_argument("--targets", default=",".join(TARGETS), help="separated by commas; sm_89, sm_120 are others")
    options = parser.parse_args(arguments)
    try:
        found = table(options.targets.split(","))
    except BuildError as reason:
        print(f"nothing is compiled: {reason}", file=sys.stderr)
        return 1
    text = json.dumps(found, indent=1) + "\n"
    if options.write is None:
        print(text, end="")
    else:
        options.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
