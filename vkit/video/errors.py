"""What can go wrong while a video is made, beyond the errors every part shares."""

from __future__ import annotations

from vkit.errors import ExitStatus, InvalidRequest, VkitError


class MediaError(InvalidRequest):
    """A picture, clip or sound that cannot be read, or that no model can take. The message names the file."""


class VideoCancelled(VkitError):
    """The caller's `cancelled` said so. The working directory holds a state that `resume` continues."""

    exit_status = ExitStatus.INTERRUPTED


class ResumeError(VkitError):
    """The working directory holds no state to continue, or one of another request or of other weights."""


class DiskSpaceError(VkitError):
    """The results would not fit on the disk; raised before any weight is read."""


class MuxError(VkitError):
    """Frames and sound could not be written as one file. The message carries the muxer's own words."""


class VideoFailed(VkitError):
    """The model computed something that is no video: numbers that are not finite, or a constant sound track."""
