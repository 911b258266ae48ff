"""Images, videos and sound on their way into a model: what a caller hands in, and what a tower reads. No torch.

Media are numpy arrays (`ImageMedia`, `VideoMedia`, `AudioMedia`). `sources` fetches the bytes a URL names, `decoding`
makes media of them, with limits checked before anything is decoded. A model's `MediaProcessor` turns each into a
`MediaInput` and says where in the prompt its rows go (`PlacedPrompt`).
"""

from __future__ import annotations

from vkit.media.inputs import MediaInput, MediaProcessor, PlacedMedia, PlacedPrompt
from vkit.media.items import KINDS, AudioMedia, ImageMedia, Media, MediaKind, VideoMedia
from vkit.media.limits import MediaLimits, checked_media

__all__ = [
    "KINDS",
    "AudioMedia",
    "ImageMedia",
    "Media",
    "MediaInput",
    "MediaKind",
    "MediaLimits",
    "MediaProcessor",
    "PlacedMedia",
    "PlacedPrompt",
    "VideoMedia",
    "checked_media",
]
