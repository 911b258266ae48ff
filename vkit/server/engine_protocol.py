"""What the server needs of an engine, a tokenizer and a chat template. Nothing here runs a model.

The server is written against these protocols so that a scripted engine can stand in for the real one in tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Protocol

from vkit.media import MediaLimits, MediaProcessor, PlacedPrompt
from vkit.metrics import MetricFamily
from vkit.types import RequestOutput, SamplingParams, StructuredOutputs


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has one."""

    @property
    def eos_token_id(self) -> int | None:
        """The primary id that ends a text."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids that skip_special_tokens drops."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def token_text(self, token_id: int) -> str:
        """One token's own text."""

    def token_piece(self, token_id: int) -> str:
        """One token as the vocabulary spells it."""

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes; part of a character where the token is."""


class ChatTemplate(Protocol):
    """Messages to prompt text."""

    @property
    def source(self) -> str:
        """The template's Jinja text."""

    def mentions(self, name: str) -> bool:
        """Whether any of the model's templates speaks of this variable or key."""

    @property
    def content_format(self) -> str:
        """ "openai" when contents are handed over as lists of parts, "string" otherwise."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text.

        Raises:
            InvalidRequest: the template refused the messages; its own message is kept.
        """


class Engine(Protocol):
    """The asynchronous face of an engine with a loaded model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's own template, or the one given on the command line; None when there is none."""

    def compile_template(self, source: str) -> ChatTemplate:
        """A template of the request's own, in the same sandbox.

        Raises:
            InvalidRequest: it does not compile.
        """

    @property
    def tokenizer_info(self) -> Mapping[str, Any]:
        """tokenizer_config.json without file paths, plus tokenizer_class and chat_template."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in one batch."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The checkpoint's generation_config.json, empty when absent."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The engine's effective configuration, for display: plain JSON values only."""

    @property
    def is_healthy(self) -> bool:
        """False once the step loop died."""

    @property
    def media(self) -> MediaProcessor | None:
        """How the model takes images, videos and sound; None: text only."""

    @property
    def media_limits(self) -> MediaLimits:
        """Most items of each kind in one prompt."""

    async def place_media(
        self,
        token_ids: list[int],
        multi_modal_data: Mapping[str, Any],
        *,
        pixel_limits: tuple[int | None, int | None] = (None, None),
    ) -> PlacedPrompt:
        """The prompt with its media in place, for `generate`.

        Raises:
            InvalidRequest: media the model does not take, or that do not belong to the prompt's placeholders.
        """

    def generate(
        self,
        prompt: str | Mapping[str, Any] | PlacedPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; closing the iterator early aborts the request.

        An abort ends the iterator with an output whose unfinished parts have finish_reason ABORT.
        """

    async def check_structured(self, constraint: StructuredOutputs) -> None:
        """Compile a constraint away from the event loop.

        Raises:
            InvalidRequest: it cannot be enforced; the message names the offender.
        """

    async def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ids are ignored."""

    def metric_families(self) -> list[MetricFamily]:
        """A snapshot of everything the engine measures."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        """Forget all reusable blocks, on request those of a cache connector too. False when some are still held.

        Raises:
            InvalidRequest: `reset_external` without a connector.
        """

    async def shutdown(self) -> None:
        """Stop the step loop and free the model."""
