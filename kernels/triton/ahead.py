"""Compiles every kernel for real cards without having one, and says what each takes.

    python -m vkit.kernels.triton.ahead [--write TABLE.json] [--kernels NAME,...] [--targets sm_80,...]

Prints the table as JSON, or writes it. Per kernel and target: registers a thread, bytes of stack and local memory (what
spilled), of shared memory, the number of 128-bit loads from memory, and the matrix instructions used.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vkit.kernels.triton.common import Ahead
from vkit.kernels.triton.ops import AHEAD

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
"""Bytes of shared memory a block may have."""
PACKAGE = "vkit.kernels.triton"
INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


def compile_ahead(ahead: Ahead, target: str) -> dict[str, Any]:
    """What `ahead` takes on `target`."""
    types = {name: kind.partition(":")[0] for name, kind in ahead.signature.items()}
    aligned = [name for name, kind in ahead.signature.items() if kind.startswith("*") or kind.endswith(":16")]
    names = ahead.kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = dict(ahead.constants)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(ahead.kernel, signature, constants, attributes)
    options = {"num_warps": ahead.num_warps, "num_stages": ahead.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", TARGETS[target], 32), options=options)
    ptx = compiled.asm["ptx"]
    return {
        **resources(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"ld\.global[\w.:]*\.v4\.b32|cp\.async\.\w+\.shared\.global[^;]*, 0x10,", ptx)),
        "instructions": [name for name in INSTRUCTIONS if name in ptx],
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of stack and local memory, of the one kernel in `cubin`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    if usage is None:
        raise ValueError(f"cuobjdump: no resource usage in {told[:200]!r}")
    return {"registers": int(usage[1]), "stack": int(usage[2]), "local": int(usage[3])}


def fingerprint(ahead: Ahead) -> str:
    """Changes with what is compiled: the code of the kernel's module and of those it uses, and the specialisation."""
    kernel_file = inspect.getsourcefile(ahead.kernel.fn)
    assert kernel_file is not None, "a kernel is written in a file"
    texts = [_code(path) for path in _sources(Path(kernel_file))]
    settings = (sorted(ahead.signature.items()), sorted(ahead.constants.items()), ahead.num_warps, ahead.num_stages)
    return hashlib.sha256("\n".join([*texts, repr(settings)]).encode()).hexdigest()[:16]


@functools.cache
def _sources(path: Path) -> tuple[Path, ...]:
    """A module's file, and those of this package that it imports from, and so on."""
    found = [path]
    for known in found:
        for node in ast.walk(ast.parse(known.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(PACKAGE):
                continue
            inside = (node.module or "").removeprefix(PACKAGE).lstrip(".")
            files = [path.with_name(f"{name}.py") for name in ([inside] if inside else [a.name for a in node.names])]
            found += [file for file in files if file.exists() and file not in found]
    return (path, *sorted(found[1:]))


@functools.cache
def _code(path: Path) -> str:
    """A module without its comments, docstrings and layout."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if hasattr(node, "body") and isinstance(node.body, list):
            node.body = [
                part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return ast.dump(tree)


def table(kernels: Sequence[str] = (), targets: Sequence[str] = ()) -> dict[str, Any]:
    """Kernel -> its fingerprint and, per target, its resources; all kernels and targets unless some are named."""
    chosen = [
        ahead
        for ahead in AHEAD
        if (not kernels or ahead.name in kernels) and (not targets or set(targets) & set(ahead.targets))
    ]
    rows = {
        ahead.name: {
            "source": fingerprint(ahead),
            **{target: compile_ahead(ahead, target) for target in ahead.targets if target in (targets or TARGETS)},
        }
        for ahead in chosen
    }
    return {"triton": triton.__version__, "kernels": rows}


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m vkit.kernels.triton.ahead")
    parser.add_argument("--write", type=Path, help="file to write the table to; kernels not compiled stay as they are")
    parser.add_argument("--kernels", default="", help="names, separated by commas")
    parser.add_argument("--targets", default="", help=f"of {', '.join(TARGETS)}")
    options = parser.parse_args(arguments)
    chosen = [[name for name in text.split(",") if name] for text in (options.kernels, options.targets)]
    found = table(*chosen)
    if options.write is None:
        print(json.dumps(found, indent=1))
        return
    if options.write.exists() and chosen[0]:
        before = json.loads(options.write.read_text(encoding="utf-8"))
        known = {ahead.name for ahead in AHEAD}
        found["kernels"] = {name: row for name, row in before["kernels"].items() if name in known} | found["kernels"]
    found["kernels"] = dict(sorted(found["kernels"].items()))
    options.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
