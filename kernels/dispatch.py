"""Which implementation of an op runs: chosen once per device type and dtype, then reached by plain attribute access.

A backend is a named set of implementations for one device type. The reference (plain torch) knows every op and runs
everywhere; a native backend registers the ops it has, and the reference takes the rest.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vkit.kernels.scaled import ScaledMatrix

logger = logging.getLogger("vkit.kernels")

Op = Callable[..., Any]
StepFunction = Callable[[Any], Tensor]
"""One forward pass: a batch in, logits out."""

REFERENCE = "reference"

BUILTIN_BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("vkit.kernels.cpu.backend",),
    "cuda": ("vkit.kernels.cuda.backend", "vkit.kernels.triton.backend"),
}
"""Per device type, the modules that call `register_backend` when imported, best first."""


PLAIN_OPS = frozenset(
    {
        *(
            "add_rows",
            "axis_table",
            "clamp",
            "largest_rows",
            "mask_tokens",
            "penalise",
            "put_rows",
            "segment_attention",
        ),
        *("hyper_enter", "hyper_head_weights", "hyper_leave", "hyper_weights", "limited_silu_and_mul"),
        *("route_by_root", "spread_streams", "store_rows"),
    }
)
"""What plain torch runs well on every device: moves of rows, and attention that its own kernels cover."""


class OpFinder(Protocol):
    """How a backend is asked for an implementation."""

    def __call__(self, op: str, dtype: torch.dtype, /) -> Op | None:
        """The implementation of `op` for activations of `dtype`, or None if there is none."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A named set of implementations. Each has the signature of the reference op of the same name."""

    name: str
    device_type: str
    """"cpu" or "cuda"."""
    find: OpFinder
    unavailable: str | None = None
    """Why this machine cannot run it, in one clause; None if it can."""
    wrap_step: Callable[[StepFunction], StepFunction] | None = None
    """Given the whole forward pass, returns what the runner calls instead: here ops may be recorded and replayed."""
    kv_layout: Callable[..., tuple[Tensor, Tensor]] | None = None
    """Replaces `default_kv_layout`, same arguments."""
    pack: Callable[[Tensor, str], tuple[Tensor, str]] | None = None
    """Packed rows (..., row_bytes) and their type, laid out as its kernels want them, under the type's own name."""
    pack_scaled: Callable[[ScaledMatrix], ScaledMatrix] | None = None
    """Codes with scales, laid out as its kernels want them."""
    configure: Callable[[int, bool, bool], None] | None = None
    """Takes the number of threads, whether activations stay in floating point, and whether cuts may change no bit."""
    report: Callable[[], Mapping[str, str | int | float]] | None = None
    """Measures the machine: level, threads and bytes_per_s for the CPU. Takes up to a second."""


class OpTable:
    """The implementations in use for one device type and dtype: an attribute per op, resolved at first use."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._dtype = dtype

    def __getattr__(self, op: str) -> Op:
        # Runs only while the attribute is missing; afterwards the call costs a dictionary look-up.
        implementation = _resolve(op, self._device_type, self._dtype)
        setattr(self, op, implementation)
        return implementation


class _Tables(dict[torch.dtype, OpTable]):
    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __missing__(self, dtype: torch.dtype) -> OpTable:
        self[dtype] = table = OpTable(self._device_type, dtype)
        return table


_cpu = _Tables("cpu")
_cuda = _Tables("cuda")
_backends: dict[str, list[Backend]] = {"cpu": [], "cuda": []}
_builtin_loaded: set[str] = set()
_forced: dict[str, str] = {}
_reported: set[tuple[str, str]] = set()


def ops(x: Tensor) -> OpTable:
    """The implementations for tensors like `x`."""
    return (_cuda if x.is_cuda else _cpu)[x.dtype]


def ops_for(device_type: str, dtype: torch.dtype) -> OpTable:
    """The implementations for activations of `dtype` on a device type, where no activation exists yet."""
    return (_cuda if device_type == "cuda" else _cpu)[dtype]


def register_backend(backend: Backend) -> None:
    """Offer a backend; earlier ones are preferred. A second one of the same name replaces the first."""
    others = [item for item in _backends[backend.device_type] if item.name != backend.name]
    _backends[backend.device_type] = [*others, backend]
    _forget_choices()


def backends(device_type: str) -> list[Backend]:
    """All registered backends of a device type, best first; the reference is not among them."""
    if device_type not in _builtin_loaded:
        names = [importlib.import_module(module).NAME for module in BUILTIN_BACKENDS[device_type]]
        _builtin_loaded.add(device_type)  # not before: a module that refuses to load must refuse the next time too
        # One module may import another, which then registers first.
        _backends[device_type].sort(key=lambda item: names.index(item.name) if item.name in names else -1)
    return list(_backends[device_type])


def use_backend(device_type: str, name: str | None) -> None:
    """Take ops from backend `name` alone (then the reference); None returns to the automatic choice.

    Raises:
        ValueError: no such backend, or this machine cannot run it.
    """
    if name is None:
        _forced.pop(device_type, None)
    else:
        known = {backend.name: backend for backend in backends(device_type)}
        if name != REFERENCE and name not in known:
            raise ValueError(f"backend {name!r}, expected one of {', '.join([*known, REFERENCE])} for {device_type}")
        if name != REFERENCE and known[name].unavailable:
            raise ValueError(f"backend {name!r} cannot run here: {known[name].unavailable}")
        _forced[device_type] = name
    _forget_choices()


@contextmanager
def using_backend(device_type: str, name: str) -> Iterator[None]:
    """`use_backend` for the length of a with block."""
    before = _forced.get(device_type)
    use_backend(device_type, name)
    try:
        yield
    finally:
        use_backend(device_type, before)


def usable_backends(device_type: str) -> list[Backend]:
    """The backends that would be asked for an op, in order."""
    forced = _forced.get(device_type)
    return [
        backend
        for backend in backends(device_type)
        if backend.unavailable is None and (forced is None or backend.name == forced)
    ]


def wrap_step(device_type: str, step: StepFunction) -> StepFunction:
    """`step`, or what the first usable backend wants to run in its place."""
    for backend in usable_backends(device_type):
        if backend.wrap_step is not None:
            return backend.wrap_step(step)
    return step


def kv_layout(
    pages: Tensor, block_size: int, num_kv_heads: int, head_dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of one layer as views of `pages` (N, page_bytes) uint8, in the layout the device's kernels want."""
    for backend in usable_backends(pages.device.type):
        if backend.kv_layout is not None:
            return backend.kv_layout(pages, block_size, num_kv_heads, head_dims, dtype)
    return default_kv_layout(pages, block_size, num_kv_heads, head_dims, dtype)


