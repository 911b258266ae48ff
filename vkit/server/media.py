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

    async def read(self, references: Sequence[MediaReference]) -> list[Media]:
        """The media, in order.

        Raises:
            Problem: 400, 403 or 422 naming the part.
        """
        return list(await asyncio.gather(*(self._one(reference) for reference in references)))

    async def _one(self, reference: MediaReference) -> Media:
        kind, uuid = reference.kind, reference.uuid
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
            item = await asyncio.to_thread(decode_media, kind, data)
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
    engine: Engine, reader: MediaReader, token_ids: list[int], references: Sequence[MediaReference]
) -> PlacedPrompt | None:
    """The prompt with its media in place; None without media.

    Raises:
        Problem: 400, 403 or 422 naming the part.
        InvalidRequest: 400, the media and the prompt's placeholders do not belong together.
    """
    if not references:
        return None
    items = await reader.read(references)
    data = {kind: [item for item in items if item.kind == kind] for kind in KINDS}
    return await engine.place_media(token_ids, {kind: listed for kind, listed in data.items() if listed})
