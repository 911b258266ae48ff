"""The native library through ctypes: structures, levels, threads. Knows addresses and sizes, no tensors."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from vkit.kernels.build import build_library
from vkit.kernels.compiler import BuildError, Unit, source_key
from vkit.kernels.cpu.sources import FLAGS, LEVEL_FLAGS, compiler_calls, library_name

logger = logging.getLogger("vkit.kernels")

LEVEL_VARIABLE = "VKIT_CPU_LEVEL"
ABI: Final = 2
ROWS_TOKENS, ROWS_LOGITS, ROWS_SEQS = -1, -2, -3
FLAG_INDEPENDENT = 1

OPCODES = (
    *("PACK", "QUANTIZE", "GEMM", "GEMM_PAIRS", "GEMM_EXACT", "DENSE", "EMBED", "RMS_NORM", "GLU", "ROPE", "WRITE_KV"),
    *("ATTENTION", "ATTENTION_JOIN", "COMBINE", "UNARY", "LAYER_NORM", "ARGMAX", "READ", "DRAW"),
    *("SCALE_ROWS", "REPLACE_IDS", "HEAD_DENSE", "CONV", "LOG_DECAY", "DELTA", "SCAN"),
    *("ROUTE", "EXPERT_SORT", "EXPERT_ROWS", "EXPERT_GEMM", "EXPERT_JOIN"),
)
OPCODE: dict[str, int] = {name: index for index, name in enumerate(OPCODES)}


class Op(ctypes.Structure):
    """One operation: VkOp of vk.h. What the numbers mean is said above each kernel."""

    _fields_ = (
        ("opcode", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("row_factor", ctypes.c_int64),
        ("p", ctypes.c_void_p * 10),
        ("n", ctypes.c_int64 * 20),
        ("f", ctypes.c_float * 4),
    )


class Step(ctypes.Structure):
    """What changes from step to step: VkStep of vk.h."""

    _fields_ = (("num_tokens", ctypes.c_int64), ("num_logits", ctypes.c_int64), ("num_seqs", ctypes.c_int64))


class LibraryError(RuntimeError):
    """The native library cannot be used; the message is one clause."""


class Library:
    """The loaded library at one level."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryError(f"{path} cannot be loaded: {error}") from error
        self._declare()
        if self._c.vk_abi() != ABI or self._c.vk_op_size() != ctypes.sizeof(Op):
            raise LibraryError(f"{path} is of another version")
        self.block_bytes: int = self._c.vk_block_bytes()
        """Bytes of 32 quantised activations."""

    def _declare(self) -> None:
        c, i32, i64, pointer = self._c, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
        for name, result, arguments in (
            ("vk_abi", i32, ()),
            ("vk_op_size", i32, ()),
            ("vk_block_bytes", i32, ()),
            ("vk_can_run", i32, (ctypes.c_char_p,)),
            ("vk_use_level", i32, (ctypes.c_char_p,)),
            ("vk_current_level", ctypes.c_char_p, ()),
            ("vk_set_num_threads", None, (i32,)),
            ("vk_num_threads", i32, ()),
            ("vk_run", i32, (pointer, i32, pointer)),
            ("vk_group_bytes", i64, (i32, i64)),
            ("vk_row_bytes", i64, (i32, i64)),
            ("vk_alloc", pointer, (i64,)),
            ("vk_free", None, (pointer,)),
            ("vk_release_mapping", None, (pointer, i64)),
        ):
            function = getattr(c, name)
            function.restype, function.argtypes = result, arguments

    def can_run(self, level: str) -> bool:
        """Whether this processor has what a level needs."""
        return bool(self._c.vk_can_run(level.encode()))

    @property
    def level(self) -> str:
        """The level in use."""
        name: bytes = self._c.vk_current_level()
        return name.decode()

    def use_level(self, level: str) -> None:
        """Run kernels of this level from now on.

        Raises:
            ValueError: unknown, or more than this processor has.
        """
        if level not in LEVEL_FLAGS:
            raise ValueError(f"{LEVEL_VARIABLE}={level}: expected one of {', '.join(LEVEL_FLAGS)}")
        if not self._c.vk_use_level(level.encode()):
            raise ValueError(f"{LEVEL_VARIABLE}={level}: this processor runs {', '.join(self.levels)}")

    @property
    def levels(self) -> list[str]:
        """The levels this processor runs, lowest first."""
        return [level for level in LEVEL_FLAGS if self.can_run(level)]

    @property
    def num_threads(self) -> int:
        """Threads that share the work, the caller's included."""
        count: int = self._c.vk_num_threads()
        return count

    def set_num_threads(self, count: int) -> None:
        """Share the work between `count` threads from now on; results do not depend on it."""
        self._c.vk_set_num_threads(count)

    def run(self, ops: ctypes.Array[Op], step: Step) -> None:
        """Run a program; other Python threads go on meanwhile.

        Raises:
            MemoryError: no memory for the kernels' working space.
            ValueError: the program is malformed.
        """
        code = self._c.vk_run(ctypes.addressof(ops), len(ops), ctypes.addressof(step))
        if code:
            raise (
                MemoryError("native kernels: no memory") if code == 12 else ValueError(f"native kernels: error {code}")
            )

    def run_now(self, *ops: Op) -> None:
        """Run ops whose row counts are literal."""
        self.run((Op * len(ops))(*ops), NO_STEP)

    def group_bytes(self, format_id: int, columns: int) -> int:
        """Bytes of 16 packed rows; 0 for a format or a width that is not packed."""
        size: int = self._c.vk_group_bytes(format_id, columns)
        return size

    def allocate(self, num_bytes: int) -> int:
        """Address of new memory, on huge pages where there are any.

        Raises:
            MemoryError: there is none.
        """
        address = self._c.vk_alloc(num_bytes)
        if not address:
            raise MemoryError(f"native kernels: no memory for {num_bytes} bytes")
        return int(address)

    def free(self, address: int) -> None:
        """Give memory of `allocate` back."""
        self._c.vk_free(address)

    def release_mapping(self, address: int, num_bytes: int) -> None:
        """Give pages of a file mapped for reading back; the system's cache keeps them. Other memory stays as it is."""
        self._c.vk_release_mapping(address, num_bytes)


