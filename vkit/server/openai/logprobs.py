"""Log-probabilities in the shapes OpenAI clients read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from vkit.server.engine_protocol import Tokenizer
from vkit.server.openai.schemas import ChatLogprobs, ChatTokenLogprob, LegacyLogprobs, TokenLogprob
from vkit.server.schema import PromptLogprob, PromptLogprobs
from vkit.types import WHOLE_VOCABULARY, Logprob, PositionLogprobs

FLOOR = -9999.0


def floored(value: float) -> float:
    """A log-probability JSON can hold."""
    return value if math.isfinite(value) and value > FLOOR else FLOOR


class LogprobWriter:
    """Writes one choice's log-probabilities; keeps the running text offset over chunks."""

    def __init__(self, tokenizer: Tokenizer, num_top: int | None, *, as_token_ids: bool, only_listed: bool) -> None:
        """`only_listed`: the request named the candidates itself (logprob_token_ids)."""
        self._tokenizer = tokenizer
        self._num_top = num_top or 0
        self._as_token_ids = as_token_ids
        self._only_listed = only_listed
        self._offset = 0

    def legacy(self, positions: Iterable[PositionLogprobs | None], token_ids: Sequence[int]) -> LegacyLogprobs:
        """The legacy object for these positions; a position without values is null (the first prompt token)."""
        reply = LegacyLogprobs([], [], [], [])
        for position, token_id in zip(positions, token_ids, strict=True):
            token = self._token(token_id, position[0].text if position else None)
            reply.tokens.append(token)
            reply.text_offset.append(self._offset)
            self._offset += len(token)
            if position is None:
                reply.token_logprobs.append(None)
                reply.top_logprobs.append(None)
                continue
            reply.token_logprobs.append(floored(position[0].logprob))
            reply.top_logprobs.append(self._legacy_top(position))
        return reply

    def _legacy_top(self, position: PositionLogprobs) -> dict[str, float]:
        candidates = [position[0], *self._top(position)]
        top: dict[str, float] = {}
        for item in sorted(candidates, key=lambda item: -item.logprob):
            top.setdefault(self._token(item.token_id, item.text), floored(item.logprob))
        return top

    def chat(self, positions: Iterable[PositionLogprobs]) -> ChatLogprobs:
        """The chat object: exactly the top candidates, falling; the sampled token is not forced in."""
        return ChatLogprobs([self.chat_token(position) for position in positions])

    def chat_token(self, position: PositionLogprobs) -> ChatTokenLogprob:
        """One generated token with its rivals."""
        own = self._entry(position[0])
        return ChatTokenLogprob(own.token, own.logprob, own.bytes, [self._entry(item) for item in self._top(position)])

    def _top(self, position: PositionLogprobs) -> list[Logprob]:
        if self._only_listed:
            return sorted(_distinct(position), key=lambda item: -item.logprob)
        candidates = _distinct(position)
        if self._num_top != WHOLE_VOCABULARY and len(candidates) > self._num_top:
            # One more than asked for means that the sampled token, which comes first, is not among the top.
            candidates = candidates[1:] if len(candidates) == self._num_top + 1 else candidates[: self._num_top]
        return sorted(candidates, key=lambda item: -item.logprob)

    def _entry(self, item: Logprob) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(item.token_id)
        return TokenLogprob(self._token(item.token_id, item.text), floored(item.logprob), list(raw))

    def _token(self, token_id: int, text: str | None) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id) if text is None else text


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None, tokenizer: Tokenizer, *, as_token_ids: bool
) -> PromptLogprobs | None:
    """One entry per prompt token, keyed by decimal id; the first is null."""
    if positions is None:
        return None
    reply: PromptLogprobs = []
    for position in positions:
        if position is None:
            reply.append(None)
            continue
        entry: dict[str, PromptLogprob] = {}
        for item in position:
            text = tokenizer.token_text(item.token_id) if item.text is None else item.text
            if as_token_ids:
                text = f"token_id:{item.token_id}"
            entry.setdefault(str(item.token_id), PromptLogprob(floored(item.logprob), item.rank, text))
        reply.append(entry)
    return reply


def _distinct(position: PositionLogprobs) -> list[Logprob]:
    return list({item.token_id: item for item in reversed(position)}.values())[::-1]
