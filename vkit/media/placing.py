"""Placeholders of a prompt grow into the tokens that take a tower's rows; positions follow the grids."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vkit.errors import InvalidRequest
from vkit.media.inputs import MediaInput, PlacedMedia
from vkit.media.items import MediaKind


def place_media(
    token_ids: Sequence[int],
    items: Sequence[MediaInput],
    pad_ids: Mapping[MediaKind, int],
    frame_marks: tuple[int, int] | None = None,
) -> tuple[list[int], tuple[PlacedMedia, ...]]:
    """The prompt with each item's placeholder replaced, and where the items lie.

    A prompt has one pad per item of a kind, or all of them already (as many as the items have rows together). A kind
    without items is left alone: its pads are ordinary tokens. A video's replacement brings the marks around its frames
    along (`frame_marks`), so it takes the place of such marks around its placeholder too.

    Raises:
        InvalidRequest: the numbers of placeholders and items do not match.
    """
    waiting = {kind: [item for item in items if item.kind == kind] for kind in pad_ids}
    kind_of = {pad_ids[kind]: kind for kind, listed in waiting.items() if listed}
    grows = {kind: _grows(kind, token_ids, listed, pad_ids[kind]) for kind, listed in waiting.items() if listed}
    out: list[int] = []
    placed: list[PlacedMedia] = []
    open_spans: dict[MediaKind, list[tuple[int, int]]] = {}
    index = 0
    while index < len(token_ids):
        token_id = token_ids[index]
        index += 1
        kind = kind_of.get(token_id)
        if kind is None:
            out.append(token_id)
        elif grows[kind]:
            item = waiting[kind].pop(0)
            if item.kind == "video" and frame_marks is not None and _is_marked(token_ids, index - 1, frame_marks):
                out.pop()
                index += 1
            placed.append(PlacedMedia(item, _pad_runs(item, len(out))))
            out.extend(item.replacement)
        else:
            spans = open_spans.setdefault(kind, [])
            _extend(spans, len(out))
            out.append(token_id)
            item = waiting[kind][0]
            if sum(stop - start for start, stop in spans) == item.num_rows:
                placed.append(PlacedMedia(waiting[kind].pop(0), tuple(spans)))
                open_spans[kind] = []
    placed.sort(key=lambda entry: entry.start)
    for one, other in itertools.pairwise(placed):
        if other.start < one.stop:
            raise InvalidRequest("prompt: placeholders of different media are mixed up with each other", param="prompt")
    return out, tuple(placed)


def grid_positions(num_tokens: int, placed: Sequence[PlacedMedia], merge_size: int) -> tuple[NDArray[np.int64], int]:
    """Positions (3, T) in time, row and column, and what later tokens' positions differ from their index by.

    Text counts on in all three. The tokens of one frame share their time and count rows and columns from it; what
    follows begins beyond the longer side. Source: Wang et al. 2024, Qwen2-VL, section 2.1.

    Raises:
        InvalidRequest: the tokens of one frame do not lie side by side.
    """
    positions = np.empty((3, num_tokens), np.int64)
    index = current = 0
    for item in placed:
        _, rows, columns = (
            side // size for side, size in zip(item.item.grid, (1, merge_size, merge_size), strict=True)
        )
        for start, stop in _frames(item, rows * columns):
            positions[:, index:start] = np.arange(current, current + start - index)
            current += start - index
            frame = np.arange(stop - start)
            positions[0, start:stop] = current
            positions[1, start:stop] = current + frame // columns
            positions[2, start:stop] = current + frame % columns
            current += max(rows, columns)
            index = stop
    positions[:, index:] = np.arange(current, current + num_tokens - index)
    return positions, current - index


def _frames(placed: PlacedMedia, frame_len: int) -> list[tuple[int, int]]:
    """(first, beyond) of the tokens of each frame."""
    found: list[tuple[int, int]] = []
    for start, stop in placed.spans:
        if (stop - start) % frame_len:
            raise InvalidRequest(
                f"prompt: {stop - start} {placed.item.kind} placeholders side by side, where a frame has {frame_len}",
                param="prompt",
            )
        found.extend((first, first + frame_len) for first in range(start, stop, frame_len))
    return found


def _grows(kind: MediaKind, token_ids: Sequence[int], items: list[MediaInput], pad_id: int) -> bool:
    """Whether the prompt has one placeholder per item, rather than all their pads."""
    count, total = token_ids.count(pad_id), sum(item.num_rows for item in items)
    if count == len(items):
        return True
    if count == total:
        return False
    raise InvalidRequest(
        f"prompt: {count} placeholders of kind {kind} (token {pad_id}) for {len(items)} given",
        param="prompt",
        remedy=f"write one for each {kind}, or leave that to the chat template",
    )


def _pad_runs(item: MediaInput, start: int) -> tuple[tuple[int, int], ...]:
    """The runs of pads in an item's replacement, which begins at position `start`."""
    spans: list[tuple[int, int]] = []
    for offset, token_id in enumerate(item.replacement):
        if token_id == item.pad_id:
            _extend(spans, start + offset)
    return tuple(spans)


def _extend(spans: list[tuple[int, int]], position: int) -> None:
    if spans and spans[-1][1] == position:
        spans[-1] = (spans[-1][0], position + 1)
    else:
        spans.append((position, position + 1))


def _is_marked(token_ids: Sequence[int], index: int, marks: tuple[int, int]) -> bool:
    around = (token_ids[index - 1] if index else None, token_ids[index + 1] if index + 1 < len(token_ids) else None)
    return around == marks
