"""The tensors of one step, and the builder that keeps block tables between steps.

Work per sequence and step does not grow with its context: only block ids that are new since the last step are copied.
Knows nothing of models, sampling or text.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vkit.cache.groups import CacheGroup, CacheKind
from vkit.cache.store import TensorStore
from vkit.kernels import PagedBatch, StateBatch
from vkit.sequence import Plan, ScheduledSequence, Sequence, SequenceStatus

IntArray = NDArray[np.int64]
T = TypeVar("T")

_FEW = 16
"""Sequences up to which a decoding step is put together number by number."""


@dataclass(slots=True)
class MediaRows:
    """Tokens of a step that stand for a piece of a picture or of sound, and what a tower made of it."""

    rows: Tensor
    """(M,) int64: tokens of the step, ascending."""
    embeddings: Tensor
    """(M, H): the stream before the first block, in place of an embedding."""
    features: list[Tensor]
    """(M, H) each: for models that add to the stream after some of their first blocks."""


@dataclass(slots=True)
class Batch:
    """What a forward pass reads: T tokens of B sequences, R rows wanted for logits."""

    token_ids: Tensor
    """(T,) int64"""
    positions: Tensor
    """(T,) int64; in a step with `axis_positions` the first row of those."""
    cu_seqlens: Tensor
    """(B + 1,) int32: sequence b owns tokens cu_seqlens[b] .. cu_seqlens[b + 1] - 1."""
    seq_lens: Tensor
    """(B,) int32: tokens in the cache after this step."""
    rows: Tensor
    """(B,) int32: each sequence's row in the block tables, fixed while it runs."""
    is_fresh: Tensor
    """(B,) bool: the sequence starts at position 0, so its state block holds somebody else's past."""
    logits_rows: Tensor
    """(R,) int64: tokens whose logits are wanted."""
    paged: list[PagedBatch | None]
    """Per cache group; None for a group that keeps one state per sequence."""
    state_blocks: list[Tensor | None]
    """Per cache group, (B,) int64: the block that holds each sequence's state; None for a group of tokens."""
    store: TensorStore
    host_cu_seqlens: list[int]
    """cu_seqlens on the host."""
    state_targets: list[Tensor | None] | None = None
    """Per cache group, (T,) int64: the block that the state after each token goes to, -1 where it is not kept; None for
    a group of tokens. None where nothing is verified: then states are replaced in place."""
    verified: list[int] = field(default_factory=list)
    """Sequences with drafts, where states are kept per token."""
    axis_positions: Tensor | None = None
    """(3, T) int64: position in time, row and column, in a step that computes a prompt in which they differ."""
    media: MediaRows | None = None
    spans: list[list[tuple[int, int]]] | None = None
    """Per sequence, the positions (first, beyond) of each run of tokens that see each other in both directions, past
    ones included; None in a step that computes no such token."""
    taps: dict[int, Tensor | None] | None = None
    """Layers whose streams a drafter asked for, to be filled with them (T, H)."""
    memo: dict[object, object] = field(default_factory=dict)
    """What layers derive from the above once per step."""

    def kv(self, layer: int) -> tuple[Tensor, Tensor, PagedBatch]:
        """K cache, V cache and the sequences' places in them, for an attention layer."""
        k, v, group = self.store.kv[layer]
        paged = self.paged[group]
        assert paged is not None
        return k, v, paged

    def latents(self, layer: int) -> tuple[Tensor, PagedBatch]:
        """The cache of a layer that keeps one vector per token (N, S, 1, C), and the sequences' places in it."""
        paged = self.paged[self.store.group_of[layer]]
        assert paged is not None
        return self.store.tensors[layer]["latent"], paged

    def paged_tensors(self, layer: int) -> tuple[dict[str, Tensor], PagedBatch]:
        """All tensors (N, S, ...) that a layer keeps per token, by name, and the sequences' places in them."""
        paged = self.paged[self.store.group_of[layer]]
        assert paged is not None
        return self.store.tensors[layer], paged

    def states(self, layer: int) -> tuple[dict[str, Tensor], StateBatch]:
        """The state tensors of a recurrent layer by name, (N, ...) each, and which entry is each sequence's."""
        blocks = self.state_blocks[self.store.group_of[layer]]
        assert blocks is not None
        targets = None if self.state_targets is None else self.state_targets[self.store.group_of[layer]]
        states = StateBatch(blocks, self.is_fresh, self.cu_seqlens, self.host_cu_seqlens, targets, self.verified)
        return self.store.tensors[layer], states


@dataclass(slots=True, eq=False)
class _Row:
    """What the tables hold for one running sequence."""

    index: int
    sequence: Sequence
    num_preemptions: int
    num_known: list[int]
    """Per group, how many block ids have been copied."""
    last_known: list[int]
    """Per group, the last of them."""


