"""From the start of a process to the first token, and the most memory on the way: vkit and llama.cpp, in turns.

    python benchmarks/cpu_start.py MODEL.gguf... --llama-python PATH [--threads 2] [--rounds 5] [--clock wall|cpu]
        [--json out.json]

Every round starts one process per side: `vkit complete` as a person runs it, and a program that imports
llama-cpp-python, opens the model and answers the same prompt with one token. The first, untimed round brings the file
into the system's cache and lets vkit keep the tokenizer's tables. Printed are medians; `--clock cpu` counts the
processor time of all threads, for a busy machine. What importing torch takes and occupies stands beside vkit's figures.

Both sides run as installed programs do, with compiled modules (PYTHONDONTWRITEBYTECODE is ignored).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = "The capital of France is"

VKIT = """
import json, resource, sys, time
model, threads, clock, started = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
now = time.process_time if clock == "cpu" else time.perf_counter
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
from vkit.starting import starting
before = now()
with starting():
    import torch
torch_s, torch_peak = now() - before, peak()
from vkit.__main__ import start
flags = ["--model", model, "--threads", threads, "--max-model-len", "512", "--max-num-seqs", "1", "--max-tokens", "1"]
sys.argv = ["vkit", "complete", *flags, "--prompt", PROMPT]
if start():
    raise SystemExit("vkit failed")
seconds = now() - (0 if clock == "cpu" else started)
print(json.dumps({"seconds": seconds, "torch": torch_s, "peak": peak(), "torch_peak": torch_peak}))
"""
LLAMA = """
import json, resource, sys, time
model, threads, clock, started = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
from llama_cpp import Llama
llama = Llama(model, n_threads=threads, n_threads_batch=threads, n_ctx=512, verbose=False)
llama(PROMPT, max_tokens=1, temperature=0.0)
seconds = time.process_time() if clock == "cpu" else time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "torch": 0.0, "peak": peak, "torch_peak": 0}))
"""


def start(python: str, program: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process's figures."""
    code = program.replace("PROMPT", repr(PROMPT))
    arguments = [model, str(options.threads), options.clock, str(time.perf_counter())]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        raise SystemExit(done.stderr)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(options: argparse.Namespace, model: str) -> dict[str, float]:
    """Medians over rounds."""
    sides = {"vkit": (sys.executable, VKIT), "llama.cpp": (options.llama_python, LLAMA)}
    rounds = [
        {name: start(python, program, model, options) for name, (python, program) in sides.items()}
        for _ in range(options.rounds + 1)
    ][1:]

    def median(side: str, key: str) -> float:
        return statistics.median(figures[side][key] for figures in rounds)

    ours, theirs, torch_s = median("vkit", "seconds"), median("llama.cpp", "seconds"), median("vkit", "torch")
    return {
        "vkit": ours,
        "importing torch": torch_s,
        "llama.cpp": theirs,
        "ratio": ours / theirs,
        "ratio without torch": (ours - torch_s) / theirs,
        "vkit's peak over the file": median("vkit", "peak") / Path(model).stat().st_size,
        "beyond torch's own": (median("vkit", "peak") - median("vkit", "torch_peak")) / Path(model).stat().st_size,
        "llama.cpp's peak over the file": median("llama.cpp", "peak") / Path(model).stat().st_size,
        "vkit's peak in MB": median("vkit", "peak") / 1e6,
    }


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results = {}
    for model in options.models:
        results[Path(model).name] = found = compare(options, model)
        print(f"{Path(model).name}: start to first token, {options.threads} threads, {options.clock} time")
        for name, value in found.items():
            print(f"  {name:32s} {value:8.2f}")
        sys.stdout.flush()
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
