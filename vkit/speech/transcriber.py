"""Recordings of any length to timed text. Long ones are cut where they are quietest; memory does not grow with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from vkit.device import find_device
from vkit.errors import CheckpointError, OutOfMemoryPreflight
from vkit.loaders import Checkpoint, open_checkpoint
from vkit.media.audio import DEFAULT_LIMITS, AudioLimits, AudioSource, Samples, stream_audio
from vkit.models.hf_config import HFConfig
from vkit.speech.decoders import Heard
from vkit.speech.features import SAMPLE_RATE
from vkit.speech.model import SpeechModel, build_speech_model
from vkit.text.tokenizer import Tokenizer, load_tokenizer

MAX_CHUNK_S = 120.0
"""Longest stretch that is transcribed as one: attention within it grows with its square (1500 frames at 120 s)."""
QUIET_WINDOW_S = 0.2
SEARCHED_SHARE = 0.25
"""The last part of a full chunk, in which the quietest place to cut is looked for."""
PAUSE_S = 1.5
"""Silence that ends a segment."""

_SENTENCE_ENDS = (".", "?", "!", "…")
_WIDE_SENTENCE_ENDS = ("。", "？", "！")


class TokenTexts(Protocol):
    """The part of a tokenizer that a transcriber needs."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def token_text(self, token_id: int) -> str:
        """One token's own text."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word and when it was said, in seconds from the start."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Segment:
    """About a sentence, and when it was said, in seconds from the start."""

    id: int
    text: str
    start: float
    end: float
    token_ids: tuple[int, ...]
    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole recording."""

    text: str
    duration_s: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """One chunk of a recording, transcribed."""

    text: str
    end_s: float
    """Where it ends in the recording."""
    segments: tuple[Segment, ...]