class _BlockTable:
    """One group's block table on the host, and its twin on the device: the same memory where the device is the host."""

    def __init__(self, num_rows: int, num_columns: int, device: torch.device, *, is_shared: bool) -> None:
        self.host = np.zeros((num_rows, num_columns), np.int32)
        shared = torch.from_numpy(self.host)
        self.device = shared if is_shared else shared.to(device, copy=True)
        self._is_shared = is_shared
        self._changes: list[tuple[int, int, int]] = []

    def write(self, row: int, start: int, block_ids: list[int]) -> None:
        """Put block ids at columns start, start + 1, ... of a row."""
        self.host[row, start : start + len(block_ids)] = block_ids
        if not self._is_shared:
            self._changes.append((row, start, start + len(block_ids)))

    def upload(self) -> None:
        """Bring the device's twin up to date."""
        if self._changes:
            for row, start, stop in self._changes:
                self.device[row, start:stop] = torch.from_numpy(self.host[row, start:stop])
            self._changes.clear()


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of a running sequence that a drafter runs through a model of its own."""

    sequence: Sequence
    start: int
    token_ids: list[int]
    num_logits: int
    """Rows wanted, for the last of the tokens."""

    num_drafts = 0

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        return len(self.token_ids)


Shares: TypeAlias = SequenceABC[ScheduledSequence | TokenRun]


class BatchBuilder:
    """Turns plans into batches. Owns the rows: one per running sequence, given back when it ends or is preempted."""

    def __init__(
        self,
        groups: list[CacheGroup],
        store: TensorStore,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._store = store
        self._block_size = block_size
        self._device = device
        is_paged = [group.kind is not CacheKind.STATE for group in groups]
        num_columns = -(-max_model_len // block_size)
        self._tables = [
            _BlockTable(max_num_seqs if paged else 0, num_columns, device, is_shared=device.type == "cpu")
            for paged in is_paged
        ]
        self._paged_groups = [index for index, paged in enumerate(is_paged) if paged]
        self._state_groups = [index for index, paged in enumerate(is_paged) if not paged]
        self._none_fresh = torch.zeros(_FEW, dtype=torch.bool, device=device)
        self._rows: dict[str, _Row] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def build(self, plan: Plan) -> Batch:
        """The tensors of this plan, rows in the order of `plan.scheduled`."""
        for sequence_id in plan.finished_ids:
            self._release(sequence_id)
        scheduled = plan.scheduled
        row_list, token_ids = self._collect(scheduled)
        if 0 < len(scheduled) <= _FEW and all(
            item.num_tokens == item.num_logits == 1 and not item.sequence.media for item in scheduled
        ):
            return self._build_decode(scheduled, row_list, token_ids)
        return self._build(scheduled, row_list, token_ids)

    def build_runs(self, runs: list[TokenRun]) -> Batch:
        """The tensors of tokens that are no part of a plan, over sequences that were part of the last one."""
        row_list = [self._rows[run.sequence.id].index for run in runs]
        return self._build(runs, row_list, [token_id for run in runs for token_id in run.token_ids])

    def capacity(self, sequence: Sequence) -> int:
        """Positions of a sequence that have slots."""
        return min(len(sequence.block_ids[group]) for group in self._paged_groups) * self._block_size

    def _build(self, scheduled: Shares, row_list: list[int], token_ids: list[int]) -> Batch:
        rows = np.array(row_list, np.int64)
        starts = np.array([item.start for item in scheduled], np.int64)
        counts = np.array([item.num_tokens for item in scheduled], np.int64)
        wanted = np.array([item.num_logits for item in scheduled], np.int64)
        cu = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=cu[1:])
        positions = np.arange(cu[-1]) + np.repeat(starts - cu[:-1], counts)
        seq_lens = starts + counts
        slots = self._slots(np.repeat(rows, counts), positions)
        states = [
            np.array([item.sequence.block_ids[group][item.sequence.state_row] for item in scheduled], np.int64)
            for group in self._state_groups
        ]
        verified = [b for b, item in enumerate(scheduled) if item.num_drafts] if self._state_groups else []
        targets = [_state_targets(scheduled, group) for group in self._state_groups] if verified else []
        axes = (
            _axis_positions(scheduled, positions, cu)
            if any(item.sequence.rope_positions is not None for item in scheduled)
            else None
        )
        ids = np.array(token_ids, np.int64)
        assert ids.shape == positions.shape, "a plan names tokens whose ids are not known yet"
        turned = positions if axes is None else axes[0]
        wide = self._upload(
            [ids, turned, _last_rows(cu, wanted), (starts == 0).astype(np.int64), *slots, *states, *targets]
        )
        narrow = self._upload([rows.astype(np.int32), seq_lens.astype(np.int32), cu.astype(np.int32)])
        hosts = row_list, seq_lens.tolist(), cu.tolist()
        num_paged = len(self._paged_groups)
        return Batch(
            token_ids=wide[0],
            positions=wide[1],
            cu_seqlens=narrow[2],
            seq_lens=narrow[1],
            rows=narrow[0],
            is_fresh=wide[3].bool(),
            logits_rows=wide[2],
            paged=self._paged(wide[4 : 4 + num_paged], narrow, hosts),
            state_blocks=self._by_group(self._state_groups, wide[4 + num_paged :][: len(states)]),
            store=self._store,
            host_cu_seqlens=hosts[2],
            state_targets=self._by_group(self._state_groups, wide[4 + num_paged + len(states) :]) if verified else None,
            verified=verified,
            axis_positions=self._of_prompts(scheduled, axes),
            spans=_spans(scheduled),
        )

    def _of_prompts(self, scheduled: Shares, axes: IntArray | None) -> Tensor | None:
        """The positions of all axes, where a prompt is computed in which they differ."""
        if axes is None or all(
            item.start >= item.sequence.num_prompt_tokens for item in scheduled if item.sequence.media
        ):
            return None
        return torch.from_numpy(axes).to(self._device)

    def _build_decode(self, scheduled: list[ScheduledSequence], rows: list[int], token_ids: list[int]) -> Batch:
        """One token of each of a few sequences: the same as the general case in fewer, larger pieces.

        After a step has read all weights, whatever the host does next misses the caches: what counts is how many
        different things it does (one sequence beside a 0.5B model on an EPYC core: 150 us instead of 200).
        """
        size, count = self._block_size, len(scheduled)
        starts = [item.start for item in scheduled]
        seq_lens = [start + 1 for start in starts]
        cu = list(range(count + 1))
        wide = [*token_ids, *starts, *cu[:-1]]
        for group in self._paged_groups:
            host = self._tables[group].host
            wide += [int(host[row, at // size]) * size + at % size for row, at in zip(rows, starts, strict=True)]
        for group in self._state_groups:
            wide += [item.sequence.block_ids[group][item.sequence.state_row] for item in scheduled]
        parts = self._on_device(np.array(wide, np.int64)).split(count)
        narrow = list(self._on_device(np.array([*rows, *seq_lens, *cu], np.int32)).split([count, count, count + 1]))
        num_paged = len(self._paged_groups)
        return Batch(
            token_ids=parts[0],
            positions=parts[1],
            cu_seqlens=narrow[2],
            seq_lens=narrow[1],
            rows=narrow[0],
            is_fresh=self._none_fresh[:count] if min(starts) else parts[1] == 0,
            logits_rows=parts[2],
            paged=self._paged(list(parts[3 : 3 + num_paged]), narrow, (rows, seq_lens, cu)),
            state_blocks=self._by_group(self._state_groups, list(parts[3 + num_paged :])),
            store=self._store,
            host_cu_seqlens=cu,
        )

    def _collect(self, scheduled: list[ScheduledSequence]) -> tuple[list[int], list[int]]:
        """Bring the tables up to date; the row of each sequence and the ids of all tokens."""
        rows: list[int] = []
        token_ids: list[int] = []
        known_rows, paged_groups = self._rows, self._paged_groups
        for item in scheduled:
            sequence = item.sequence
            row = known_rows.get(sequence.id)
            if row is None or row.sequence is not sequence or row.num_preemptions != sequence.num_preemptions:
                row = self._claim(sequence)
            for group in paged_groups:
                block_ids = sequence.block_ids[group]
                if len(block_ids) != row.num_known[group] or (block_ids and block_ids[-1] != row.last_known[group]):
                    self._copy_blocks(row, group, block_ids)
            rows.append(row.index)
            if item.num_tokens == 1 and not item.num_drafts:
                token_ids.append(sequence.token_ids[item.start])
            else:
                token_ids.extend(_token_ids(item))
        return rows, token_ids

    def _copy_blocks(self, row: _Row, group: int, block_ids: list[int]) -> None:
        known = row.num_known[group]
        if known > len(block_ids) or (known and block_ids[known - 1] != row.last_known[group]):
            known = 0  # the list did not only grow
        self._tables[group].write(row.index, known, block_ids[known:])
        row.num_known[group] = len(block_ids)
        row.last_known[group] = block_ids[-1] if block_ids else -1

    def _claim(self, sequence: Sequence) -> _Row:
        """A row for a sequence that is new, or whose blocks were taken away since."""
        old = self._rows.pop(sequence.id, None)
        if old is not None:
            self._free.append(old.index)
        if not self._free:
            self._reclaim()
        num_groups = len(self._tables)
        row = _Row(self._free.pop(), sequence, sequence.num_preemptions, [0] * num_groups, [-1] * num_groups)
        self._rows[sequence.id] = row
        return row

    def _release(self, sequence_id: str) -> None:
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._free.append(row.index)

    def _reclaim(self) -> None:
        """Take back the rows of sequences that lost their blocks: they begin again when they return."""
        idle = (SequenceStatus.PREEMPTED, SequenceStatus.FINISHED, SequenceStatus.WAITING)
        for sequence_id in [name for name, row in self._rows.items() if row.sequence.status in idle]:
            self._release(sequence_id)
        if not self._free:
            raise RuntimeError(f"more running sequences than the {len(self._rows)} rows of max_num_seqs")

    def _paged(
        self, slots: list[Tensor], narrow: list[Tensor], hosts: tuple[list[int], list[int], list[int]]
    ) -> list[PagedBatch | None]:
        """Per cache group, where its tokens lie."""
        batches = []
        for group, slot_mapping in zip(self._paged_groups, slots, strict=True):
            table = self._tables[group]
            table.upload()
            rows, seq_lens, cu_seqlens = narrow
            batches.append(PagedBatch(table.device, rows, slot_mapping, seq_lens, cu_seqlens, *hosts))
        return self._by_group(self._paged_groups, batches)

    def _by_group(self, groups: list[int], values: list[T]) -> list[T | None]:
        """The values at their groups' places, None elsewhere."""
        found = dict(zip(groups, values, strict=True))
        return [found.get(group) for group in range(len(self._tables))]

    def _slots(self, rows: IntArray, positions: IntArray) -> list[IntArray]:
        """Per paged group, the cache slot of every token."""
        blocks, offsets = np.divmod(positions, self._block_size)
        return [
            self._tables[group].host[rows, blocks].astype(np.int64) * self._block_size + offsets
            for group in self._paged_groups
        ]

    def _upload(self, arrays: list[NDArray[np.int64]] | list[NDArray[np.int32]]) -> list[Tensor]:
        """The arrays as tensors on the device, in one copy."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        return list(torch.split(self._on_device(np.concatenate(arrays)), [len(array) for array in arrays]))

    def _on_device(self, values: NDArray[Any]) -> Tensor:
        if self._device.type == "cpu":
            return torch.from_numpy(values)
        return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)


def _token_ids(item: ScheduledSequence) -> list[int]:
    """The ids of a sequence's share: known tokens, then drafts."""
    sequence = item.sequence
    stop = item.start + item.num_tokens - item.num_drafts
    ids = sequence.token_ids[item.start : stop]
    return ids + sequence.draft_token_ids[: item.num_drafts] if item.num_drafts else ids


