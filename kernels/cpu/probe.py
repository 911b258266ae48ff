"""How fast this machine reads memory through our threads: the bound of a decoding step. No torch."""

from __future__ import annotations

import ctypes
import time

from vkit.kernels.cpu.library import Library, Op, make_op

_NUM_BYTES = 256 << 20
"""More than any cache holds."""
_ROUNDS = 5


def read_rate(library: Library) -> float:
    """Bytes per second, the best of a few rounds (others may use the machine meanwhile).

    Raises:
        MemoryError: no memory to read.
    """
    address = library.allocate(_NUM_BYTES)
    try:
        ctypes.memset(address, 1, _NUM_BYTES)
        sums = (ctypes.c_int32 * (16 * library.num_threads))()
        op = make_op("READ", 1, (address, ctypes.addressof(sums)), (0, 0, _NUM_BYTES))
        best = min(_seconds(library, op) for _ in range(_ROUNDS))
    finally:
        library.free(address)
    return _NUM_BYTES / best


def _seconds(library: Library, op: Op) -> float:
    started = time.perf_counter()
    library.run_now(op)
    return time.perf_counter() - started
