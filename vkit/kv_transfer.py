"""What `--kv-transfer-config` says: which cache connector, in which role, with which settings. No torch.

Every key is checked here; which connectors exist and what their own settings mean is `vkit.connectors`' business.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vkit.errors import UsageError

FLAG = "--kv-transfer-config"
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
LOAD_FAILURE_POLICIES = ("fail", "recompute")
DEFAULT_ENGINE_ID = "vkit"
KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config", "engine_id", "kv_load_failure_policy")
KNOWN_ELSEWHERE = (
    *("kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
    *("kv_connector_module_path", "enable_permute_local_kv"),
)
"""Keys that vLLM has and vkit has not."""

ExtraValue = str | int | float | bool


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """A checked configuration."""

    kv_connector: str
    kv_role: str
    kv_connector_extra_config: Mapping[str, ExtraValue] = field(default_factory=dict)
    engine_id: str = DEFAULT_ENGINE_ID
    kv_load_failure_policy: str = "fail"

    @property
    def loads(self) -> bool:
        """Whether this engine takes cache entries in."""
        return self.kv_role != "kv_producer"

    @property
    def stores(self) -> bool:
        """Whether this engine gives cache entries out."""
        return self.kv_role != "kv_consumer"

    @classmethod
    def parse(cls, value: object) -> KVTransferConfig:
        """The configuration in a JSON object, or in its text.

        Raises:
            UsageError: anything but a known key with a value it can have; names the key.
        """
        given = _object(value)
        for key in given:
            if key in KNOWN_ELSEWHERE:
                raise UsageError(f"{FLAG}: {key} is known but not implemented", remedy=f"keys: {', '.join(KEYS)}")
        refuse_unknown(FLAG, given, KEYS)
        connector = _text(given, "kv_connector")
        role = _text(given, "kv_role")
        if role not in KV_ROLES:
            raise UsageError(
                f"{FLAG}: kv_role: unknown role {role!r}{closest(role, KV_ROLES)}",
                remedy=f"expected one of {', '.join(KV_ROLES)}",
            )
        policy = _text(given, "kv_load_failure_policy", "fail")
        if policy not in LOAD_FAILURE_POLICIES:
            raise UsageError(
                f"{FLAG}: kv_load_failure_policy: expected one of {', '.join(LOAD_FAILURE_POLICIES)}; got {policy!r}"
            )
        return cls(connector, role, _extra(given), _text(given, "engine_id", DEFAULT_ENGINE_ID), policy)

    def as_json(self) -> dict[str, Any]:
        """The configuration as plain JSON values."""
        return {key: dict(value) if isinstance(value := getattr(self, key), Mapping) else value for key in KEYS}


class ExtraConfig:
    """A connector's own settings, taken one by one; `done` refuses what nobody took."""

    def __init__(self, config: KVTransferConfig) -> None:
        self._given = dict(config.kv_connector_extra_config)
        self._place = f"{FLAG}: {config.kv_connector}"
        self._known: list[str] = []

    def text(self, key: str, default: str | None = None, *, choices: Collection[str] = ()) -> str | None:
        """A non-empty string.

        Raises:
            UsageError: of another type, or none of the choices.
        """
        value = self._take(key, default)
        if value is not None and (not isinstance(value, str) or not value):
            raise UsageError(f"{self._place}: {key}: expected a non-empty string, got {value!r}")
        if choices and value not in choices:
            raise UsageError(f"{self._place}: {key}: expected one of {', '.join(choices)}; got {value!r}")
        return value

    def required_text(self, key: str) -> str:
        """A string that must be given.

        Raises:
            UsageError: it is not.
        """
        value = self.text(key)
        if value is None:
            raise UsageError(f"{self._place}: {key} is required in kv_connector_extra_config")
        return value

    def whole(self, key: str, default: int | None = None, *, low: int = 1, high: int | None = None) -> int | None:
        """An integer.

        Raises:
            UsageError: of another type, or out of range.
        """
        value = self._take(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{self._place}: {key}: expected an integer, got {value!r}")
        if value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"in {low}..{high}"
            raise UsageError(f"{self._place}: {key}: must be {limit}, got {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            UsageError: neither.
        """
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise UsageError(f"{self._place}: {key}: expected true or false, got {value!r}")
        return value

    def refuse(self, key: str, reason: str) -> UsageError:
        """The error that says what is wrong with a key."""
        return UsageError(f"{self._place}: {key}: {reason}")

    def done(self) -> None:
        """Refuse keys that no one asked for.

        Raises:
            UsageError: there are such.
        """
        refuse_unknown(self._place, self._given, self._known)

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        return self._given.get(key, default)


def refuse_unknown(place: str, given: Collection[str], known: Collection[str]) -> None:
    """Check that every key is a known one.

    Raises:
        UsageError: one is not; names the closest and lists all.
    """
    for key in given:
        if key not in known:
            raise UsageError(f"{place}: unknown key {key!r}{closest(key, known)}", remedy=f"keys: {', '.join(known)}")


def closest(name: str, known: Collection[str]) -> str:
    """What to add to an error about `name`: the known name most like it, in whatever case; nothing where none is."""
    by_lower = {item.lower(): item for item in known}
    found = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f", did you mean {by_lower[found[0]]}?" if found else ""


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, KVTransferConfig):
        return value.as_json()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{FLAG}: not JSON: {error}") from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{FLAG}: expected a JSON object, got {value!r}")
    return dict(value)


def _text(given: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = given.get(key, default)
    if value is None:
        raise UsageError(f"{FLAG}: {key} is required")
    if not isinstance(value, str) or not value:
        raise UsageError(f"{FLAG}: {key}: expected a non-empty string, got {value!r}")
    return value


def _extra(given: Mapping[str, Any]) -> dict[str, ExtraValue]:
    extra = given.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        raise UsageError(f"{FLAG}: kv_connector_extra_config: expected an object, got {extra!r}")
    for key, value in extra.items():
        if not isinstance(key, str) or not isinstance(value, str | int | float | bool):
            raise UsageError(
                f"{FLAG}: kv_connector_extra_config: {key}: expected a string, number or boolean, got {value!r}"
            )
    return dict(extra)