def _state_targets(scheduled: Shares, group: int) -> IntArray:
    """Where the state after each token goes: in a verification the rows after the current one, else that one."""
    targets: list[int] = []
    for item in scheduled:
        table, row = item.sequence.block_ids[group], item.sequence.state_row
        if item.num_drafts:
            assert item.num_tokens == 1 + item.num_drafts <= len(table), "every state of a verification has a row"
            targets.extend(table[(row + place) % len(table)] for place in range(1, item.num_tokens + 1))
        else:
            targets.extend([-1] * (item.num_tokens - 1) + [table[row]])
    return np.array(targets, np.int64)


def _axis_positions(scheduled: Shares, indices: IntArray, cu: IntArray) -> IntArray:
    """(3, T): every token's position in time, row and column; `indices` (T,) are the places in their sequences."""
    axes: IntArray = np.broadcast_to(indices, (3, len(indices))).copy()
    for item, first, beyond in zip(scheduled, cu, cu[1:], strict=False):
        sequence = item.sequence
        if sequence.rope_positions is not None:
            own = sequence.rope_positions[:, item.start : item.start + item.num_tokens]
            axes[:, first:beyond] += sequence.position_delta
            axes[:, first : first + own.shape[1]] = own
    return axes


def _spans(scheduled: Shares) -> list[list[tuple[int, int]]] | None:
    """Per sequence the runs of media that see themselves, if any of them is computed in this step."""
    found = [
        [span for placed in item.sequence.media if placed.item.sees_itself for span in placed.spans]
        for item in scheduled
    ]
    is_seen = any(
        start < item.start + item.num_tokens and stop > item.start
        for item, spans in zip(scheduled, found, strict=True)
        for start, stop in spans
    )
    return found if is_seen else None


def _last_rows(cu: IntArray, wanted: IntArray) -> IntArray:
    """Indices of the last wanted[b] tokens of each sequence, in order."""
    before = np.cumsum(wanted) - wanted
    rows: IntArray = np.arange(wanted.sum()) + np.repeat(cu[1:] - wanted - before, wanted)
    return rows
