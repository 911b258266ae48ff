"""Media of a request: content parts to references, references to prompts whose placeholders have grown."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vkit.errors import InvalidRequest
from vkit.media import KINDS, Media, MediaKind, MediaLimits, PlacedPrompt
from vkit.media.decoding import decode_media
from vkit.media.items import AudioMedia, ImageMedia
from vkit.media.sources import MediaAccess, decode_base64
from vkit.server.engine_protocol import Engine
from vkit.server.problems import Problem, bad_request, clip, problem_from
from vkit.server.schema import Json

MEDIA_PARTS: Mapping[str, MediaKind] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "input_video": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Part type -> what it brings."""


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How a request wants its media prepared."""

    video_fps: float | None = None
    num_video_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    @property
    def decodes_videos_anew(self) -> bool:
        """Whether other frames of a video are looked at than usual."""
        return self.video_fps is not None or self.num_video_frames is not None


DEFAULT_OPTIONS = MediaOptions()


def media_options(processor: Json | None, media_io: Json | None, *, is_trusted: bool) -> MediaOptions:
    """What a request's `mm_processor_kwargs` and `media_io_kwargs` ask for.

    Raises:
        Problem: 400 naming what is not known, not a number, or not allowed here.
    """
    for name, value in (("mm_processor_kwargs", processor), ("media_io_kwargs", media_io)):
        if value and not is_trusted:
            raise bad_request(f"{name}: this server was started without --trust-request-mm-kwargs", name)
    pixels = dict(processor or {})
    found = [_whole("mm_processor_kwargs", pixels, key) for key in ("min_pixels", "max_pixels")]
    groups = dict(media_io or {})
    video = groups.pop("video", None) or {}
    for where, left in (("mm_processor_kwargs", pixels), ("media_io_kwargs", groups)):
        if left:
            raise bad_request(f"{where}.{clip(next(iter(left)))}: not known here", where)
    if not isinstance(video, dict):
        raise bad_request("media_io_kwargs.video: expected an object", "media_io_kwargs")
    video = dict(video)
    num_frames, fps = _whole("media_io_kwargs.video", video, "num_frames"), video.pop("fps", None)
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1000):
        raise bad_request(f"media_io_kwargs.video.fps: expected a positive number, got {clip(fps)}", "media_io_kwargs")
    if video:
        raise bad_request(f"media_io_kwargs.video.{clip(next(iter(video)))}: not known here", "media_io_kwargs")
    if fps is not None and num_frames is not None:
        raise bad_request("media_io_kwargs.video: fps and num_frames exclude each other", "media_io_kwargs")
    return MediaOptions(None if fps is None else float(fps), num_frames, *found)


def _whole(where: str, values: Json, key: str) -> int | None:
    value = values.pop(key, None)
    if value is not None and (type(value) is not int or value < 1):
        raise bad_request(
            f"{where}.{key}: expected a positive whole number, got {clip(value)}", where.partition(".")[0]
        )
    return value


NAMED_BYTES = 1 << 28
"""Memory for media that requests gave a name to."""


@dataclass(frozen=True, slots=True)
class MediaReference:
    """One media part, not yet fetched."""

    kind: MediaKind
    where: str
    """Dotted path of the part."""
    url: str | None = None
    base64_data: str | None = None
    uuid: str | None = None
    """The client's name for it."""


def media_reference(part: Json, where: str, ignored: list[str]) -> MediaReference:
    """What a media part refers to.

    Raises:
        Problem: 400 naming the key.
    """
    part_type = str(part["type"])
    kind = MEDIA_PARTS[part_type]
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise bad_request(f"{where}.uuid: expected a name, got {clip(uuid)}", f"{where}.uuid")
    if part.get("file_id") is not None:
        raise bad_request(f"{where}.file_id: this server keeps no files; send the data", f"{where}.file_id")
    if part_type == "input_audio" and "input_audio" in part:
        return MediaReference(kind, where, base64_data=_audio_data(part["input_audio"], where), uuid=uuid)
    key = {"input_image": "image_url", "input_video": "video_url", "input_audio": "audio_url"}.get(part_type, part_type)
    value = part.get(key)
    detail = part.get("detail")
    if isinstance(value, dict):
        detail = value.get("detail", detail)
        value = value.get("url")
        key = f"{key}.url"
    if detail not in (None, "auto"):
        ignored.append(f"{where}.detail")
    if value is None and uuid is not None:
        return MediaReference(kind, where, uuid=uuid)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{where}.{key}: expected a URL, got {clip(value)}", f"{where}.{key}")
    return MediaReference(kind, where, url=value, uuid=uuid)


def _audio_data(value: Any, where: str) -> str:
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, str) or not data:
        raise bad_request(f"{where}.input_audio.data: expected base64 text", f"{where}.input_audio.data")
    form = value.get("format")
    if form is not None and not isinstance(form, str):
        raise bad_request(f"{where}.input_audio.format: expected a name", f"{where}.input_audio.format")
    return data


