"""The native CPU kernels' tests under a memory checker; exit status 1 if it found something in our code.

    python tests/kernels/memcheck.py valgrind [-k EXPRESSION] [FILE ...]
    python tests/kernels/memcheck.py asan [-k EXPRESSION] [FILE ...]

The library is compiled anew, with line numbers and every weight in memory of its own, into a cache folder that goes
away. `valgrind` also sees values that were never written, but knows no AVX-512: it runs the tests of level avx2 and
those of no level. `asan` runs all levels, emulated tiles included. Findings elsewhere (Python, torch) are not shown.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
_SOURCES = [path.name for path in (ROOT / "kernels" / "cpu").iterdir() if path.suffix in (".h", ".cpp")]
OURS = re.compile(rf"\((?:{'|'.join(map(re.escape, _SOURCES))}):\d+\)|/kernels/cpu(?:-emulated)?-[0-9a-f]+\.so")
CONDITIONS = {"valgrind": "not scalar and not avx512vnni and not amx", "asan": ""}
FLAGS = {"valgrind": "-g -DVK_SEPARATE_WEIGHTS", "asan": "-g -fsanitize=address"}


def findings(log: str) -> list[str]:
    """Valgrind's reports with a frame of ours."""
    text = re.sub(r"^==\d+== ?", "", log, flags=re.MULTILINE)
    return [block for block in text.split("\n\n") if re.search(r"^ +at 0x", block, re.MULTILINE) and OURS.search(block)]


def tested(tool: str, scratch: Path, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run pytest with a compiler that adds the tool's flags, under the tool."""
    compiler = scratch / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} {FLAGS[tool]} "$@"\n', encoding="ascii")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(scratch / "cache"), "OMP_NUM_THREADS": "1"}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    # Built without the checker, which would watch the compiler too.
    subprocess.run([sys.executable, "-c", BUILD], env=environment, cwd=ROOT, check=True)
    if tool == "asan":
        # The standard library too: without it the checker ends the process when torch throws.
        runtimes = [
            subprocess.run(
                ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("libasan.so", "libstdc++.so")
        ]
        environment |= {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
        return subprocess.run(pytest, env=environment, cwd=ROOT, check=False)
    watch = ["valgrind", "--quiet", "--error-limit=no", "--num-callers=12", "--fair-sched=yes"]
    return subprocess.run([*watch, f"--log-file={scratch / 'log'}", *pytest], env=environment, cwd=ROOT, check=False)


BUILD = """
from pathlib import Path
from vkit.kernels.build import build_library
from vkit.kernels.compiler import Unit
from vkit.kernels.cpu import library, sources
folder = Path(library.__file__).parent
headers = list(folder.glob("*.h"))
build_library("cpu", *library._sources(), sources.FLAGS)
build_library("cpu-emulated", [Unit(*call) for call in sources.emulation_calls(folder)], headers, sources.FLAGS)
"""


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=sorted(FLAGS))
    parser.add_argument("-k", dest="expression", default="", help="as pytest's; a further condition")
    parser.add_argument("files", nargs="*", type=Path, help="default: every test_cpu_*.py, and test_draw.py")
    options = parser.parse_args()
    for program in ("g++", *(["valgrind"] if options.tool == "valgrind" else [])):
        if shutil.which(program) is None:
            parser.error(f"{program} is not installed")
    condition = " and ".join(f"({part})" for part in (CONDITIONS[options.tool], options.expression) if part)
    files = [
        str(path.resolve())
        for path in options.files or [*sorted(FOLDER.glob("test_cpu_*.py")), FOLDER / "test_draw.py"]
    ]
    with tempfile.TemporaryDirectory() as scratch:
        done = tested(options.tool, Path(scratch), [*files, *(["-k", condition] if condition else [])])
        log = Path(scratch) / "log"
        found = findings(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
    print("\n\n".join(found))
    print(f"{options.tool}: {len(found)} findings in our code" if options.tool == "valgrind" else "", flush=True)
    return int(bool(found) or done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
