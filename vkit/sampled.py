"""Tokens on the device that the host has not seen yet: the next step reads them there, the host a step later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the step before sampled."""

    ids: Tensor
    """(R,) int64 on the device."""
    rows: Mapping[str, int]
    """Sequence id -> its row."""


Found = tuple[list[int], list[float]]
"""Token ids, and the largest logit of each row."""


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """A step's choices on their way to the host."""

    sampled: SampledTokens
    items: list[int]
    """Which items of the plan have a row."""
    wait: Callable[[], Found]


class Readback:
    """Brings ids and the values beside them to the host, beside whatever the device computes meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, ids: Tensor, values: Tensor) -> Callable[[], Found]:
        """Start the copy of ids (R,) int64 and values (R,) float32; what is returned waits for it and gives both."""
        if self._stream is None:
            return lambda: (ids.tolist(), values.tolist())
        ready = torch.cuda.Event()
        ready.record()
        host_ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        host_values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host_ids.copy_(ids, non_blocking=True)
            host_values.copy_(values, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        for tensor in (ids, values):
            tensor.record_stream(self._stream)

        def found() -> Found:
            done.synchronize()
            return host_ids.tolist(), host_values.tolist()

        return found
