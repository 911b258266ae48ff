"""POST /v1/embeddings: one vector per input."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Protocol, cast

import numpy as np
from litestar.response.base import Response
from msgspec import Struct

from vkit.errors import InvalidRequest
from vkit.inputs import Prompt, PromptOptions
from vkit.pooling import EmbeddingForm, shortened
from vkit.server.call import Call
from vkit.server.openai.shared import effective_priority
from vkit.server.problems import Problem, bad_request
from vkit.server.sampling import check_cache_salt, check_priority
from vkit.server.schema import Int
from vkit.types import RequestOutput

MAX_INPUTS = 2048


class EmbeddingBody(Struct, kw_only=True):
    """POST /v1/embeddings: a text, token ids, or a list of one or the other."""

    model: str | None = None
    input: str | list[str | Int | list[Int]]
    encoding_format: str | None = None
    dimensions: Int | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    user: str | None = None
    request_id: str | None = None


class Embedding(Struct):
    """One input's vector: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(Struct, kw_only=True):
    """Vectors in the order of the inputs."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class EmbeddingEngine(Protocol):
    """What an engine offers whose model embeds."""

    @property
    def embedding(self) -> EmbeddingForm:
        """What the vectors are like."""

    async def embed(
        self,
        prompt: Prompt,
        *,
        request_id: str,
        priority: int,
        cache_salt: str | None,
        lora: str | None,
        options: PromptOptions,
    ) -> RequestOutput:
        """A prompt's vector, as `embedding` of the output."""


async def embeddings(call: Call) -> Response[Any]:
    """Embed inputs."""
    body = await call.body(EmbeddingBody)
    model = call.state.served_name(body.model)
    if body.encoding_format not in (None, "float", "base64"):
        raise bad_request("encoding_format: expected float or base64", "encoding_format")
    prompts = _prompts(body.input)
    check_cache_salt(body.cache_salt)
    priority = effective_priority(call, body.priority)
    check_priority(priority, call.settings)
    options = PromptOptions(
        add_special_tokens=body.add_special_tokens is not False,
        parse_special=True,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side="right" if body.truncation_side == "right" else "left",
    )
    if body.truncation_side not in (None, "left", "right"):
        raise bad_request("truncation_side: expected left or right", "truncation_side")
    engine = cast(EmbeddingEngine, call.state.engine)
    engine.embedding.check_dimensions(body.dimensions)
    outputs = await call.while_connected(_embedded(call, engine, prompts, priority, body, options))
    vectors = [shortened(output.embedding or [], body.dimensions) for output in outputs]
    is_packed = body.encoding_format == "base64"
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return call.json(
        EmbeddingReply(
            data=[Embedding(index=i, embedding=_packed(v) if is_packed else v) for i, v in enumerate(vectors)],
            model=model,
            usage=EmbeddingUsage(num_tokens, num_tokens),
        )
    )


def _prompts(given: str | list[Any]) -> list[Prompt]:
    """The inputs as the engine takes them.

    Raises:
        Problem: 400 for an empty one, a mixture, or too many.
    """
    if isinstance(given, list) and given and all(isinstance(item, int) for item in given):
        given = [given]
    items = [given] if isinstance(given, str) else given
    if not items:
        raise bad_request("input: expected at least one text or list of token ids", "input")
    if len({type(item) for item in items}) > 1 or isinstance(items[0], int):
        raise bad_request("input: expected a text, token ids, or a list of one or the other", "input")
    if len(items) > MAX_INPUTS:
        raise bad_request(f"input: at most {MAX_INPUTS} inputs, got {len(items)}", "input")
    for index, item in enumerate(items):
        if not item:
            raise bad_request(f"input.{index}: must not be empty", "input")
    return items


async def _embedded(
    call: Call,
    engine: EmbeddingEngine,
    prompts: list[Prompt],
    priority: int,
    body: EmbeddingBody,
    options: PromptOptions,
) -> list[RequestOutput]:
    """The outputs of all prompts, in order. When one fails the others are aborted."""
    state = call.state
    state.admit(len(prompts))
    state.num_sequences += len(prompts)
    client_id = f"embd-{call.rid}"
    tasks = [
        asyncio.ensure_future(
            engine.embed(
                prompt,
                request_id=f"{client_id}-{index}",
                priority=priority,
                cache_salt=body.cache_salt,
                lora=state.lora_of(body.model),
                options=options,
            )
        )
        for index, prompt in enumerate(prompts)
    ]
    try:
        return await asyncio.gather(*tasks)
    except InvalidRequest as error:
        raise _about_input(error) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        state.num_sequences -= len(prompts)


def _about_input(error: InvalidRequest) -> Problem:
    """What the engine calls the prompt is the input here."""
    if error.param not in ("prompt", "text"):
        return bad_request(str(error), error.param)
    return bad_request(f"input: {str(error).removeprefix(f'{error.param}: ')}", "input")


def _packed(vector: list[float]) -> str:
    """Little-endian float32, in base64."""
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")
