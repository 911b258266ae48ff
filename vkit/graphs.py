"""Decoding steps recorded once and replayed: a CUDA graph per number of rows, over fixed memory.

Launching a step's hundreds of kernels one by one takes the host longer than a card takes to run them. What is captured
is the whole pass of one token per sequence; everything else runs op by op. Which of both a step gets is decided for it
alone, and changes no token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from vkit.decode_inputs import DecodeShape, NotCapturable
from vkit.sequence import Plan

logger = logging.getLogger("vkit.graphs")

Run = Callable[[], None]

FIRST_BOUND = 2048
BOUND_FACTOR = 4
"""Lengths a capture is made for, each so many times the one before. A capture launches work for its longest sequence:
one for all lengths would launch mostly nothing, and one per length would be too many. Not measured."""
SMALL_SIZES = (1, 2, 4, 8)
SIZE_STEP = 8
LARGE_SIZE = 256
LARGE_SIZE_STEP = 16
WARM_UPS = 2


class Recorder(Protocol):
    """How work is captured. `run` always reads and writes the same memory."""

    def watch(self) -> AbstractContextManager[object]:
        """Raises NotCapturable inside, where a pass does what a replay would not do again."""

    def record(self, run: Run) -> Run:
        """Run `run` a few times, and return what does the same work again on what the memory then holds."""


class CudaRecorder:
    """CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def watch(self) -> AbstractContextManager[object]:
        """Refuses values that cross between host and device."""
        return NoHostReads()

    def record(self, run: Run) -> Run:
        """Warm up, so that libraries and kernels are loaded and what they keep is allocated, then capture."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads go on using the device, as the one that reads tokens back does: only this one's calls count.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:  # an interrupt included: a stream left capturing takes no other work
                with suppress(RuntimeError):  # ending what has failed fails too; what failed first is what to tell
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Run = graph.replay
        return replay


def recorder_for(device: torch.device) -> Recorder | None:
    """What captures on this device; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Row counts to capture: 1, 2, 4, 8, by 8 to 256, then by 16; the last holds `max_num_seqs`."""
    sizes = [*SMALL_SIZES]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + (SIZE_STEP if sizes[-1] < LARGE_SIZE else LARGE_SIZE_STEP))
    kept = [size for size in sizes if size < max_num_seqs]
    return (*kept, max_num_seqs)


def length_bounds(max_model_len: int) -> tuple[int, ...]:
    """Lengths to capture for, ascending; the last is `max_model_len`."""
    bounds = []
    bound = FIRST_BOUND
    while 2 * bound <= max_model_len:
        bounds.append(bound)
        bound *= BOUND_FACTOR
    return (*bounds, max_model_len)


class DecodeGraphs:
    """The captured steps of one model over one cache. They hold addresses: with either, they end."""

    def __init__(
        self,
        step: Callable[[Any], Tensor],
        batch_of: Callable[[DecodeShape], Any],
        recorder: Recorder,
        *,
        sizes: Sequence[int],
        max_model_len: int,
    ) -> None:
        """`step`: the forward pass, batch to logits (R, V). `batch_of`: a fresh batch over the fixed inputs."""
        self._step = step
        self._batch_of = batch_of
        self._recorder = recorder
        self.sizes = tuple(sorted(set(sizes)))
        self.bounds = length_bounds(max_model_len)
        self._replays: dict[DecodeShape, Run] = {}
        self._failed: set[DecodeShape] = set()
        self._logits: Tensor | None = None
        self.refusal: str | None = None
        """Why steps of this model cannot be captured; None while nothing says so."""
        self.num_replayed = 0

    @property
    def num_captured(self) -> int:
        """Captured steps."""
        return len(self._replays)

    def shape_for(self, plan: Plan) -> DecodeShape | None:
        """The captured shape that this plan is padded to; None: it runs op by op."""
        if self.refusal is not None or not 0 < len(plan.scheduled) <= self.sizes[-1]:
            return None
        longest = 0
        for item in plan.scheduled:
            sequence = item.sequence
            is_decode = item.num_tokens == 1 and item.num_logits == 1 and not item.num_drafts
            if not is_decode or (sequence.media and item.start < sequence.num_prompt_tokens):
                return None
            longest = max(longest, item.start + 1)
        shape = DecodeShape(
            next(size for size in self.sizes if size >= len(plan.scheduled)),
            next(bound for bound in self.bounds if bound >= longest),
        )
        return None if shape in self._failed else shape

    def has(self, shape: DecodeShape) -> bool:
        """Whether steps of this shape are captured."""
        return shape in self._replays

    def run(self, shape: DecodeShape, num_rows: int) -> Tensor:
        """Logits (num_rows, V) of the step whose inputs have been filled in, for a shape that is captured."""
        self._replays[shape]()
        self.num_replayed += 1
        assert self._logits is not None, "captured steps have logits"
        # A copy, since the next replay writes to the same place while these rows may still be read.
        return self._logits[:num_rows].clone()

    def capture_all(self) -> None:
        """Capture every size for the shortest bound, largest first, so that the others find room in its memory.

        The longer bounds are captured when a sequence first needs them. As `capture`.
        """
        started = time.monotonic()
        for size in reversed(self.sizes):
            self.capture(DecodeShape(size, self.bounds[0]))
            if self.refusal is not None:
                return
        elapsed = time.monotonic() - started
        logger.info(
            "captured %d decoding steps of up to %d sequences in %.1f s", self.num_captured, self.sizes[-1], elapsed
        )

    def capture(self, shape: DecodeShape) -> bool:
        """Capture a step of this shape; False if it cannot be.

        The pass runs several times on the way, so the inputs must hold padding alone: states would advance.
        """
        try:
            if self._logits is None:
                self._try_out(shape)
            self._replays[shape] = self._recorder.record(lambda: self._write_logits(shape))
        except NotCapturable as reason:
            self._refuse(str(reason))
            return False
        except torch.OutOfMemoryError:
            self._failed.add(shape)
            logger.warning("no memory left to capture steps of %d sequences: they run op by op", shape.num_rows)
            return False
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            self._refuse(str(error).splitlines()[0])
            return False
        return True

    def close(self) -> None:
        """Let go of the captured steps and the memory they hold."""
        self._replays.clear()
        self._logits = None
        self.refusal = "closed"

    def _try_out(self, shape: DecodeShape) -> None:
        """Run, then once more watching for what a replay could not do, and set the logits' memory apart.

        Not watched the first time, when kernels are loaded and what is kept for good is made and sent.
        """
        self._step(self._batch_of(shape))
        with self._recorder.watch():
            logits = self._step(self._batch_of(shape))
        self._logits = torch.empty(self.sizes[-1], logits.shape[1], dtype=logits.dtype, device=logits.device)

    def _write_logits(self, shape: DecodeShape) -> None:
        """The pass, with a batch made anew: what layers keep in one is derived again in each replay."""
        assert self._logits is not None, "set apart before anything is captured"
        self._logits[: shape.num_rows].copy_(self._step(self._batch_of(shape)))

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._replays.clear()
        logger.warning("decoding steps are not captured, they run op by op: %s", reason)


_HOST_READS = frozenset(
    {
        *("item", "tolist", "cpu", "nonzero", "masked_select", "unique", "equal", "is_nonzero"),
        *("__int__", "__float__", "__bool__", "__index__", "__array__"),
    }
)


class NoHostReads(TorchFunctionMode):
    """Refuses what makes the host wait for a value or sends it one: a replay would do neither."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_index_by_mask = name == "__getitem__" and _has_mask(args[1])
        if name in _HOST_READS or is_index_by_mask or (func is torch.tensor):
            raise NotCapturable(f"the pass calls {resolve_name(func) or name} between host and device")
        return func(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in parts)
