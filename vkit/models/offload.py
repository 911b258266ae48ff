"""Weights that stay out of memory between uses: which ones, how much that saves, and how layers are told.

On a host, device memory and host memory are one. What `uva` leaves "on the host" therefore stays in the mapped file,
and is copied for each use; what does not fit is read from the disk again and again, by the system's own paging.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

from torch import Tensor

from vkit.errors import ModelLoadError, UsageError
from vkit.layers import Experts, Linear, MergedLinear
from vkit.layers.streaming import ByteRange, FileReader
from vkit.loaders.storage import file_range
from vkit.models.base import CausalLM, ModelCheckpoint
from vkit.models.loading import check_tensors
from vkit.quantization import DenseLinear, GGUFLinear, LinearMethod, ScaledLinear, StackedLinear
from vkit.weight_offload import EXPERT_FLAG, FLAG, ExpertCacheSize, OffloadConfig

logger = logging.getLogger("vkit.models")


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What of a model stays in its file."""

    names: frozenset[str]
    """Linear weights that are copied for each use."""
    num_bytes: int
    """What they weigh."""
    expert_slots: int = 0
    """Places for routed experts per layer; 0: all are resident."""
    expert_bytes: int = 0
    """What streamed experts weigh beyond what their places hold."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that need no memory of their own."""
        return self.num_bytes + self.expert_bytes


NOTHING = OffloadPlan(frozenset(), 0)


def plan_offload(
    model: CausalLM,
    checkpoint: ModelCheckpoint,
    offload: OffloadConfig | None,
    experts: ExpertCacheSize | None,
    top_k: int,
) -> OffloadPlan:
    """What the configuration means for this model; reads no weight byte.

    Raises:
        UsageError: a backend that has no meaning here, no experts to stream, or fewer places than a token needs.
        ModelLoadError: nothing of the model could be offloaded.
    """
    plan = NOTHING
    check_tensors(model, checkpoint)
    if offload is not None and offload.backend == "prefetch":
        raise UsageError(
            f"{FLAG}: prefetch moves weights from host to device memory ahead of their use, and on a CPU both are one",
            remedy="uva leaves weights in the file",
        )
    if offload is not None and offload.backend == "uva":
        plan = _plan_uva(model, checkpoint, offload)
    if experts is not None:
        plan = _plan_experts(model, checkpoint, experts, top_k, plan)
    return plan


def _plan_uva(model: CausalLM, checkpoint: ModelCheckpoint, offload: OffloadConfig) -> OffloadPlan:
    stored = checkpoint.tensor_names()
    names: set[str] = set()
    num_bytes = 0
    for prefix, module in model.walk():
        if not isinstance(module, Linear | MergedLinear):
            continue
        for slot in module.slots():
            name = model.stored_name(prefix + slot.name, stored)
            # The budget is looked at before each weight, so the last one may go beyond it.
            if slot.name.endswith("weight") and name in stored and offload.selects(name):
                if num_bytes >= offload.offload_bytes:
                    return OffloadPlan(frozenset(names), num_bytes)
                names.add(name)
                num_bytes += checkpoint.tensor_info(name).nbytes
    if not names:
        wanted = ", ".join(offload.params) or "any segment"
        raise ModelLoadError(f"{FLAG}: {checkpoint.path} has no linear weight with {wanted} in its name")
    return OffloadPlan(frozenset(names), num_bytes)


