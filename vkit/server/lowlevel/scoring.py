"""POST /generative_scoring: probabilities of label tokens right after a prompt, from one forward pass per item."""

from __future__ import annotations

import math
from typing import Any

from litestar.response.base import Response

from vkit.server.call import Call
from vkit.server.inference import EnginePrompt, Run
from vkit.server.lowlevel.schemas import Score, ScoringBody, ScoringReply
from vkit.server.openai.logprobs import floored
from vkit.server.openai.shared import effective_priority, now, usage_of
from vkit.server.problems import bad_request
from vkit.server.prompts import check_token_ids, encode
from vkit.server.sampling import check_cache_salt, check_priority, room_for
from vkit.types import MAX_LOGPROB_TOKEN_IDS, PositionLogprobs, SamplingParams

MAX_ITEMS = 1024


async def generative_scoring(call: Call) -> Response[Any]:
    """Score items."""
    body = await call.body(ScoringBody)
    model = call.state.served_name(body.model)
    check_cache_salt(body.cache_salt)
    priority = effective_priority(call, body.priority)
    check_priority(priority, call.settings)
    _check_labels(body.label_token_ids, call.state.engine.tokenizer.vocab_size)
    items, param = await _item_ids(call, body)
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=0,
        logprob_token_ids=tuple(body.label_token_ids),
        detokenize=False,
        ignore_eos=True,
    )
    for token_ids in items:
        if not token_ids:
            raise bad_request(f"{param}: every item must have at least one token", param)
        room_for(len(token_ids), call.state.engine.max_model_len, param)
    prompts = [EnginePrompt(token_ids, None, params, lora=call.state.lora_of(body.model)) for token_ids in items]
    client_id = f"generative-scoring-{call.rid}"
    run = Run(call.state, client_id, prompts, priority=priority, cache_salt=body.cache_salt)
    results = await call.while_connected(run.whole())
    data = [
        _score(i, choice.logprobs or [[]], body.label_token_ids, body.apply_softmax is not False)
        for i, (choice,) in enumerate(results)
    ]
    usage = usage_of(call, None, run.num_prompt_tokens, len(items), run.num_cached_tokens)
    return call.json(ScoringReply(id=client_id, created=now(), model=model, data=data, usage=usage))


def _check_labels(labels: list[int], vocab_size: int) -> None:
    field = "label_token_ids"
    if not 1 <= len(labels) <= MAX_LOGPROB_TOKEN_IDS:
        raise bad_request(f"{field}: expected 1..{MAX_LOGPROB_TOKEN_IDS} ids, got {len(labels)}", field)
    check_token_ids(labels, vocab_size, field)
    repeated = {label for label in labels if labels.count(label) > 1}
    if repeated:
        raise bad_request(f"{field}: token id {min(repeated)} is given twice", field)


async def _item_ids(call: Call, body: ScoringBody) -> tuple[list[list[int]], str]:
    """Token ids of every item, and the field they came from."""
    has_pair = body.query is not None or body.items is not None
    if (body.prompt is None) == (not has_pair):
        raise bad_request("prompt: give either prompt, or query and items", "prompt")
    if body.prompt is not None:
        return await _prompt_items(call, body), "prompt"
    if body.query is None or not body.items:
        field = "query" if body.query is None else "items"
        raise bad_request(f"{field}: query and a non-empty list of items are both required", field)
    if len({type(item) for item in body.items}) > 1:
        raise bad_request("items: a list must hold only strings or only lists of token ids", "items")
    _check_count(len(body.items), "items")
    query = await _ids(call, body.query, body.add_special_tokens is not False, "query")
    pairs = []
    for item in body.items:
        ids = await _ids(call, item, False, "items")
        pairs.append([*ids, *query] if body.item_first else [*query, *ids])
    return pairs, "items"


async def _prompt_items(call: Call, body: ScoringBody) -> list[list[int]]:
    prompt = body.prompt
    adds_special = body.add_special_tokens is not False
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        prompt = [[item for item in prompt if isinstance(item, int)]]
    items = [prompt] if isinstance(prompt, str) else list(prompt or [])
    if not items or any(isinstance(item, int) for item in items):
        raise bad_request("prompt: expected a string, token ids, or a non-empty list of either", "prompt")
    _check_count(len(items), "prompt")
    return [await _ids(call, item, adds_special, "prompt") for item in items if not isinstance(item, int)]


def _check_count(num_items: int, field: str) -> None:
    if num_items > MAX_ITEMS:
        raise bad_request(f"{field}: at most {MAX_ITEMS} items, got {num_items}", field)


async def _ids(call: Call, item: str | list[int], adds_special: bool, field: str) -> list[int]:
    tokenizer = call.state.engine.tokenizer
    if isinstance(item, str):
        return await encode(tokenizer, item, add_special_tokens=adds_special, parse_special=True)
    check_token_ids(item, tokenizer.vocab_size, field)
    return list(item)


def _score(index: int, positions: list[PositionLogprobs], labels: list[int], apply_softmax: bool) -> Score:
    values = {item.token_id: item.logprob for item in positions[0]}
    logprobs = [floored(values[label]) for label in labels]
    probs = [math.exp(value) for value in logprobs]
    if apply_softmax:
        highest = max(logprobs)
        weights = [math.exp(value - highest) for value in logprobs]
        probs = [weight / sum(weights) for weight in weights]
    return Score(
        index=index,
        score=probs[0],
        label_probs={str(label): value for label, value in zip(labels, probs, strict=True)},
        label_logprobs={str(label): value for label, value in zip(labels, logprobs, strict=True)},
    )
