"""POST /v1/audio/transcriptions: the text of a recording."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol, cast

from litestar.response.base import Response
from msgspec import UNSET, Struct, UnsetType

from vkit.media.audio import AudioSource
from vkit.server.call import Call
from vkit.server.forms import Form
from vkit.server.problems import bad_request, clip
from vkit.server.stream import Frames, data_frame, ending_with_done
from vkit.speech.transcriber import Stretch, Transcript, joined

FORMATS = ("json", "text", "verbose_json")
GRANULARITIES = ("segment", "word")
FIELDS = ("file", "model", "response_format", "stream", "timestamp_granularities")
NO_EFFECT = ("language", "prompt", "temperature", "chunking_strategy", "include")
"""Known fields that these models cannot honour."""


class TranscriptionForm(Struct, kw_only=True):
    """POST /v1/audio/transcriptions: fields of multipart/form-data."""

    file: bytes
    model: str | None = None
    response_format: str | None = None
    stream: bool | None = None
    timestamp_granularities: list[str] | None = None
    language: str | None = None
    prompt: str | None = None
    temperature: float | None = None


class TranscriptionUsage(Struct, kw_only=True):
    """What was transcribed."""

    type: str = "duration"
    seconds: float


class Transcription(Struct):
    """The text of a recording."""

    text: str
    usage: TranscriptionUsage


class TranscriptionSegment(Struct):
    """About a sentence, with times in seconds."""

    id: int
    start: float
    end: float
    text: str
    tokens: list[int]


class TranscriptionWord(Struct):
    """A word, with times in seconds."""

    word: str
    start: float
    end: float


class VerboseTranscription(Struct, kw_only=True):
    """The text of a recording, with times."""

    task: str = "transcribe"
    text: str
    duration: float
    segments: list[TranscriptionSegment] | UnsetType = UNSET
    words: list[TranscriptionWord] | UnsetType = UNSET
    usage: TranscriptionUsage


class TranscriptDelta(Struct):
    """What was understood since the last event."""

    delta: str
    type: str = "transcript.text.delta"


class TranscriptDone(Struct):
    """The whole text."""

    text: str
    usage: TranscriptionUsage
    type: str = "transcript.text.done"


class SpeechEngine(Protocol):
    """What an engine offers whose model hears."""

    def transcribe(self, source: AudioSource) -> AsyncGenerator[Stretch, None]:
        """A recording's text, stretch by stretch."""


async def transcriptions(call: Call) -> Response[Any]:
    """Transcribe a recording."""
    form = await call.form(known=(*FIELDS, *NO_EFFECT), without_effect=NO_EFFECT)
    call.state.served_name(form.text("model"))
    chosen = form.text("response_format") or "json"
    if chosen not in FORMATS:
        raise bad_request(f"response_format: expected {', '.join(FORMATS)}; got {clip(chosen)!r}", "response_format")
    granularities = _granularities(form, chosen)
    content = form.file("file").content
    stretches = _counted(call, content)
    if _is_streamed(form, chosen):
        return await call.events(_frames(stretches), ending_with_done)
    transcript = await call.while_connected(_whole(stretches))
    if chosen == "text":
        text = f"{transcript.text}\n"
        return Response(text, status_code=200, media_type="text/plain", headers=call.headers())
    if chosen == "verbose_json":
        return call.json(_verbose(transcript, granularities))
    usage = TranscriptionUsage(seconds=round(transcript.duration_s, 3))
    return call.json(Transcription(transcript.text, usage))


def _granularities(form: Form, chosen: str) -> list[str]:
    found = form.all("timestamp_granularities")
    for name in found:
        if name not in GRANULARITIES:
            raise bad_request(
                f"timestamp_granularities: expected {' or '.join(GRANULARITIES)}, got {clip(name)!r}",
                "timestamp_granularities",
            )
    if found and chosen != "verbose_json":
        raise bad_request("timestamp_granularities: needs response_format verbose_json", "timestamp_granularities")
    return found or ["segment"]


def _is_streamed(form: Form, chosen: str) -> bool:
    asked = (form.text("stream") or "false").lower()
    if asked not in ("true", "false", "1", "0"):
        raise bad_request(f"stream: expected true or false, got {clip(asked)!r}", "stream")
    is_streamed = asked in ("true", "1")
    if is_streamed and chosen == "verbose_json":
        raise bad_request("stream: verbose_json cannot be streamed", "stream")
    return is_streamed


async def _counted(call: Call, content: bytes) -> AsyncGenerator[Stretch, None]:
    """The recording's stretches, counted as one sequence while they last."""
    state = call.state
    engine = cast(SpeechEngine, state.engine)
    state.admit(1)
    state.num_sequences += 1
    stretches = engine.transcribe(content)
    try:
        async for stretch in stretches:
            yield stretch
    finally:
        state.num_sequences -= 1
        await stretches.aclose()


async def _whole(stretches: AsyncGenerator[Stretch, None]) -> Transcript:
    try:
        return joined([stretch async for stretch in stretches])
    finally:
        await stretches.aclose()


async def _frames(stretches: AsyncGenerator[Stretch, None]) -> Frames:
    """A delta for each stretch with text, and the whole text at the end."""
    text, end_s = "", 0.0
    try:
        async for stretch in stretches:
            end_s = stretch.end_s
            if stretch.text:
                delta = f" {stretch.text}" if text else stretch.text
                text += delta
                yield data_frame(TranscriptDelta(delta))
    finally:
        await stretches.aclose()
    yield data_frame(TranscriptDone(text, TranscriptionUsage(seconds=round(end_s, 3))))


def _verbose(transcript: Transcript, granularities: list[str]) -> VerboseTranscription:
    segments = [
        TranscriptionSegment(item.id, round(item.start, 3), round(item.end, 3), item.text, list(item.token_ids))
        for item in transcript.segments
    ]
    words = [
        TranscriptionWord(word.text, round(word.start, 3), round(word.end, 3))
        for item in transcript.segments
        for word in item.words
    ]
    duration = round(transcript.duration_s, 3)
    return VerboseTranscription(
        text=transcript.text,
        duration=duration,
        segments=segments if "segment" in granularities else UNSET,
        words=words if "word" in granularities else UNSET,
        usage=TranscriptionUsage(seconds=duration),
    )
