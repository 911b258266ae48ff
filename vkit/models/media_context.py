"""What the files beside a model say about media."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