class Transcriber:
    """A loaded speech model and its tokenizer. Safe to use from several threads."""

    def __init__(
        self, name: str, model: SpeechModel, tokenizer: TokenTexts, *, max_chunk_s: float = MAX_CHUNK_S
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self._chunk_len = int(max_chunk_s * SAMPLE_RATE)

    def transcribe(self, source: AudioSource, *, limits: AudioLimits = DEFAULT_LIMITS) -> Transcript:
        """The text of a recording: a file, or the bytes of one, in any common format.

        Raises:
            InvalidRequest: not a recording, damaged, empty, or above a limit.
            MissingExtra: the libraries that decode are not installed.
        """
        return joined(self.stream(source, limits=limits))

    def stream(self, source: AudioSource, *, limits: AudioLimits = DEFAULT_LIMITS) -> Iterator[Stretch]:
        """The same, stretch by stretch; closing the iterator early ends the work.

        Raises:
            InvalidRequest: as `transcribe`, when it is met.
        """
        offset, num_segments = 0, 0
        for chunk in cut(stream_audio(source, sample_rate=SAMPLE_RATE, limits=limits), self._chunk_len):
            (heard,) = self.model.hear([torch.from_numpy(chunk)])
            start_s, end_s = offset / SAMPLE_RATE, (offset + len(chunk)) / SAMPLE_RATE
            segments = tuple(self._segments(heard, start_s, end_s, num_segments))
            yield Stretch(self.tokenizer.decode(heard.token_ids).strip(), end_s, segments)
            offset, num_segments = offset + len(chunk), num_segments + len(segments)

    def _segments(self, heard: Heard, start_s: float, end_s: float, first_id: int) -> Iterator[Segment]:
        """The chunk's words, a segment for each sentence or stretch between pauses."""
        pending: list[_TimedWord] = []
        for word in self._words(heard, start_s, end_s):
            if pending and (pending[-1].ends_sentence or word.start - pending[-1].end > PAUSE_S):
                yield self._segment(first_id, pending)
                first_id, pending = first_id + 1, []
            pending.append(word)
        if pending:
            yield self._segment(first_id, pending)

    def _segment(self, number: int, words: list[_TimedWord]) -> Segment:
        token_ids = [token_id for word in words for token_id in word.token_ids]
        text = self.tokenizer.decode(token_ids).strip()
        timed = tuple(Word(word.text, word.start, word.end) for word in words if word.text)
        return Segment(number, text, words[0].start, words[-1].end, tuple(token_ids), timed)

    def _words(self, heard: Heard, start_s: float, end_s: float) -> Iterator[_TimedWord]:
        """Tokens grouped at those that begin with a space, or follow the end of a sentence without spaces."""
        frame_s = self.model.frame_s
        word: _TimedWord | None = None
        for token_id, frame in zip(heard.token_ids, heard.frames, strict=True):
            text = self.tokenizer.token_text(token_id)
            begins = text[:1].isspace() or (word is not None and word.text.endswith(_WIDE_SENTENCE_ENDS))
            start = start_s + frame * frame_s
            if word is None or begins:
                if word is not None:
                    yield word
                word = _TimedWord([], "", start, start)
            token_ids = [*word.token_ids, token_id]
            end = min(start + frame_s, end_s)
            word = replace(word, token_ids=token_ids, text=self.tokenizer.decode(token_ids).strip(), end=end)
        if word is not None:
            yield word


@dataclass(frozen=True, slots=True)
class _TimedWord:
    token_ids: list[int]
    text: str
    start: float
    end: float

    @property
    def ends_sentence(self) -> bool:
        return self.text.endswith(_SENTENCE_ENDS + _WIDE_SENTENCE_ENDS)


def joined(stretches: Iterable[Stretch]) -> Transcript:
    """The stretches of a recording as one transcript."""
    found = list(stretches)
    return Transcript(
        text=" ".join(stretch.text for stretch in found if stretch.text),
        duration_s=found[-1].end_s if found else 0.0,
        segments=tuple(segment for stretch in found for segment in stretch.segments),
    )


def cut(pieces: Iterable[Samples], chunk_len: int) -> Iterator[Samples]:
    """Pieces joined and cut again into chunks of at most `chunk_len` samples, each cut where it is quietest.

    A recording that fits into one chunk stays whole.
    """
    held: list[Samples] = []
    num_held = 0
    for piece in pieces:
        held.append(piece)
        num_held += len(piece)
        while num_held > chunk_len:
            whole = np.concatenate(held)
            end = _quietest(whole, chunk_len)
            yield whole[:end]
            held, num_held = [whole[end:]], len(whole) - end
    if num_held:
        yield np.concatenate(held)


def _quietest(samples: Samples, chunk_len: int) -> int:
    """The middle of the quietest window in the last part of the first `chunk_len` samples."""
    window = max(1, min(int(QUIET_WINDOW_S * SAMPLE_RATE), chunk_len // 4))
    first = chunk_len - max(window, int(chunk_len * SEARCHED_SHARE))
    energy = np.concatenate([[0.0], np.cumsum(np.square(samples[first:chunk_len], dtype=np.float64))])
    sums = energy[window:] - energy[:-window]
    return first + int(sums.argmin()) + window // 2


@dataclass(frozen=True, slots=True)
class CheckedSpeechModel:
    """A speech model whose files have passed every check that needs no weights."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    device: str
    dtype: torch.dtype
    num_threads: int

    def load(self, progress: Callable[[int, int], None] | None = None) -> Transcriber:
        """The transcriber, with the weights in memory.

        Raises:
            ModelLoadError: the weights cannot be read.
        """
        torch.set_num_threads(self.num_threads)
        model = build_speech_model(self.checkpoint, device=self.device, dtype=self.dtype, progress=progress)
        return Transcriber(self.checkpoint.name, model, self.tokenizer)


def check_speech_model(
    path: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    threads: int = 0,
    tokenizer: Path | None = None,
    tokenizer_config: Path | None = None,
    use_mmap: bool = True,
) -> CheckedSpeechModel:
    """The speech model at `path`, checked; no weight byte is read.

    Raises:
        ModelLoadError: files missing or damaged, no speech model, or too little memory.
    """
    found = find_device(device)
    checkpoint = open_checkpoint(path, use_mmap=use_mmap)
    _check_preprocessor(checkpoint)
    own = HFConfig(checkpoint.config).float_type("dtype", "float32")
    if dtype == "auto":
        chosen = own if str(own).removeprefix("torch.") in found.dtypes else torch.float32
    else:
        chosen = getattr(torch, dtype)
    with torch.device("meta"):
        model = SpeechModel(checkpoint.architecture, HFConfig(checkpoint.config))
    needed = sum(tensor.numel() * chosen.itemsize for tensor in model.state_dict().values())
    if needed > found.available_bytes:
        raise OutOfMemoryPreflight(f"{checkpoint.name} needs {needed} bytes, {found.available_bytes} are available")
    texts = load_tokenizer(tokenizer or checkpoint, tokenizer_config=tokenizer_config)
    num_texts = HFConfig(checkpoint.config).integer("vocab_size") - 1  # the blank has no text
    if texts.vocab_size < num_texts:
        raise CheckpointError(f"{path}: the tokenizer has {texts.vocab_size} tokens, the model writes {num_texts}")
    return CheckedSpeechModel(checkpoint, texts, found.kind, chosen, threads or found.num_threads)


def _check_preprocessor(checkpoint: Checkpoint) -> None:
    """preprocessor_config.json, if there is one, must mean the features that are computed here."""
    path = checkpoint.path / "preprocessor_config.json"
    if not path.is_file():
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable: {error}") from None
    mels = HFConfig(HFConfig(checkpoint.config).mapping("encoder_config")).integer("num_mel_bins", default=80)
    expected = {"feature_size": mels, "sampling_rate": SAMPLE_RATE, "hop_length": 160, "win_length": 400, "n_fft": 512}
    for key, value in expected.items():
        if isinstance(values, dict) and values.get(key, value) != value:
            raise CheckpointError(f"{path}: {key} is {values[key]!r}, the model is computed with {value}")


__all__ = [
    "Segment",
    "Stretch",
    "Transcriber",
    "Transcript",
    "Word",
    "check_speech_model",
    "cut",
    "joined",
]
