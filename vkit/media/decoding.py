"""Files of any common format, as bytes, to media of a kind."""

from __future__ import annotations

from vkit.errors import InvalidRequest, MissingExtra
from vkit.media.items import AudioMedia, Media, MediaKind
from vkit.media.unusable import UnusableMedia

SPEECH_RATE = 16_000
"""Samples per second that towers of sound listen at."""


def decode_media(kind: MediaKind, data: bytes, *, video_fps: float = 2.0, num_video_frames: int | None = None) -> Media:
    """What a file holds: an image, the frames of a video at `video_fps` a second, or sound at 16 kHz, mono.

    `num_video_frames`: so many frames of a video instead, as far as there are.

    Raises:
        UnusableMedia: no such medium, a damaged one, or one above a limit.
        MissingExtra: the libraries that decode are not installed.
    """
    if kind == "image":
        from vkit.media.pictures import decode_image

        return decode_image(data)
    if kind == "video":
        from vkit.media.clips import decode_video

        return decode_video(data, wanted_fps=video_fps, num_frames=num_video_frames)
    from vkit.media.audio import decode_audio

    try:
        return AudioMedia(decode_audio(data, sample_rate=SPEECH_RATE), SPEECH_RATE)
    except (MissingExtra, UnusableMedia):
        raise
    except InvalidRequest as error:
        raise UnusableMedia("audio", error.message.removeprefix("audio: ")) from None
