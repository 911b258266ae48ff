"""The bare CPU kernels against what the machine can do: GB/s of weights and GFLOP/s, per format and number of tokens.

    python benchmarks/cpu_kernels.py [--formats Q4_0,BF16] [--tokens 1,8,32,512] [--threads 2] [--clock wall|cpu]
        [--json out.json]

Products with a set of 7168 x 1280 matrices that together exceed every cache, and attention over a paged cache. The best
of several repetitions, since others may use the machine. The first line is the plain read rate: what a product of one
token can reach at most. `--clock cpu` with one thread gives usable figures on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.cpu.cache import kv_layout
from vkit.kernels.cpu.library import Library, load_library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.cpu.probe import read_rate
from vkit.kernels.cpu.threads import usable_threads
from vkit.kernels.paged import PagedBatch

ROWS, COLUMNS = 7168, 1280
SET_BYTES = 192 << 20
REPETITIONS = 7


def best(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the fastest of several runs, after one that does not count."""
    run()
    seconds = []
    for _ in range(REPETITIONS):
        started = clock()
        run()
        seconds.append(clock() - started)
    return min(seconds)


def products(
    operations: Operations, qtype: str, tokens: list[int], clock: Callable[[], float]
) -> list[dict[str, float]]:
    """Per number of tokens: weight bytes read and operations done, per second."""
    size = ROWS * BLOCK_FORMATS[qtype].row_bytes(COLUMNS)
    matrices = [matrix(qtype) for _ in range(max(2, SET_BYTES // size))]

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if qtype == "BF16":
            return operations.linear(x, weight.view(torch.bfloat16))
        return operations.quantized_linear(x, weight, qtype)

    results = []
    for count in tokens:
        x = torch.randn(count, COLUMNS)
        used = matrices if count < 64 else matrices[:2]

        def run(x: torch.Tensor = x, used: list[torch.Tensor] = used) -> None:
            for weight in used:
                product(x, weight)

        seconds = best(run, clock)
        flops = 2 * count * ROWS * COLUMNS * len(used)
        results.append(
            {"tokens": count, "gb_per_s": size * len(used) / seconds / 1e9, "gflop_per_s": flops / seconds / 1e9}
        )
    return results


def matrix(qtype: str) -> torch.Tensor:
    """Random blocks; small bytes, so that no scale is infinite."""
    return torch.randint(0, 60, (ROWS, BLOCK_FORMATS[qtype].row_bytes(COLUMNS)), dtype=torch.uint8)


def attention(operations: Operations, queries: int, length: int, seqs: int, clock: Callable[[], float]) -> float:
    """Microseconds of one layer: 20 heads over 4 kv heads of 64, bfloat16 cache."""
    heads, kv_heads, dim, size = 20, 4, 64, 32
    per_seq = -(-length // size)
    pages = torch.zeros(seqs * per_seq + 1, size * kv_heads * 2 * dim * 2, dtype=torch.uint8)
    k, v = kv_layout(pages, size, kv_heads, (dim, dim), torch.bfloat16)
    table = torch.arange(1, seqs * per_seq + 1, dtype=torch.int32).view(seqs, per_seq)
    rows = torch.arange(seqs, dtype=torch.int32)
    cu = torch.arange(seqs + 1, dtype=torch.int32) * queries
    lens = torch.full((seqs,), length, dtype=torch.int32)
    slots = torch.zeros(seqs * queries, dtype=torch.int64)
    batch = PagedBatch(table, rows, slots, lens, cu, rows.tolist(), lens.tolist(), cu.tolist())
    q = torch.randn(seqs * queries, heads, dim)
    return best(lambda: operations.paged_attention(q, k, v, batch, dim**-0.5), clock) * 1e6


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="Q4_0,Q4_1,Q8_0,Q4_K,Q5_K,Q6_K,BF16")
    parser.add_argument("--tokens", default="1,8,32,512")
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    library: Library = load_library()
    library.set_num_threads(options.threads)
    operations = Operations(library, {})
    report: dict[str, object] = {
        "level": library.level,
        "threads": options.threads,
        "read_gb_per_s": read_rate(library) / 1e9,
    }
    print(f"{library.level}, {options.threads} threads, plain read {report['read_gb_per_s']:.1f} GB/s", flush=True)
    tokens = [int(part) for part in options.tokens.split(",")]
    for qtype in options.formats.split(","):
        report[qtype] = rows = products(operations, qtype, tokens, clock)
        cells = [f"{row['tokens']:4.0f}: {row['gb_per_s']:5.1f} GB/s {row['gflop_per_s']:5.0f} GF/s" for row in rows]
        print(f"{qtype:6s}", " | ".join(cells), flush=True)
    for name, queries, length, seqs in (
        ("decode at 2048", 1, 2048, 1),
        ("batch 8 at 2048", 1, 2048, 8),
        ("prefill 512", 512, 512, 1),
        ("prefill 2048", 2048, 2048, 1),
    ):
        report[name] = microseconds = attention(operations, queries, length, seqs, clock)
        print(f"attention, {name}: {microseconds:.0f} microseconds per layer", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