NO_STEP = Step(0, 0, 0)


def make_op(
    name: str,
    rows: int,
    pointers: Sequence[int | None],
    numbers: Sequence[int],
    floats: Sequence[float] = (),
    *,
    row_factor: int = 1,
    flags: int = 0,
) -> Op:
    """An op of that name (see OPCODES)."""
    op = Op(OPCODE[name], flags, rows, row_factor)
    op.p[: len(pointers)] = [*pointers]
    op.n[: len(numbers)] = [*numbers]
    if floats:
        op.f[: len(floats)] = [*floats]
    return op


@cache
def load_library() -> Library:
    """The library, built if need be, at the best level or the one that VKIT_CPU_LEVEL names.

    Raises:
        LibraryError: it cannot be built or loaded here.
        ValueError: VKIT_CPU_LEVEL names no level, or one this processor lacks.
    """
    if not sys.platform.startswith("linux"):
        raise LibraryError(f"the native kernels need Linux, this is {sys.platform}")
    wanted = os.environ.get(LEVEL_VARIABLE)
    if wanted is not None and wanted not in LEVEL_FLAGS:
        raise ValueError(f"{LEVEL_VARIABLE}={wanted}: expected one of {', '.join(LEVEL_FLAGS)}")
    library = _installed() or _built()
    library.use_level(wanted if wanted is not None else library.levels[-1])
    return library


def _installed() -> Library | None:
    """The library that was compiled when the package was, if it fits its sources and this machine."""
    path = _FOLDER / library_name(source_key(*_sources(), FLAGS))
    if not path.exists():
        return None
    try:
        return Library(path)
    except LibraryError as reason:
        logger.warning("the kernels in the package are not used: %s", reason)
        return None


def _built() -> Library:
    try:
        return Library(build_library("cpu", *_sources(), FLAGS))
    except BuildError as error:
        raise LibraryError(str(error)) from error


_FOLDER = Path(__file__).parent


def _sources() -> tuple[list[Unit], list[Path]]:
    return [Unit(*call) for call in compiler_calls(_FOLDER)], list(_FOLDER.glob("*.h"))
