"""What the files beside a model say about media."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkit.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class MediaContext:
    """What a model's way with media depends on beside its configuration."""

    image_config: Mapping[str, Any]
    """preprocessor_config.json, empty where there is none."""
    video_config: Mapping[str, Any]
    """video_preprocessor_config.json, empty where there is none."""
    token_text: Callable[[int], str]
    """The text of a special token."""
    encode: Callable[[str], list[int]]
    """Token ids of plain text, nothing added."""
    special_id: Callable[[str], int | None]
    """The id of a special token by its text; None where the vocabulary has none."""


def preprocessor_config(path: Path) -> dict[str, Any]:
    """The file's keys; none where there is no file.

    Raises:
        CheckpointError: a file that is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values
