"""Beam search over an engine that gives one token at a time with its likeliest alternatives.

A front-end loop: the engine core knows nothing of beams; the prefix cache makes their shared beginnings cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vkit.errors import InvalidRequest
from vkit.inputs import EngineRequest
from vkit.types import WHOLE_VOCABULARY, CompletionOutput, FinishReason, PositionLogprobs, RequestOutput

MAX_BEAM_WIDTH = 1024
"""Every beam is a request of its own in every round."""

NextTokens = Callable[[list[list[int]], int], list[RequestOutput]]
"""(prompts, number of log-probabilities) -> one output of one token per prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """How to search. Checked on construction.

    Raises:
        InvalidRequest: a value out of range; `param` names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token's text."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name}: expected an integer of at least 1, got {value!r}", param=name)
        if self.beam_width > MAX_BEAM_WIDTH:
            raise InvalidRequest(
                f"beam_width: must be in 1..{MAX_BEAM_WIDTH}, got {self.beam_width}", param="beam_width"
            )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name}: expected true or false, got {getattr(self, name)!r}", param=name)
        for name, high in (("temperature", 2.0), ("length_penalty", math.inf)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
                raise InvalidRequest(f"{name}: expected a number of at least 0, got {value!r}", param=name)
            if not math.isfinite(value):
                raise InvalidRequest(f"{name}: must be finite, got {value}", param=name)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse more beams than there are tokens.

        Raises:
            InvalidRequest: naming both numbers.
        """
        if self.beam_width > vocab_size:
            raise InvalidRequest(
                f"beam_width: {self.beam_width} is above the vocabulary's {vocab_size} tokens", param="beam_width"
            )


@dataclass(slots=True)
class _Beam:
    """One hypothesis: output tokens so far and the sum of their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    cumulative: float = 0.0
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    ended: bool = False

    def score(self, length_penalty: float, eos_token_id: int | None) -> float:
        """Sum of log-probabilities over length ** penalty; the prompt and a final EOS do not count as length."""
        length = len(self.token_ids)
        if length and self.token_ids[-1] == eos_token_id:
            length -= 1
        return self.cumulative / math.pow(max(1, length), length_penalty)


def beam_search(
    request: EngineRequest,
    params: BeamSearchParams,
    next_tokens: NextTokens,
    *,
    eos_token_id: int | None,
    decode: Callable[..., str] | None,
    max_model_len: int,
) -> RequestOutput:
    """The best `beam_width` continuations of the request's prompt, best first."""
    prompt = request.prompt_token_ids
    is_scaled = params.temperature not in (0.0, 1.0)
    # A temperature changes the normalisation, which takes the whole vocabulary to know.
    num_logprobs = WHOLE_VOCABULARY if is_scaled else 2 * params.beam_width
    live = [_Beam()]
    done: list[_Beam] = []
    for _ in range(min(params.max_tokens, max_model_len - len(prompt))):
        outputs = next_tokens([prompt + beam.token_ids for beam in live], num_logprobs)
        candidates: list[_Beam] = []
        for beam, output in zip(live, outputs, strict=True):
            positions = output.outputs[0].logprobs
            assert positions, "beam search asks for log-probabilities"
            choices = positions[0][1:]
            if is_scaled:
                choices = _at_temperature(choices, params.temperature)[: 2 * params.beam_width]
            for entry in choices:
                ended = entry.token_id == eos_token_id and not params.ignore_eos
                grown = _Beam(
                    [*beam.token_ids, entry.token_id],
                    beam.cumulative + entry.logprob,
                    [*beam.logprobs, positions[0]],
                    ended,
                )
                (done if ended else candidates).append(grown)
        candidates.sort(key=lambda beam: beam.cumulative, reverse=True)
        live = candidates[: params.beam_width]
        if not live:
            break

    def score(beam: _Beam) -> float:
        return beam.score(params.length_penalty, eos_token_id)

    best = sorted(done + live, key=score, reverse=True)[: params.beam_width]
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt,
        prompt_token_ids=prompt,
        outputs=[_completion(index, beam, params, decode) for index, beam in enumerate(best)],
        finished=True,
    )


def _at_temperature(choices: PositionLogprobs, temperature: float) -> PositionLogprobs:
    """The whole vocabulary's log-probabilities at another temperature; the order stays."""
    scaled = [entry.logprob / temperature for entry in choices]
    total = scaled[0] + math.log(math.fsum(math.exp(value - scaled[0]) for value in scaled))
    return [replace(entry, logprob=value - total) for entry, value in zip(choices, scaled, strict=True)]


def _completion(
    index: int, beam: _Beam, params: BeamSearchParams, decode: Callable[..., str] | None
) -> CompletionOutput:
    shown = beam.token_ids if not beam.ended or params.include_stop_str_in_output else beam.token_ids[:-1]
    text = ""
    if decode is not None:
        text = decode(shown, skip_special_tokens=not params.include_stop_str_in_output)
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=list(beam.token_ids),
        cumulative_logprob=beam.cumulative,
        logprobs=beam.logprobs,
        finish_reason=FinishReason.STOP if beam.ended else FinishReason.LENGTH,
    )
