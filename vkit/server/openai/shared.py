"""What completions and chat have in common: what is refused, usage, timings, identity."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vkit.server.call import Call
from vkit.server.inference import Run, has_connector
from vkit.server.parsing import ReplyContext
from vkit.server.problems import bad_request
from vkit.server.schema import (
    NO_EFFECT_FIELDS,
    ChoiceBody,
    CompletionTokensDetails,
    PromptTokensDetails,
    RequestTimings,
    SamplingBody,
    Usage,
)
from vkit.types import DraftCounts, RequestMetrics, SamplingParams

MS = 1000.0


def note_no_effect(call: Call, body: SamplingBody, *, echoed: Sequence[str] = ()) -> None:
    """Name the known fields that change nothing in X-Vkit-Ignored-Fields."""
    for name in NO_EFFECT_FIELDS:
        if name == "kv_transfer_params" and has_connector(call.state.engine):
            continue
        if name not in echoed and getattr(body, name) is not None:
            call.ignored.append(name)
    if body.vllm_xargs is not None and not call.state.engine.settings.get("logits_processors"):
        call.ignored.append("vllm_xargs")


def check_thinking_budget(call: Call, budget: int | None, *, field: str = "thinking_token_budget") -> None:
    """Refuse a budget that nothing could count.

    Raises:
        Problem: 400.
    """
    if budget is not None and not call.state.parsers.parses_reasoning:
        raise bad_request(
            "thinking_token_budget: needs a reasoning parser; start the server with --reasoning-parser", field
        )


def with_thinking_marks(call: Call, params: SamplingParams, context: ReplyContext) -> SamplingParams:
    """The parameters, told between which texts to count; without a budget where there are no thoughts to come."""
    if params.thinking_token_budget is None:
        return params
    marks = call.state.parsers.reasoning_marks(context)
    return params.with_(
        reasoning_marks=marks, thinking_token_budget=None if marks is None else params.thinking_token_budget
    )


def check_stream_options(body: ChoiceBody) -> None:
    """Refuse stream options without a stream.

    Raises:
        Problem: 400.
    """
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream: true", "stream_options")


def wants_usage(call: Call, body: ChoiceBody) -> tuple[bool, bool]:
    """(usage at the end, usage in every chunk)."""
    if call.settings.enable_force_include_usage:
        return True, True
    options = body.stream_options
    if options is None or not options.include_usage:
        return False, False
    return True, bool(options.continuous_usage_stats)


def effective_priority(call: Call, body_priority: int | None) -> int:
    """The request's priority: header over body; an unparsable header is named as ignored."""
    header = call.header("x-vllm-priority")
    if header is None:
        return body_priority or 0
    try:
        return int(header)
    except ValueError:
        call.ignored.append("header:x-vllm-priority")
        return body_priority or 0


def usage_of(
    call: Call,
    body: SamplingBody | None,
    num_prompt: int,
    num_completion: int,
    num_cached: int,
    num_reasoning: int | None = None,
) -> Usage:
    """Token counts, with details where asked for."""
    wants_cached = call.settings.enable_prompt_tokens_details or (
        body is not None and bool(body.return_cached_tokens_details)
    )
    return Usage(
        num_prompt,
        num_completion,
        num_prompt + num_completion,
        PromptTokensDetails(num_cached) if wants_cached else None,
        None if num_reasoning is None else CompletionTokensDetails(num_reasoning),
    )


def timings_of(call: Call, run: Run) -> RequestTimings | None:
    """Times of a request with one sequence, when the server reports them."""
    if not call.settings.enable_per_request_metrics or len(run.prompts) != 1 or run.prompts[0].params.n != 1:
        return None
    times = run.results[0].times
    return None if times is None else timings(times, run.num_completion_tokens)


def timings(times: RequestMetrics, num_tokens: int) -> RequestTimings:
    """Times as the API reports them."""

    def span(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else (end - start) * MS

    decode = span(times.first_token_time, times.last_token_time)
    total = span(times.first_scheduled_time, times.last_token_time)
    return RequestTimings(
        time_to_first_token_ms=span(times.arrival_time, times.first_token_time),
        generation_time_ms=total,
        queue_time_ms=span(times.arrival_time, times.first_scheduled_time),
        mean_itl_ms=None if decode is None or num_tokens < 2 else decode / (num_tokens - 1),
        tokens_per_second=None if not total else num_tokens * MS / total,
        speculative_decoding=_drafts(times.drafts),
    )


def _drafts(counts: DraftCounts) -> dict[str, float] | None:
    """How speculation fared for one request; None where nothing was drafted."""
    rate, length = counts.acceptance_rate, counts.mean_acceptance_length
    if rate is None or length is None:
        return None
    return {
        "num_drafts": counts.num_verifications,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "acceptance_rate": rate,
        "mean_acceptance_length": length,
    }


def now() -> int:
    """Seconds since the epoch."""
    return int(time.time())


def with_load_header(call: Call, headers: dict[str, str]) -> dict[str, str]:
    """Adds the endpoint-load-metrics header when the request asks for it."""
    form = (call.header("endpoint-load-metrics-format") or "").lower()
    if form not in ("text", "json"):
        return headers
    usage = round(call.state.metrics.engine_value("vllm:kv_cache_usage_perc"), 6)
    waiting = int(call.state.metrics.engine_value("vllm:num_requests_waiting"))
    if form == "text":
        value = f"TEXT named_metrics.kv_cache_usage_perc={usage}, named_metrics.num_requests_waiting={waiting}"
    else:
        value = f'JSON {{"named_metrics": {{"kv_cache_usage_perc": {usage}, "num_requests_waiting": {waiting}}}}}'
    return {**headers, "endpoint-load-metrics": value}
