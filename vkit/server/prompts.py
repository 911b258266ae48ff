"""Prompts as the engine gets them: text to token ids, messages through the chat template, never on the event loop when
it could take long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vkit.media.conversation import with_placeholders
from vkit.server.engine_protocol import ChatTemplate, Engine, Tokenizer
from vkit.server.media import MediaReference
from vkit.server.problems import bad_request

T = TypeVar("T")

INLINE_TEXT_LEN = 4096
"""Shorter texts are tokenized on the event loop: a thread costs more than the work."""

TEMPLATE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a chat template is given."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    media: Sequence[MediaReference] = ()
    """What the conversation's media parts refer to, in order."""
    template: str | None = None
    """Template source of the request itself."""


async def off_loop(work: Callable[[], T], size: int) -> T:
    """The result of `work`, computed in a thread when `size` (characters) says that it may take long."""
    if size <= INLINE_TEXT_LEN:
        return work()
    return await asyncio.to_thread(work)


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
    """Token ids of a text."""
    return await off_loop(
        lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special), len(text)
    )


async def encode_rendered(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a rendered template; when it wrote the BOS itself, no second one is added."""
    token_ids = await encode(tokenizer, text, add_special_tokens=add_special_tokens, parse_special=True)
    bos = tokenizer.bos_token_id
    if add_special_tokens and bos is not None and token_ids[:2] == [bos, bos]:
        return token_ids[1:]
    return token_ids


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        Problem: 400.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise bad_request(f"{param}: token id {token_id} is outside the vocabulary (0..{vocab_size - 1})", param)


async def render_chat(engine: Engine, prompt: ChatPrompt, compile_template: Callable[[str], ChatTemplate]) -> str:
    """The prompt text of a chat.

    Raises:
        Problem: 400 when there is no template, or it takes too long.
        InvalidRequest: 400, the template's own refusal.
    """
    template = compile_template(prompt.template) if prompt.template is not None else engine.chat_template
    if template is None:
        raise bad_request(
            "This model has no chat template. Start the server with --chat-template, or use /v1/completions.",
            "messages",
        )

    messages = prompt.messages
    if prompt.media and template.content_format == "string":
        assert engine.media is not None, "references were checked"
        messages = with_placeholders(messages, engine.media)

    def work() -> str:
        return template.render(
            messages,
            tools=prompt.tools,
            documents=prompt.documents,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            **prompt.variables,
        )

    try:
        return await asyncio.wait_for(asyncio.to_thread(work), TEMPLATE_TIMEOUT_S)
    except TimeoutError:
        raise bad_request(
            f"chat_template: rendering took longer than {TEMPLATE_TIMEOUT_S:g} s", "chat_template"
        ) from None


def token_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[list[int]]:
    """Character spans [start, end) of each token in its text; special tokens that are not in the text get empty spans.

    Raises:
        Problem: 400 when the tokenizer changes the text, so that tokens have no place in it.
    """
    raw = text.encode()
    char_at = _char_index(text)
    spans: list[list[int]] = []
    position = 0
    for token_id in token_ids:
        piece = tokenizer.token_bytes(token_id)
        if token_id in tokenizer.special_ids:
            piece = tokenizer.token_text(token_id).encode()
        if raw.startswith(piece, position):
            end = position + len(piece)
        elif token_id in tokenizer.special_ids:
            end = position
        elif position == 0 and piece.startswith(b" ") and raw.startswith(piece[1:], position):
            end = position + len(piece) - 1
        else:
            raise bad_request(
                "return_token_offsets: this tokenizer changes the text, so its tokens have no offsets in it",
                "return_token_offsets",
            )
        spans.append([char_at[position], char_at[max(end - 1, position)] + 1 if end > position else char_at[position]])
        position = end
    return spans


def _char_index(text: str) -> list[int]:
    """For each byte of the UTF-8 form (and its end) the index of the character it belongs to."""
    index = [i for i, char in enumerate(text) for _ in range(len(char.encode()))]
    index.append(len(text))
    return index
