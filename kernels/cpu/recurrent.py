"""Ops with one state per sequence: convolution, gated delta rule, Mamba-2."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.cpu.base import OpsBase, Pointers, address, are_heads, collapsed_stride, dtype_id, region, whole
from vkit.kernels.cpu.dtypes import DTYPE_IDS
from vkit.kernels.cpu.library import ROWS_SEQS, make_op
from vkit.kernels.cpu.tape import Node, Recording, Region
from vkit.kernels.recurrent import ScanConstants, StateBatch

_MAX_TAPS = 8


class RecurrentOps(OpsBase):
    """Signatures of the reference ops."""

    def causal_conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch) -> Tensor:
        """silu of the convolution over each sequence's past and present."""
        stride, taps = collapsed_stride(x), weight.shape[1]
        fits = weight.is_contiguous() and weight.dtype in DTYPE_IDS and 1 < taps <= _MAX_TAPS
        fits = fits and (bias is None or (bias.is_contiguous() and bias.dtype in DTYPE_IDS))
        if stride is None or not fits or not _is_state(state) or not _fits(batch):
            return self._fallback("causal_conv1d", x, weight, bias, state, batch)
        tape = self.tape
        out = tape.empty(x.shape, x.dtype)
        numbers = (
            *(weight.shape[0], taps, DTYPE_IDS[x.dtype], stride, DTYPE_IDS[state.dtype], state.stride(0)),
            *(DTYPE_IDS[weight.dtype], dtype_id(bias)),
        )
        pointers = (
            *(x.data_ptr(), weight.data_ptr(), address(bias), state.data_ptr(), out.data_ptr(), None, None),
            *_sequences(batch),
        )
        op = make_op("CONV", self._num_sequences(batch), pointers, numbers)
        tape.put([Node(op, [region(x, stride), whole(state)], [region(out), whole(state)])])
        return out

    def log_decay(self, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        """−exp(rate) · softplus(x + bias) in float32."""
        width = x.shape[2] if x.ndim == 3 else 1
        is_flat = x.ndim < 3 or (x.stride(2) == 1 and x.stride(1) == width)
        if not is_flat or x.ndim not in (2, 3) or (x.ndim == 2 and x.stride(1) != 1):
            return self._fallback("log_decay", x, rate, bias)
        tape = self.tape
        out = tape.empty(x.shape, torch.float32)
        rows, factor = tape.rows(x.shape[:1])
        pointers = (x.data_ptr(), self._float_constant(rate), self._float_constant(bias), out.data_ptr())
        numbers = (x.shape[1], width, DTYPE_IDS[x.dtype], x.stride(0))
        op = make_op("LOG_DECAY", rows, pointers, numbers, row_factor=factor)
        tape.put([Node(op, [region(x.flatten(1), x.stride(0))], [region(out.flatten(1))])])
        return out

    def gated_delta_net(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        write: Tensor,
        state: Tensor,
        batch: StateBatch,
        is_tiled: bool = False,
    ) -> Tensor:
        """The gated delta rule over each sequence."""
        same = all(_are_adjacent(x) and x.dtype is v.dtype for x in (q, k, v)) and write.dtype in DTYPE_IDS
        flat = decay.dtype is torch.float32 and decay[0:1].is_contiguous() and write.stride(1) == 1
        if not same or not flat or not _is_state(state) or not _fits(batch):
            return self._fallback("gated_delta_net", q, k, v, decay, write, state, batch, is_tiled)
        tape = self.tape
        out = tape.empty(v.shape, v.dtype)
        numbers = (
            *(q.shape[1], q.shape[2], v.shape[1], v.shape[2], DTYPE_IDS[v.dtype], q.stride(0), k.stride(0)),
            *(v.stride(0), decay.stride(0), write.stride(0), v.shape[1] * v.shape[2], DTYPE_IDS[state.dtype]),
            *(state.stride(0), int(decay.ndim == 3), int(is_tiled), DTYPE_IDS[write.dtype], int(self.is_deterministic)),
        )
        pointers: Pointers = (
            *(x.data_ptr() for x in (q, k, v, decay, write, state, out)),
            *_sequences(batch),
        )
        op = make_op("DELTA", self._num_sequences(batch), pointers, numbers)
        reads = [_rows_of(x) for x in (q, k, v, decay, write)]
        tape.put([Node(op, [*reads, whole(state)], [region(out.flatten(1)), whole(state)])])
        return out

    def mamba2_scan(
        self, x: Tensor, step: Tensor, b: Tensor, c: Tensor, constants: ScanConstants, state: Tensor, batch: StateBatch
    ) -> Tensor:
        """The selective state space over each sequence."""
        same = all(_are_adjacent(value) and value.dtype is x.dtype for value in (x, b, c)) and step.dtype in DTYPE_IDS
        if not same or step.stride(1) != 1 or not _is_state(state) or not _fits(batch):
            return self._fallback("mamba2_scan", x, step, b, c, constants, state, batch)
        tape = self.tape
        out = tape.empty(x.shape, x.dtype)
        numbers = (
            *(b.shape[1], b.shape[2], x.shape[1], x.shape[2], DTYPE_IDS[x.dtype], x.stride(0), step.stride(0)),
            *(b.stride(0), c.stride(0), x.shape[1] * x.shape[2], DTYPE_IDS[step.dtype], DTYPE_IDS[state.dtype]),
            state.stride(0),
        )
        pointers: Pointers = (
            *(value.data_ptr() for value in (x, step, b, c)),
            *(self._scan_constants(constants), state.data_ptr(), out.data_ptr()),
            *_sequences(batch),
        )
        op = make_op("SCAN", self._num_sequences(batch), pointers, numbers, (constants.least_step,))
        reads = [_rows_of(value) for value in (x, step, b, c)]
        tape.put([Node(op, [*reads, whole(state)], [region(out.flatten(1)), whole(state)])])
        return out

    def _num_sequences(self, batch: StateBatch) -> int:
        return ROWS_SEQS if isinstance(self.tape, Recording) else batch.blocks.shape[0]

    def _scan_constants(self, constants: ScanConstants) -> int:
        """Address of rate, skip and step bias, row by row in float32."""
        known = self._constants.get(id(constants))
        if known is None or known[0] is not constants:
            with torch._C.DisableTorchFunction():
                joined = torch.stack([constants.rate, constants.skip, constants.step_bias]).float()
            self._constants[id(constants)] = known = constants, joined
        return known[1].data_ptr()


def _sequences(batch: StateBatch) -> tuple[int, int, int]:
    return batch.cu_seqlens.data_ptr(), batch.blocks.data_ptr(), batch.is_fresh.data_ptr()


def _fits(batch: StateBatch) -> bool:
    """Whether the ops read and write the batch's states; a state after each token is plain torch's to keep."""
    if batch.targets is not None:
        return False
    tensors = (batch.cu_seqlens, torch.int32), (batch.blocks, torch.int64), (batch.is_fresh, torch.bool)
    return all(x.is_contiguous() and x.dtype is dtype for x, dtype in tensors)


def _is_state(state: Tensor) -> bool:
    """Whether each sequence's own values lie together."""
    return state.dtype in DTYPE_IDS and (state.shape[0] == 0 or state[0].is_contiguous())


def _are_adjacent(x: Tensor) -> bool:
    return are_heads(x, None) and (x.shape[1] == 1 or x.stride(1) == x.shape[2])


def _rows_of(x: Tensor) -> Region:
    return region(x.flatten(1) if x.ndim == 3 and x.stride(1) == x.shape[2] else x, x.stride(0))
