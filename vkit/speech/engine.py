"""A transcriber as the server sees an engine: one recording at a time, the others wait.

Only what the routes of a speech model and the administration ask of an engine; all others are refused before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vkit.media.audio import AudioSource
from vkit.metrics import MetricFamily
from vkit.speech.transcriber import Stretch, Transcriber
from vkit.text.tokenizer import Tokenizer


class SpeechEngine:
    """Transcribes for any number of callers on one thread, a stretch of one recording at a time."""

    def __init__(
        self, transcriber: Transcriber, tokenizer: Tokenizer, settings: Mapping[str, Any], *, max_num_seqs: int
    ) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.max_num_seqs = max_num_seqs
        self.max_model_len = 0
        self.chat_template = None
        self.generation_config: Mapping[str, Any] = {}
        self._transcriber = transcriber
        self._worker = ThreadPoolExecutor(1, "vkit-speech")
        self._is_closed = False

    @property
    def tokenizer_info(self) -> Mapping[str, Any]:
        """Settings of the tokenizer, for display."""
        return dict(self.tokenizer.settings)

    @property
    def is_healthy(self) -> bool:
        """Whether recordings can be taken."""
        return not self._is_closed

    async def transcribe(self, source: AudioSource) -> AsyncGenerator[Stretch, None]:
        """A recording's text, stretch by stretch; closing the iterator early ends the work.

        Raises:
            InvalidRequest: not a recording, damaged, empty, or above a limit.
        """
        stretches = self._transcriber.stream(source)
        loop = asyncio.get_running_loop()
        try:
            while (stretch := await loop.run_in_executor(self._worker, _next, stretches)) is not None:
                yield stretch
        finally:
            # On the same thread, since a generator cannot be closed while it runs.
            self._worker.submit(_close, stretches)

    async def abort(self, request_id: str) -> None:
        """Nothing runs that has an id."""

    def metric_families(self) -> list[MetricFamily]:
        """Nothing is measured beside the requests themselves."""
        return []

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """There is none, so it is empty."""
        return True

    async def shutdown(self) -> None:
        """Finish the stretch under way and take no more."""
        self._is_closed = True
        await asyncio.to_thread(self._worker.shutdown, cancel_futures=True)


def _next(stretches: Iterator[Stretch]) -> Stretch | None:
    return next(stretches, None)


def _close(stretches: Any) -> None:
    stretches.close()
