"""A stand-in for vkit.LLM that answers with a given text, one character per token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vkit.errors import InvalidRequest
from vkit.types import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput, SamplingParams


class FakeLLM:
    """Records what it was asked; class attributes say how it behaves."""

    answer = " Paris, é😀 and more"
    has_template = True
    delay_s = 0.0
    error: str | None = None
    made: list[FakeLLM] = []  # noqa: RUF012  one list for all, cleared by the fixture

    def __init__(self, *, on_load_progress: Any = None, **keywords: Any) -> None:
        self.keywords = keywords
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.is_closed = False
        self.num_stopped = 0
        if on_load_progress is not None:
            on_load_progress(1, 2)
            on_load_progress(2, 2)
        FakeLLM.made.append(self)

    @classmethod
    def for_text(cls, **keywords: Any) -> FakeLLM:
        return cls(**keywords)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.is_closed = True

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if not self.has_template:
            raise InvalidRequest("this model has no chat template", remedy="pass --chat-template")
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def generate(
        self, prompts: Sequence[str], params: SamplingParams, *, lora: str | None = None
    ) -> list[RequestOutput]:
        return [self._whole(prompt, params) for prompt in prompts]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, lora: str | None = None
    ) -> list[RequestOutput]:
        return [self._whole(self.apply_chat_template(messages), params)]

    def stream(self, prompt: str, params: SamplingParams, *, lora: str | None = None) -> Iterator[RequestOutput]:
        self.prompts.append(prompt)
        self.params.append(params)
        text = self.answer[: params.max_tokens]
        try:
            for i, character in enumerate(text):
                time.sleep(self.delay_s)
                last = i + 1 == len(text)
                yield self._output(prompt, character, params, FinishReason.LENGTH if last else None)
        except GeneratorExit:
            self.num_stopped += 1
            raise

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, lora: str | None = None
    ) -> Iterator[RequestOutput]:
        return self.stream(self.apply_chat_template(messages), params)

    def _whole(self, prompt: str, params: SamplingParams) -> RequestOutput:
        self.prompts.append(prompt)
        self.params.append(params)
        return self._output(prompt, self.answer[: params.max_tokens], params, FinishReason.LENGTH)

    def _output(
        self, prompt: str, text: str, params: SamplingParams, finish_reason: FinishReason | None
    ) -> RequestOutput:
        logprobs = None
        if params.logprobs is not None:
            logprobs = [[Logprob(ord(c), -0.5, 1, c), Logprob(0, float("-inf"), 2, "never")] for c in text]
        if self.error is not None:
            finish_reason = FinishReason.ERROR
        completion = CompletionOutput(
            0, text, [ord(c) for c in text], logprobs=logprobs, finish_reason=finish_reason, error=self.error
        )
        metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.5, last_token_time=2.5)
        return RequestOutput("r", prompt, [1, 2, 3], [completion], finish_reason is not None, metrics=metrics)
