"""`vkit complete`: one prompt in, its completion out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkit.commands import _options, _render
from vkit.commands._session import open_model
from vkit.errors import RequestFailed, UsageError
from vkit.types import FinishReason, Logprob, PositionLogprobs, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from vkit import LLM
    from vkit.media import Media, MediaKind


@_options.expands_flags
def complete(
    *,
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="The text to go on from; - reads standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a file, as it is.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as one user message, through the chat template.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Write the text as it comes.")] = False,
    json: _options.JsonFlag = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            min=0,
            help="Report each token's log-probability and the likeliest N others (stderr, or in --json).",
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option("--repeat", min=1, help="Load once, run this often; timings on stderr, the last text is shown."),
    ] = 1,
    max_tokens: _options.MaxTokens = 16,
    temperature: _options.Temperature = 0.0,
    top_p: _options.TopP = 1.0,
    top_k: _options.TopK = 0,
    seed: _options.Seed = None,
    stop: _options.Stop = None,
    media: _options.MediaFlags,
    constraint: _options.ConstraintFlags,
    sources: _options.ModelFlags,
    max_num_seqs: _options.MaxNumSeqs = 32,
    engine: _options.EngineFlags,
    adapter: _options.AdapterFlags,
) -> None:
    """Complete a prompt and print the text."""
    _check_pairs(ctx, stream=stream, json=json, repeat=repeat, chat=chat)
    params = _options.sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        logprobs=logprobs,
        structured_outputs=constraint.structured_outputs(),
    )
    text = _options.read_prompt(prompt, prompt_file)
    items = media.items()
    with open_model(sources, engine, adapter, max_num_seqs=max_num_seqs) as (llm, load_s):
        asked = _Asked(llm, text, items, chat, adapter.lora)
        if stream:
            output = _stream(asked, params)
        else:
            output, timings = _run(asked, params, repeat)
            if json:
                _render.write_json(_as_json(output, {"load_s": load_s, **timings}))
                return
            _render.write_text(output.outputs[0].text + "\n")
        if logprobs is not None:
            _show_logprobs(output.outputs[0].logprobs or [])


def _check_pairs(ctx: typer.Context, *, stream: bool, json: bool, repeat: int, chat: bool) -> None:
    """Refuse flags that contradict each other."""
    if stream and repeat > 1:
        raise UsageError(f"--repeat: {repeat} runs cannot be streamed", remedy="leave out --stream or --repeat")
    if stream and json:
        raise UsageError("--json: one object cannot be streamed", remedy="leave out --stream or --json")
    source = ctx.get_parameter_source("chat_template")
    if not chat and source is not None and source.name == "COMMANDLINE":
        raise UsageError("--chat-template: needs --chat")


class _Asked:
    """A prompt with its media, and how it is sent."""

    def __init__(self, llm: LLM, text: str, media: dict[MediaKind, list[Media]], chat: bool, lora: str | None) -> None:
        self._llm = llm
        self._chat = chat
        self._lora = lora
        parts: list[dict[str, Any]] = [{"type": kind, kind: item} for kind, items in media.items() for item in items]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        self._messages = [{"role": "user", "content": content}]
        self._prompt: Any = text
        if media and not chat:
            self._prompt = {"prompt": llm.with_placeholders(text, media), "multi_modal_data": media}

    def run(self, params: SamplingParams) -> RequestOutput:
        """The whole output."""
        if self._chat:
            (output,) = self._llm.chat(self._messages, params, lora=self._lora)
        else:
            (output,) = self._llm.generate([self._prompt], params, lora=self._lora)
        return output

    def stream(self, params: SamplingParams) -> Iterator[RequestOutput]:
        """The output as it comes."""
        if self._chat:
            return self._llm.chat_stream(self._messages, params, lora=self._lora)
        return self._llm.stream(self._prompt, params, lora=self._lora)


def _run(asked: _Asked, params: SamplingParams, repeat: int) -> tuple[RequestOutput, dict[str, Any]]:
    """The last of `repeat` runs, and its timings; every run's on stderr when there are several."""
    for run in range(1, repeat + 1):
        begin = time.perf_counter()
        output = asked.run(params)
        timings = _timings(output, time.perf_counter() - begin)
        _check(output)
        if repeat > 1:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in timings.items() if value is not None)
            _render.note(f"run {run} of {repeat}: {shown}")
    return output, timings


def _stream(asked: _Asked, params: SamplingParams) -> RequestOutput:
    """The whole output, put together from the deltas that were written as they came."""
    deltas = asked.stream(params)
    seen: list[RequestOutput] = []

    def pieces() -> Iterator[str]:
        for delta in deltas:
            seen.append(delta)
            yield delta.outputs[0].text

    _render.write_stream(pieces())
    whole = seen[-1]
    _check(whole)
    whole.outputs[0].logprobs = [entry for delta in seen for entry in delta.outputs[0].logprobs or []]
    return whole


def _check(output: RequestOutput) -> None:
    completion = output.outputs[0]
    if completion.finish_reason is FinishReason.ERROR:
        raise RequestFailed(f"the request failed: {completion.error or 'no reason was given'}")


def _timings(output: RequestOutput, total_s: float) -> dict[str, Any]:
    """Seconds to the first token and in all, and decoding speed (None for fewer than two tokens)."""
    metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
    first = last = None
    if metrics is not None and metrics.first_token_time is not None and metrics.last_token_time is not None:
        first = metrics.first_token_time - metrics.arrival_time
        last = metrics.last_token_time - metrics.first_token_time
    return {
        "total_s": total_s,
        "first_token_s": first,
        "decode_tokens_per_s": (num_tokens - 1) / last if last and num_tokens > 1 else None,
    }


def _as_json(output: RequestOutput, timings: dict[str, Any]) -> dict[str, Any]:
    completion = output.outputs[0]
    num_prompt, num_completion = len(output.prompt_token_ids), len(completion.token_ids)
    shown: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        },
        "timings": timings,
    }
    if completion.logprobs is not None:
        shown["logprobs"] = [
            {**_entry(chosen), "top": [_entry(candidate) for candidate in likeliest]}
            for chosen, *likeliest in completion.logprobs
        ]
    return shown


def _entry(candidate: Logprob) -> dict[str, Any]:
    return {
        "token_id": candidate.token_id,
        "token": candidate.text,
        "logprob": _finite(candidate.logprob),
        "rank": candidate.rank,
    }


def _finite(logprob: float) -> float | None:
    """A log-probability as JSON has it; None for a token that cannot occur."""
    return logprob if math.isfinite(logprob) else None


def _show_logprobs(positions: list[PositionLogprobs]) -> None:
    rows = [
        [
            repr(chosen.text),
            f"{chosen.logprob:.4f}",
            "  ".join(f"{c.text!r} {c.logprob:.4f}" for c in likeliest if c.token_id != chosen.token_id),
        ]
        for chosen, *likeliest in positions
    ]
    _render.table(None, ["token", "logprob", "others"], rows, stderr=True)
