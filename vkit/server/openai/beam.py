"""Beam search over the engine: a front-end loop of one-token requests that share their prompt through the cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vkit.server.inference import EnginePrompt, Run
from vkit.server.schema import ChoiceBody
from vkit.server.state import ServerState
from vkit.types import FinishReason, PositionLogprobs


@dataclass(slots=True)
class Beam:
    """One hypothesis."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    total: float = 0.0
    text: str = ""
    finish_reason: FinishReason = FinishReason.LENGTH

    def score(self, length_penalty: float) -> float:
        """Cumulative log-probability over the length (without the end token) to the power of the penalty."""
        length = len(self.token_ids) - (self.finish_reason is FinishReason.STOP)
        return self.total / float(max(1, length) ** length_penalty)


async def beam_search(
    state: ServerState, client_id: str, prompt: EnginePrompt, width: int, body: ChoiceBody, priority: int
) -> list[Beam]:
    """The `width` best hypotheses, best first. Every round extends each live beam by its 2*width best tokens."""
    tokenizer = state.engine.tokenizer
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    ends = set() if prompt.params.ignore_eos else {tokenizer.eos_token_id}
    limit = prompt.params.max_tokens or 1
    live, done = [Beam()], list[Beam]()
    for _ in range(limit):
        candidates = await _extend(state, client_id, prompt, live, 2 * width, priority, body.cache_salt)
        finished = [beam for beam in candidates if beam.token_ids[-1] in ends]
        for beam in finished:
            beam.finish_reason = FinishReason.STOP
        done += finished
        live = sorted((beam for beam in candidates if beam.token_ids[-1] not in ends), key=lambda b: -b.total)[:width]
        if not live or (len(done) >= width and _cannot_improve(live, done, width, penalty)):
            break
    best = sorted([*done, *live], key=lambda beam: -beam.score(penalty))[:width]
    skip = prompt.params.skip_special_tokens
    for beam in best:
        beam.text = tokenizer.decode(beam.token_ids, skip_special_tokens=skip)
    return best


def _cannot_improve(live: list[Beam], done: list[Beam], width: int, penalty: float) -> bool:
    """Whether no live beam can still enter the result: true only where longer never scores better."""
    if penalty > 0:
        return False
    kept = sorted((beam.score(penalty) for beam in done), reverse=True)[:width]
    return max(beam.total for beam in live) <= kept[-1]


async def _extend(
    state: ServerState,
    client_id: str,
    prompt: EnginePrompt,
    beams: list[Beam],
    num_candidates: int,
    priority: int,
    cache_salt: str | None,
) -> list[Beam]:
    params = prompt.params.with_(
        n=1, max_tokens=1, min_tokens=0, temperature=0.0, logprobs=num_candidates, ignore_eos=True, stop=()
    )
    prompts = [replace(prompt, token_ids=[*prompt.token_ids, *beam.token_ids], params=params) for beam in beams]
    run = Run(state, client_id, prompts, priority=priority, cache_salt=cache_salt)
    results = await run.whole()
    extended: list[Beam] = []
    for beam, (choice,) in zip(beams, results, strict=True):
        position = (choice.logprobs or [[]])[0]
        distinct = {item.token_id: item for item in position}
        for item in sorted(distinct.values(), key=lambda item: -item.logprob)[:num_candidates]:
            others = [other for other in position if other.token_id != item.token_id]
            extended.append(
                Beam([*beam.token_ids, item.token_id], [*beam.logprobs, [item, *others]], beam.total + item.logprob)
            )
    return extended
