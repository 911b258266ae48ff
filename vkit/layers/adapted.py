"""Low-rank adapters over linear layers, token tables and heads: y += B A x for the tokens whose request chose one.

The weights below stay as they are, packed or dense. A step that uses no adapter does exactly what it would do without
this module, so that a kernel backend may record it.

Source: Hu et al. 2021 (LoRA).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from vkit import kernels
from vkit.layers.embedding import Embedding, LMHead
from vkit.layers.linear import Linear, MergedLinear
from vkit.layers.module import Module
from vkit.quantization import LinearMethod

AdapterWeights = Mapping[str, tuple[Tensor, Tensor]]
"""Key of a layer -> A (r, in) and B (out, r), the scale already in B; of a token table A is (V, r)."""
NamedHead = tuple[str, LMHead]
"""A head and what its checkpoint calls it."""
ActiveAdapters = Sequence[tuple[Tensor | None, AdapterWeights]]
"""(rows (M,) int64, or None for all of them; weights)."""


class AdapterSwitch:
    """Which adapters a forward pass uses. One per model, set by its runner for the length of a pass."""

    def __init__(self) -> None:
        self.active: ActiveAdapters = ()
        """By rows of the step's tokens."""
        self.active_logits: ActiveAdapters = ()
        """By rows of its logits."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLinear:
    """A linear method with what the active adapters add."""

    base: LinearMethod
    key: str
    switch: AdapterSwitch
    is_head: bool = False
    """Whether its rows are those of the logits."""

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.base.out_features

    @property
    def nbytes(self) -> int:
        """Bytes of the weight below."""
        return self.base.nbytes

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (T, in_features), bias (out_features,) -> (T, out_features) in x.dtype."""
        y = self.base.apply(x, bias)
        for rows, weights in self.switch.active_logits if self.is_head else self.switch.active:
            pair = weights.get(self.key)
            if pair is None:
                continue
            down, up = pair
            chosen = x if rows is None else kernels.embedding(rows, x)
            y = _plus(y, rows, kernels.linear(kernels.linear(chosen, down), up))
        return y


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedTable:
    """What the active adapters add to rows of a token table."""

    key: str
    switch: AdapterSwitch

    def __call__(self, rows: Tensor, ids: Tensor) -> Tensor:
        """The rows (T, C) of `ids` (T,), each with its adapter's part."""
        for places, weights in self.switch.active:
            pair = weights.get(self.key)
            if pair is not None:
                down, up = pair
                chosen = ids if places is None else ids[places]
                rows = _plus(rows, places, kernels.linear(kernels.embedding(chosen, down), up))
        return rows


def _plus(y: Tensor, rows: Tensor | None, added: Tensor) -> Tensor:
    return kernels.add(y, added) if rows is None else kernels.add_rows(y, rows, added)


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """One projection that an adapter may change, as the checkpoint names it."""

    key: str
    """Of the layer it is a part of."""
    in_features: int
    out_features: int
    start: int
    """Its first row among the layer's outputs."""
    total: int
    """Outputs of the layer."""
    row_order: Tensor | None = None
    """The stored row that each output takes, where they are not in order."""
    is_table: bool = False
    """Whether it is a token table: `in_features` are its rows."""


def adapter_targets(decoder: Module, prefix: str, head: NamedHead | None = None) -> dict[str, AdapterTarget]:
    """Every projection and token table below `decoder` that an adapter may change, and the head, by checkpoint name."""
    targets: dict[str, AdapterTarget] = {}
    for below, key, module in _linears(decoder, prefix):
        start = 0
        for name, width in module.projections():
            target = AdapterTarget(key, module.in_features, width, start, module.out_features, module.row_order)
            targets[f"{below}{name}" if name else below.removesuffix(".")] = target
            start += width
    for name, table in _tables(decoder, prefix):
        num_rows, width = table.shape
        targets[name] = AdapterTarget(name, num_rows, width, 0, width, is_table=True)
    if head is not None:
        name, (vocab_size, width) = head[0], head[1].shape
        targets[name] = AdapterTarget(name, width, vocab_size, 0, vocab_size)
    return targets


def adapt(decoder: Module, prefix: str, switch: AdapterSwitch, head: NamedHead | None = None) -> None:
    """Let the layers below `decoder` and the head, which have their weights, listen to `switch`."""
    for _, key, module in _linears(decoder, prefix):
        module.wrap_method(lambda base, key=key: AdaptedLinear(base, key, switch))  # type: ignore[misc]
    for name, table in _tables(decoder, prefix):
        table.finish_with(AdaptedTable(name, switch))
    if head is not None:
        key, layer = head
        layer.wrap_method(lambda base: AdaptedLinear(base, key, switch, is_head=True))


def _tables(decoder: Module, prefix: str) -> Iterator[tuple[str, Embedding]]:
    """(name, table) of every token table; positions are none."""
    for below, module in decoder.walk(prefix):
        if type(module) is Embedding:
            yield below.removesuffix("."), module


def _linears(decoder: Module, prefix: str) -> Iterator[tuple[str, str, Linear | MergedLinear]]:
    """(prefix of its tensors, its key, the layer) of every adaptable layer."""
    for below, module in decoder.walk(prefix):
        # Subclasses compute otherwise (routers in float32), so an adapter could not count on being asked.
        if type(module) in (Linear, MergedLinear):
            assert isinstance(module, Linear | MergedLinear)
            names = "+".join(name for name, _ in module.projections())
            yield below, below + names, module