def pack(data: Tensor, qtype: str) -> tuple[Tensor, str]:
    """Packed rows and their type in the layout that the device's kernels want; as they are if they want none."""
    for backend in usable_backends(data.device.type):
        if backend.pack is not None:
            return backend.pack(data, qtype)
    return data, qtype


def pack_scaled(matrix: ScaledMatrix) -> ScaledMatrix:
    """Codes with scales in the layout that the device's kernels want; as they are if they want none."""
    for backend in usable_backends(matrix.device.type):
        if backend.pack_scaled is not None:
            return backend.pack_scaled(matrix)
    return matrix


def default_kv_layout(
    pages: Tensor, block_size: int, num_kv_heads: int, head_dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K (N, S, K, D) and V (N, S, K, Dv), all keys of a page before its values."""
    key_dim, value_dim = head_dims
    values = pages.view(dtype)
    num_keys = block_size * num_kv_heads * key_dim
    num_values = block_size * num_kv_heads * value_dim
    k = values[:, :num_keys].unflatten(1, (block_size, num_kv_heads, key_dim))
    v = values[:, num_keys : num_keys + num_values].unflatten(1, (block_size, num_kv_heads, value_dim))
    return k, v


def kv_by_token(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of K and V, as `kv_layout` made them, that read as (N, S, K, D) and (N, S, K, Dv) once reshaped.

    Token and width may be two or three dimensions each; what is written to the views lands in the pages.
    """
    if k.ndim == 4:
        return k, v
    if k.ndim == 6:  # tiles of pairs: (N, K, S/16, D/2, 16, 2) and (N, K, S/2, Dv, 2)
        return k.permute(0, 2, 4, 1, 3, 5), v.permute(0, 2, 4, 1, 3)
    return k.permute(0, 2, 4, 1, 3), v.transpose(1, 2)  # tiles: (N, K, S/16, D, 16) and (N, K, S, Dv)


def _resolve(op: str, device_type: str, dtype: torch.dtype) -> Op:
    usable = usable_backends(device_type)
    for backend in usable:
        found = backend.find(op, dtype)
        if found is not None:
            _report_better(device_type, backend)
            return found
    if op in PLAIN_OPS:
        pass
    elif usable and _forced.get(device_type) != REFERENCE:
        names = " or ".join(backend.name for backend in usable)
        _report_once(device_type, f"{op}: no {names} kernel for {dtype}; plain torch runs it")
    elif not usable and device_type not in _forced:
        for backend in backends(device_type):
            _report_once(device_type, f"{backend.name} kernels are not used: {backend.unavailable}; plain torch runs")
    reference = reference_ops()
    if op not in reference:
        raise AttributeError(f"no op named {op!r}")
    return reference[op]


def next_best(op: str, x: Tensor, after: str) -> Op:
    """The implementation for tensors like `x` once backend `after` is passed over: a later one's, or plain torch.

    For calls of an op that a backend has, but not for these arguments.
    """
    usable = usable_backends(x.device.type)
    names = [backend.name for backend in usable]
    for backend in usable[names.index(after) + 1 :] if after in names else ():
        found = backend.find(op, x.dtype)
        if found is not None:
            return found
    return reference_ops()[op]


def _report_better(device_type: str, chosen: Backend) -> None:
    """Say once which better backends this machine cannot run."""
    if device_type not in _forced:
        for backend in itertools.takewhile(lambda item: item is not chosen, backends(device_type)):
            if backend.unavailable:
                line = f"{backend.name} kernels are not used: {backend.unavailable}; {chosen.name} runs"
                _report_once(device_type, line)


def reference_ops() -> Mapping[str, Op]:
    """The plain torch implementation of every op."""
    # Imported here because reference modules may themselves import from this package.
    ops: Mapping[str, Op] = importlib.import_module("vkit.kernels.reference").OPS
    return ops


def configure(device_type: str, *, num_threads: int, is_exact: bool, is_deterministic: bool = False) -> None:
    """Tell the device's backends how many threads to use, whether activations must stay in floating point, and whether
    a sequence's sums must not depend on where its prompt is cut."""
    for backend in usable_backends(device_type):
        if backend.configure is not None:
            backend.configure(num_threads, is_exact, is_deterministic)


def _report_once(device_type: str, line: str) -> None:
    if (device_type, line) not in _reported:
        _reported.add((device_type, line))
        logger.warning("%s", line)


def _forget_choices() -> None:
    _cpu.clear()
    _cuda.clear()