def _plan_experts(
    model: CausalLM, checkpoint: ModelCheckpoint, size: ExpertCacheSize, top_k: int, plan: OffloadPlan
) -> OffloadPlan:
    stored = checkpoint.tensor_names()
    layers = [(prefix, module) for prefix, module in model.walk() if isinstance(module, Experts)]
    if not layers:
        raise UsageError(f"{EXPERT_FLAG}: {checkpoint.path} has no routed experts")
    total = sum(
        checkpoint.tensor_info(name).nbytes
        for prefix, module in layers
        for slot in module.slots()
        if (name := model.stored_name(prefix + slot.name, stored)) in stored
    )
    num_experts = layers[0][1].num_experts
    expert_bytes = total // (len(layers) * num_experts)
    slots = min(num_experts, size.slots_of(expert_bytes, len(layers)))
    if slots < top_k:
        raise UsageError(
            f"{EXPERT_FLAG}: {slots} experts per layer are fewer than the {top_k} that every token chooses",
            remedy=f"at least {top_k}, or {_in_gb(top_k * expert_bytes * len(layers))}",
        )
    # A place holds an expert twice: as read, and as kernels want it.
    held = 2 * slots * expert_bytes * len(layers)
    return replace(plan, expert_slots=slots, expert_bytes=max(0, total - held))


def _in_gb(num_bytes: int) -> str:
    """A size that the flag takes and that holds `num_bytes`: three digits or more, rounded up."""
    digits = next(digits for digits in range(3, 13) if num_bytes * 10**digits >= 100 * 2**30 or digits == 12)
    return f"{math.ceil(num_bytes * 10**digits / 2**30) / 10**digits:.{digits}f}GB ({num_bytes:,} bytes)"


def apply_offload(model: CausalLM, checkpoint: ModelCheckpoint, plan: OffloadPlan) -> FileReader | None:
    """Tell the layers of a loaded model; the result, if any, is to be closed with it.

    Raises:
        ModelLoadError: no layer took anything, or experts that cannot be streamed.
    """
    stored = checkpoint.tensor_names()
    num_wrapped = 0
    for prefix, module in model.walk():
        if isinstance(module, Linear | MergedLinear) and plan.names:
            weights = [slot.name for slot in module.slots() if slot.name.endswith("weight")]
            chosen = [model.stored_name(prefix + name, stored) in plan.names for name in weights]
            if any(chosen):
                module.wrap_method(lambda method, chosen=chosen: _per_use(method, chosen))  # type: ignore[misc]
                num_wrapped += 1
    if plan.names and num_wrapped == 0:
        raise ModelLoadError(f"{FLAG}: no layer of this model reads its weights for each use")
    if not plan.expert_slots:
        return None
    reader = FileReader()
    for _, module in model.walk():
        if isinstance(module, Experts):
            module.stream(plan.expert_slots, reader, _locate)
    return reader


def _locate(tensor: Tensor) -> ByteRange | None:
    found = file_range(tensor)
    return None if found is None else ByteRange(*found)


@dataclass(frozen=True, slots=True, eq=False)
class PerUse:
    """Multiplies by a copy of the weight that lives as long as the product: the weight itself stays in the file."""

    method: LinearMethod

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.method.in_features

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.method.out_features

    @property
    def nbytes(self) -> int:
        """Bytes the weight occupies in the file."""
        return self.method.nbytes

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., in_features), bias (out_features,) -> (..., out_features) in x.dtype."""
        return _copied(self.method).apply(x, bias)


def _per_use(method: LinearMethod, chosen: list[bool]) -> LinearMethod:
    """The method with its chosen parts copied for each use."""
    if isinstance(method, StackedLinear) and len(method.parts) == len(chosen):
        parts = zip(method.parts, chosen, strict=True)
        return StackedLinear(tuple(PerUse(part) if is_chosen else part for part, is_chosen in parts))
    return PerUse(method)


def _copied(method: LinearMethod) -> LinearMethod:
    if isinstance(method, DenseLinear):
        return DenseLinear(method.weight.clone())
    if isinstance(method, GGUFLinear):
        return GGUFLinear(replace(method.weight, data=method.weight.data.clone()))
    if isinstance(method, ScaledLinear):
        return ScaledLinear(replace(method.weight, codes=method.weight.codes.clone()))
    if isinstance(method, StackedLinear):
        return StackedLinear(tuple(_copied(part) for part in method.parts))
    raise ModelLoadError(f"{FLAG}: weights of a {type(method).__name__} cannot be left in their file")
