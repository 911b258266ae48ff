"""`vkit transcribe`: the text of a recording."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vkit.commands import _options, _render
from vkit.errors import UsageError

if TYPE_CHECKING:
    from vkit.speech.transcriber import Segment, Stretch, Transcriber


@_options.expands_flags
def transcribe(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Sound or video, in any common format.")],
    sources: _options.ModelFlags,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where to compute; auto takes the best.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Number format to compute in; auto takes the checkpoint's where it is fast."),
    ] = "auto",
    threads: Annotated[int, typer.Option("--threads", min=0, help="Processor threads; 0: all there are.")] = 0,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="A line for each sentence, with the time it begins and ends.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with segments and words instead of text.")
    ] = False,
) -> None:
    """Print what is said in a recording.

    Needs a speech model (Parakeet CTC, RNN-T or TDT). Text comes out as it is understood.
    """
    if as_json and timestamps:
        raise UsageError("--timestamps: --json has the times already", remedy="give one of them")
    if sources.chat_template is not None:
        raise UsageError("--chat-template: a speech model has none")
    if sources.model is None:
        raise UsageError("--model: a speech model is needed", remedy="--model PATH of a Parakeet checkpoint")
    if not file.is_file():
        raise UsageError(f"FILE: {file}: {'not a file' if file.exists() else 'no such file'}")
    from vkit.default_model import resolve_model

    path = resolve_model(sources.model, revision=sources.revision, download_dir=sources.download_dir, say=_render.note)
    transcriber = _open(path, sources, device=device, dtype=dtype, threads=threads)
    with _render.seconds_progress(file.name) as progress:
        stretches = _watched(transcriber.stream(file), progress)
        if as_json:
            _write_json(stretches)
        else:
            _write_lines(stretches, timestamps=timestamps)


def _open(path: Path, sources: _options.ModelFlags, *, device: str, dtype: str, threads: int) -> Transcriber:
    from vkit.speech.transcriber import check_speech_model

    checked = check_speech_model(
        path,
        device=device,
        dtype=dtype,
        threads=threads,
        tokenizer=None if sources.tokenizer is None else Path(sources.tokenizer),
        tokenizer_config=None if sources.tokenizer_config is None else Path(sources.tokenizer_config),
    )
    with _render.load_progress(path.name) as progress:
        return checked.load(progress)


def _watched(stretches: Iterator[Stretch], progress: _render.SecondsProgress | None) -> Iterator[Stretch]:
    for stretch in stretches:
        if progress is not None:
            progress(stretch.end_s)
        yield stretch


def _write_lines(stretches: Iterator[Stretch], *, timestamps: bool) -> None:
    """Text as it comes: one line in all, or a line for each segment."""
    is_first = True
    for stretch in stretches:
        if timestamps:
            for segment in stretch.segments:
                _render.write_text(f"[{clock(segment.start)} -> {clock(segment.end)}] {segment.text}\n")
        elif stretch.text:
            _render.write_text(stretch.text if is_first else f" {stretch.text}")
            is_first = False
    if not timestamps:
        _render.write_text("\n")


def _write_json(stretches: Iterator[Stretch]) -> None:
    from vkit.speech.transcriber import joined

    transcript = joined(stretches)
    _render.write_json(
        {
            "text": transcript.text,
            "duration": round(transcript.duration_s, 3),
            "segments": [_segment_json(segment) for segment in transcript.segments],
        }
    )


def _segment_json(segment: Segment) -> dict[str, Any]:
    return {
        "id": segment.id,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "words": [
            {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)} for word in segment.words
        ],
    }


def clock(seconds: float) -> str:
    """Seconds as hours, minutes, seconds and milliseconds: 00:01:02.345."""
    milliseconds = math.floor(seconds * 1000 + 0.5)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}.{rest % 1000:03d}"