def check_references(references: Sequence[MediaReference], kinds: Sequence[MediaKind], limits: MediaLimits) -> None:
    """Refuse what the model does not take, before anything is fetched.

    Raises:
        Problem: 400 naming the part.
    """
    for reference in references:
        if reference.kind not in kinds:
            raise bad_request(f"{reference.where}: this model takes no {reference.kind} input", reference.where)
    for kind in KINDS:
        given = [reference for reference in references if reference.kind == kind]
        limit = limits.get(kind, len(given))
        if len(given) > limit:
            raise bad_request(
                f"{given[limit].where}: {len(given)} {kind} parts, at most {limit} are taken (--limit-mm-per-prompt)",
                given[limit].where,
            )


class NamedMedia:
    """Decoded media by the names that clients gave them; the longest unused go first."""

    def __init__(self, max_bytes: int = NAMED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[tuple[MediaKind, str], Media] = OrderedDict()
        self._num_bytes = 0

    def get(self, kind: MediaKind, name: str) -> Media | None:
        """The item of that name."""
        item = self._items.get((kind, name))
        if item is not None:
            self._items.move_to_end((kind, name))
        return item

    def put(self, name: str, item: Media) -> None:
        """Remember an item under a name, in place of what had it."""
        key = (item.kind, name)
        old = self._items.pop(key, None)
        self._num_bytes += _size(item) - (0 if old is None else _size(old))
        self._items[key] = item
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(self._items.popitem(last=False)[1])


def _size(item: Media) -> int:
    if isinstance(item, ImageMedia):
        return item.pixels.nbytes
    return item.samples.nbytes if isinstance(item, AudioMedia) else item.frames.nbytes


class MediaReader:
    """Fetches and decodes the media of requests, away from the event loop."""

    def __init__(self, access: MediaAccess) -> None:
        self._access = access
        self._named = NamedMedia()

    async def read(self, references: Sequence[MediaReference], options: MediaOptions = DEFAULT_OPTIONS) -> list[Media]:
        """The media, in order.

        Raises:
            Problem: 400, 403 or 422 naming the part.
        """
        return list(await asyncio.gather(*(self._one(reference, options) for reference in references)))

    async def _one(self, reference: MediaReference, options: MediaOptions) -> Media:
        kind, uuid = reference.kind, reference.uuid
        if uuid is not None and kind == "video" and options.decodes_videos_anew:
            raise bad_request(f"{reference.where}.uuid: a named video is decoded as usual", f"{reference.where}.uuid")
        is_download = reference.url is not None and reference.url[:4].lower() == "http"
        if uuid is not None and reference.base64_data is None and (reference.url is None or is_download):
            known = self._named.get(kind, uuid)
            if known is not None:
                return known
            if reference.url is None:
                raise bad_request(
                    f"{reference.where}.uuid: no {kind} of that name is known here any more; send it again",
                    f"{reference.where}.uuid",
                )
        try:
            data = await self._bytes(reference)
            item = await asyncio.to_thread(
                decode_media,
                kind,
                data,
                video_fps=options.video_fps or 2.0,
                num_video_frames=options.num_video_frames,
            )
        except InvalidRequest as error:
            raise media_problem(error, reference.where) from None
        if uuid is not None:
            self._named.put(uuid, item)
        return item

    async def _bytes(self, reference: MediaReference) -> bytes:
        if reference.base64_data is not None:
            if reference.base64_data.startswith("data:"):
                return await self._access.read(reference.base64_data, reference.kind)
            return decode_base64(reference.base64_data, reference.kind, self._access.max_bytes)
        assert reference.url is not None, "either data or a URL"
        return await self._access.read(reference.url, reference.kind)


def media_problem(error: InvalidRequest, where: str) -> Problem:
    """The reply for media that cannot be used."""
    return Problem(problem_from(error).status, f"{where}: {error}", where)


async def place_media(
    engine: Engine,
    reader: MediaReader,
    token_ids: list[int],
    references: Sequence[MediaReference],
    options: MediaOptions = DEFAULT_OPTIONS,
) -> PlacedPrompt | None:
    """The prompt with its media in place; None without media.

    Raises:
        Problem: 400, 403 or 422 naming the part.
        InvalidRequest: 400, the media and the prompt's placeholders do not belong together.
    """
    if not references:
        return None
    items = await reader.read(references, options)
    data = {kind: [item for item in items if item.kind == kind] for kind in KINDS}
    given: dict[str, list[Media]] = {kind: listed for kind, listed in data.items() if listed}
    places = {
        f"multi_modal_data.{kind}.{n}": reference.where
        for kind in KINDS
        for n, reference in enumerate(one for one in references if one.kind == kind)
    }
    try:
        return await engine.place_media(token_ids, given, pixel_limits=(options.min_pixels, options.max_pixels))
    except InvalidRequest as error:
        where = places.get(error.param or "")
        if where is None:
            raise
        raise media_problem(error, where) from None
