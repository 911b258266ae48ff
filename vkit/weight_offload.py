"""What `--offload-config` and `--moe-expert-cache` say: which weights stay out of memory between uses. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkit.errors import UsageError
from vkit.kv_transfer import refuse_unknown

FLAG = "--offload-config"
EXPERT_FLAG = "--moe-expert-cache"
BACKENDS = ("auto", "uva", "prefetch")
MAX_CALM_SEQS = 4
"""Sequences above which streamed experts are read more often than used."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "uva": {"cpu_offload_gb": 0, "cpu_offload_params": []},
    "prefetch": {
        "offload_group_size": 0,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
        "offload_params": [],
    },
}


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """A checked configuration. `backend` is "uva" or "prefetch"."""

    backend: str
    offload_bytes: int = 0
    params: tuple[str, ...] = ()
    """Segments of weight names; empty: every linear weight."""

    @classmethod
    def parse(cls, value: object) -> OffloadConfig:
        """The configuration in a JSON object, or in its text.

        Raises:
            UsageError: anything but a known key with a value it can have; names the key.
        """
        if isinstance(value, OffloadConfig):
            return value
        given = _object(value)
        refuse_unknown(FLAG, given, ("offload_backend", *_DEFAULTS))
        backend = given.get("offload_backend", "auto")
        if backend not in BACKENDS:
            raise UsageError(f"{FLAG}: offload_backend: expected one of {', '.join(BACKENDS)}; got {backend!r}")
        parts = {name: _section(name, given.get(name, {})) for name in _DEFAULTS}
        if backend == "auto":
            uva, prefetch = parts["uva"], parts["prefetch"]
            backend = "prefetch" if prefetch["offload_group_size"] else "uva" if uva["cpu_offload_gb"] else "none"
        for name, values in parts.items():
            if name != backend and values != _DEFAULTS[name]:
                key = next(key for key, found in values.items() if found != _DEFAULTS[name][key])
                raise UsageError(f"{FLAG}: {name}.{key}: the backend is {backend}, which does not use it")
        if backend == "none":
            raise UsageError(
                f"{FLAG}: asks for nothing: neither uva.cpu_offload_gb nor prefetch.offload_group_size is above 0",
                remedy="give one of them, or leave the flag out",
            )
        if backend == "prefetch":
            if not parts["prefetch"]["offload_group_size"]:
                raise UsageError(f"{FLAG}: prefetch.offload_group_size: must be above 0 for the backend prefetch")
            return cls(backend)
        uva = parts["uva"]
        if uva["cpu_offload_gb"] <= 0:
            raise UsageError(f"{FLAG}: uva.cpu_offload_gb: must be above 0 for the backend uva")
        return cls("uva", int(uva["cpu_offload_gb"] * 2**30), tuple(uva["cpu_offload_params"]))

    def selects(self, name: str) -> bool:
        """Whether a weight's name has one of the segments wanted; they match as a whole, dots between them included."""
        return not self.params or any(f".{segment}." in f".{name}." for segment in self.params)


@dataclass(frozen=True, slots=True)
class ExpertCacheSize:
    """How many routed experts of each layer are in memory at a time: a number, or what a number of bytes holds."""

    slots: int = 0
    num_bytes: int = 0

    @classmethod
    def parse(cls, value: object) -> ExpertCacheSize:
        """N, or NGB.

        Raises:
            UsageError: neither.
        """
        if isinstance(value, ExpertCacheSize):
            return value
        text = str(value)
        if not isinstance(value, bool) and re.fullmatch(r"[1-9]\d*", text):
            return cls(slots=int(text))
        found = re.fullmatch(r"(\d+(?:\.\d+)?)GB", text)
        if found is None or float(found.group(1)) <= 0:
            raise UsageError(
                f"{EXPERT_FLAG}: expected a number of experts per layer, or a size such as 2GB; got {value!r}"
            )
        return cls(num_bytes=int(float(found.group(1)) * 2**30))

    def slots_of(self, expert_bytes: int, num_layers: int) -> int:
        """Experts per layer, given what one weighs."""
        return self.slots or self.num_bytes // max(1, expert_bytes * num_layers)


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{FLAG}: not JSON: {error}") from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{FLAG}: expected a JSON object, got {value!r}")
    return dict(value)


def _section(name: str, value: object) -> dict[str, Any]:
    defaults = _DEFAULTS[name]
    if not isinstance(value, Mapping):
        raise UsageError(f"{FLAG}: {name}: expected an object, got {value!r}")
    refuse_unknown(f"{FLAG}: {name}", list(value), tuple(defaults))
    found = {**defaults, **value}
    for key, item in found.items():
        where = f"{FLAG}: {name}.{key}"
        if key.endswith("params"):
            if not isinstance(item, list) or not all(isinstance(segment, str) and segment for segment in item):
                raise UsageError(f"{where}: expected a list of name segments, got {item!r}")
        elif key == "cpu_offload_gb":
            if isinstance(item, bool) or not isinstance(item, int | float) or not 0 <= item < 2**20:
                raise UsageError(f"{where}: expected a number of GB, got {item!r}")
        elif isinstance(item, bool) or not isinstance(item, int) or item < (0 if key == "offload_group_size" else 1):
            raise UsageError(f"{where}: expected an integer, got {item!r}")
    if (
        name == "prefetch"
        and found["offload_group_size"]
        and found["offload_num_in_group"] > found["offload_group_size"]
    ):
        raise UsageError(f"{FLAG}: prefetch.offload_num_in_group: at most offload_group_size")
    return found
