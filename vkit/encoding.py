"""Runs towers and keeps what they made: the device's side of `vkit.cache.media`, whose orders it follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.batch import MediaRows
from vkit.media import MediaInput, PlacedMedia
from vkit.models.base import EncodedMedia
from vkit.sequence import MediaOrders, Plan, ScheduledSequence


@dataclass(frozen=True, slots=True)
class MediaSlice:
    """Neighbouring rows of one encoded item that neighbouring tokens of a step take."""

    digest: bytes
    first: int
    """The first of the rows."""
    count: int
    token: int
    """The token of the step that takes it."""


@dataclass(frozen=True, slots=True)
class MediaStep:
    """A step's share of the media: what to forget, what to encode, what to put where."""

    orders: MediaOrders
    slices: list[MediaSlice]


class MediaEncoder:
    """Encoded items by digest."""

    def __init__(self, encode: Callable[[MediaInput], EncodedMedia], device: torch.device) -> None:
        self._encode = encode
        self._device = device
        self._encoded: dict[bytes, EncodedMedia] = {}
        self._num_threads = torch.get_num_threads()

    @staticmethod
    def prepare(plan: Plan) -> MediaStep:
        """What the plan means for media; host work, to be done before the next plan is made."""
        slices: list[MediaSlice] = []
        token = 0
        for item in plan.scheduled:
            for placed in item.sequence.media:
                slices += _slices(placed, item, token)
            token += item.num_tokens
        return MediaStep(plan.media, slices)

    def run(self, step: MediaStep) -> MediaRows | None:
        """Follow the orders; the rows that the step's tokens take, or None if none takes any."""
        orders, encoded = step.orders, self._encoded
        if orders.clears:
            encoded.clear()
        for digest in orders.free:
            del encoded[digest]
        if orders.encode:
            self._fill(orders.encode)
        if not step.slices:
            return None
        rows = torch.cat([torch.arange(piece.token, piece.token + piece.count) for piece in step.slices])
        taken = [encoded[piece.digest] for piece in step.slices]
        features = [
            _joined([item.features[index] for item in taken], step.slices) for index in range(len(taken[0].features))
        ]
        return MediaRows(rows.to(self._device), _joined([item.embeddings for item in taken], step.slices), features)

    def _fill(self, items: list[MediaInput]) -> None:
        """Encode the items with all threads, of which a backend that records steps leaves torch but one."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            for item in items:
                self._encoded[item.digest] = self._encode(item)
        finally:
            torch.set_num_threads(before)


def _slices(placed: PlacedMedia, item: ScheduledSequence, token: int) -> list[MediaSlice]:
    """The rows of one item that a sequence's share takes; its first token is `token` of the step."""
    found = []
    first_row = 0
    for start, stop in placed.spans:
        first, beyond = max(start, item.start), min(stop, item.start + item.num_tokens)
        if first < beyond:
            row = first_row + first - start
            found.append(MediaSlice(placed.item.digest, row, beyond - first, token + first - item.start))
        first_row += stop - start
    return found


def _joined(sources: list[Tensor], slices: list[MediaSlice]) -> Tensor:
    return torch.cat([x[piece.first : piece.first + piece.count] for x, piece in zip(sources, slices, strict=True)])
