"""JSON configurations, read with their types checked: a wrong value names its key and file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkit.errors import CheckpointError


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: there is none.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def beside(weights: Path, config: Path | None) -> Path | None:
    """The configuration given, or `config.json` beside the weights or one folder above; None: there is none."""
    if config is not None:
        return config / "config.json" if config.is_dir() else config
    folder = weights if weights.is_dir() else weights.parent
    for place in (folder, folder.parent) if weights.is_file() else (folder,):
        if (place / "config.json").is_file():
            return place / "config.json"
    return None


@dataclass(frozen=True, slots=True)
class Numbers:
    """Typed look-ups in a JSON object; an absent key or null gives the default."""

    source: str
    values: Mapping[str, Any]

    def integer(self, key: str, default: int) -> int:
        """A positive integer."""
        value = self.values.get(key)
        return default if value is None else self._int(key, value)

    def integers(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list of positive integers."""
        value = self.values.get(key)
        if value is None:
            return default
        return tuple(self._int(key, item) for item in self._list(key, value))

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.values.get(key)
        return default if value is None else self._float(key, value)

    def series(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self.values.get(key)
        if value is None:
            return default
        return tuple(self._float(key, item) for item in self._list(key, value))

    def _list(self, key: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise CheckpointError(f"{self.source}: {key} is {value!r:.60}, expected a list of numbers")
        return value

    def _int(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise CheckpointError(f"{self.source}: {key} is {value!r:.60}, expected a positive integer")
        return value

    def _float(self, key: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise CheckpointError(f"{self.source}: {key} is {value!r:.60}, expected a number")
        return float(value)


def numbers(source: str, values: Mapping[str, Any]) -> Numbers:
    """Look-ups in `values`, whose errors name `source`."""
    return Numbers(source, values)
