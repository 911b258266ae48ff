"""A scripted engine with a byte-level tokenizer: the server's counterpart in tests, without torch.

The tokenizer has 256 byte tokens, a few merged ones, BOS and EOS. The model emits what a script says under greedy
decoding, a flat random distribution otherwise. Everything an engine promises (stops, minimum tokens, log-probabilities,
aborts, queueing) is done in the plainest way.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox

from vkit import check_constraint
from vkit.errors import InvalidRequest
from vkit.metrics import EngineMetrics, MetricFamily, SequenceTimes, gauge
from vkit.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
)

BOS, EOS, EOT = 256, 257, 258
SPECIALS = {BOS: "<s>", EOS: "</s>", EOT: "<eot>"}
FIRST_MERGED = 259

TEMPLATE = (
    "{% if tools %}[tools]{% for t in tools %}{{ t.function.name }};{% endfor %}[/tools]{% endif %}"
    "{% if enable_thinking is defined %}[thinking={{ enable_thinking }}]{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}(call {{ c.function.name }} {{ c.function.arguments | tojson }})"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


class ToyTokenizer:
    """One token per byte, merged tokens where given, BOS when asked."""

    def __init__(self, merged: Sequence[str] = (), *, adds_bos: bool = True) -> None:
        self.merged = [text.encode() for text in merged]
        self.adds_bos = adds_bos
        self.bos_token_id: int | None = BOS
        self.eos_token_id: int | None = EOS
        self.eos_token_ids = frozenset({EOS, EOT})
        self.special_ids: Collection[int] = frozenset(SPECIALS)
        self.vocab_size = FIRST_MERGED + len(self.merged)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        ids = [BOS] if add_special_tokens and self.adds_bos else []
        raw = text.encode()
        i = 0
        while i < len(raw):
            special = next((k for k, v in SPECIALS.items() if parse_special and raw.startswith(v.encode(), i)), None)
            if special is not None:
                ids.append(special)
                i += len(SPECIALS[special])
                continue
            found = next((k for k, piece in enumerate(self.merged) if raw.startswith(piece, i)), None)
            if found is not None:
                ids.append(FIRST_MERGED + found)
                i += len(self.merged[found])
            else:
                ids.append(raw[i])
                i += 1
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        if token_id in SPECIALS:
            return SPECIALS[token_id].encode()
        return self.merged[token_id - FIRST_MERGED]

    def token_piece(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in SPECIALS)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")


class ToyTemplate:
    """A Jinja template in a sandbox."""

    def __init__(self, source: str = TEMPLATE) -> None:
        self.source = source
        self.content_format = "string"
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
        environment.filters["tojson"] = lambda value: __import__("json").dumps(value)

        def raise_exception(message: str) -> None:
            raise InvalidRequest(message, param="messages")

        environment.globals["raise_exception"] = raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise InvalidRequest(f"chat_template: {exc}", param="chat_template") from None

    def mentions(self, name: str) -> bool:
        return name in self.source

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
        joined = [{**message, "content": _joined(message.get("content"))} for message in messages]
        if continue_final_message:
            if not joined[-1]["content"]:
                raise InvalidRequest(
                    "continue_final_message: the last message has no text", param="continue_final_message"
                )
            text = self._text(joined, tools, documents, False, variables)
            return text[: text.rindex(joined[-1]["content"]) + len(joined[-1]["content"])]
        return self._text(joined, tools, documents, add_generation_prompt, variables)

    def _text(self, messages: Any, tools: Any, documents: Any, add_generation_prompt: bool, variables: Any) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                bos_token="<s>",
                eos_token="</s>",
                **variables,
            )
        except jinja2.TemplateError as exc:
            raise InvalidRequest(f"chat_template: {exc}", param="chat_template") from None


def _joined(content: Any) -> Any:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


Script = Callable[[list[int]], Sequence[int]]
"""Prompt ids to the ids emitted under greedy decoding; EOS follows the last one."""


class FakeAsyncLLM:
    """The engine protocol over a script."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        merged: Sequence[str] = (),
        adds_bos: bool = True,
        template: str | None = TEMPLATE,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        delay_s: float = 0.0,
        num_blocks: int = 64,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = ToyTokenizer(merged, adds_bos=adds_bos)
        self.chat_template = None if template is None else ToyTemplate(template)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.media = None
        self.media_limits: dict[Any, int] = {}
        self.generation_config = dict(generation_config or {})
        self.settings = {"architecture": "ToyForCausalLM", "dtype": "float32", "device": "cpu", "block_size": 16}
        self.tokenizer_info = {"tokenizer_class": "ToyTokenizer", "chat_template": template}
        self.is_healthy = True
        self.script = script or (lambda prompt: self.tokenizer.encode("hello world", add_special_tokens=False))
        self.delay_s = delay_s
        self.num_blocks = num_blocks
        self.seen: list[tuple[list[int], SamplingParams, int, str | None]] = []
        self.num_aborts = 0
        self.fail_after: int | None = None
        self.cached_prefixes: dict[str | None, set[tuple[int, ...]]] = {}
        self.measured = EngineMetrics(max_model_len)
        self._seats = asyncio.Semaphore(max_num_seqs)
        self._running = 0
        self._waiting = 0
        self._aborted: dict[str, asyncio.Event] = {}
        self._random = random.Random(0)

    def compile_template(self, source: str) -> ToyTemplate:
        return ToyTemplate(source)

    def metric_families(self) -> list[MetricFamily]:
        return [
            gauge("vllm:num_requests_running", "running", self._running),
            gauge("vllm:num_requests_waiting", "waiting", self._waiting),
            gauge("vllm:kv_cache_usage_perc", "usage", min(1.0, self._running / self.num_blocks)),
            gauge("vllm:cache_config_info", "settings", 1, {"block_size": "16"}),
            *self.measured.families(),
        ]

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        if self._running and not reset_running_requests:
            return False
        self.cached_prefixes.clear()
        return True

    async def check_structured(self, constraint: StructuredOutputs) -> None:
        check_constraint(constraint)

    async def shutdown(self) -> None:
        self.is_healthy = False

    async def abort(self, request_id: str) -> None:
        self.num_aborts += 1
        event = self._aborted.get(request_id)
        if event is not None:
            event.set()

    async def generate(
        self,
        prompt: str | Mapping[str, Any],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        assert not isinstance(prompt, str)
        token_ids = list(prompt["prompt_token_ids"])
        self.seen.append((token_ids, params, priority, cache_salt))
        stop_event = self._aborted[request_id] = asyncio.Event()
        times = RequestMetrics(arrival_time=time.monotonic())
        num_cached = self._look_up(token_ids, cache_salt, params)
        prompt_logprobs = self._prompt_logprobs(token_ids, params)
        queue: asyncio.Queue[CompletionOutput | Exception] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._sequence(token_ids, params, k, times, queue)) for k in range(params.n)]
        open_ids = set(range(params.n))
        try:
            while open_ids:
                getter = asyncio.ensure_future(queue.get())
                aborted = asyncio.ensure_future(stop_event.wait())
                await asyncio.wait({getter, aborted}, return_when=asyncio.FIRST_COMPLETED)
                aborted.cancel()
                if not getter.done():
                    getter.cancel()
                    for _ in open_ids:
                        self._book(FinishReason.ABORT, times)
                    open_ids_left = sorted(open_ids)
                    open_ids.clear()
                    ended = [CompletionOutput(k, "", [], finish_reason=FinishReason.ABORT) for k in open_ids_left]
                    yield RequestOutput(request_id, None, token_ids, ended, True, metrics=times)
                    return
                part = getter.result()
                if isinstance(part, Exception):
                    raise part
                self.measured.generation_tokens.add(len(part.token_ids))
                if part.finish_reason is not None:
                    open_ids.discard(part.index)
                    self._book(part.finish_reason, times)
                yield RequestOutput(
                    request_id, None, token_ids, [part], not open_ids, prompt_logprobs, num_cached, times
                )
        finally:
            for _ in open_ids:
                self._book(FinishReason.ABORT, times)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._aborted.pop(request_id, None)

    def _book(self, reason: FinishReason, times: RequestMetrics) -> None:
        now = time.monotonic()
        first = times.first_token_time
        self.measured.observe_finished(
            SequenceTimes(
                reason, times.arrival_time, times.first_scheduled_time, first, now if first else None, now, 1, 0
            )
        )

    def _look_up(self, token_ids: list[int], salt: str | None, params: SamplingParams) -> int:
        prefixes = self.cached_prefixes.setdefault(salt, set())
        blocks = [tuple(token_ids[:end]) for end in range(16, len(token_ids), 16)]
        hits = 0
        if params.prompt_logprobs is None:
            self.measured.prefix_cache_queries.add(len(token_ids))
            for block in blocks:
                if block not in prefixes:
                    break
                hits = len(block)
            self.measured.prefix_cache_hits.add(hits)
        prefixes.update(blocks)
        self.measured.prompt_tokens.add(len(token_ids))
        return hits

    async def _sequence(
        self,
        prompt: list[int],
        params: SamplingParams,
        index: int,
        times: RequestMetrics,
        queue: asyncio.Queue[CompletionOutput | Exception],
    ) -> None:
        self._waiting += 1
        try:
            await self._seats.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            times.first_scheduled_time = times.first_scheduled_time or time.monotonic()
            for part in self._tokens(prompt, params, index):
                await asyncio.sleep(self.delay_s)
                times.last_token_time = time.monotonic()
                times.first_token_time = times.first_token_time or times.last_token_time
                if self.fail_after is not None and part is not None and self._count(part) > self.fail_after:
                    raise RuntimeError("the scripted engine broke: /secret/path 0xdeadbeef")
                queue.put_nowait(part)
        except RuntimeError as exc:
            queue.put_nowait(exc)
        finally:
            self._running -= 1
            self._seats.release()

    def _count(self, part: CompletionOutput) -> int:
        self._emitted = getattr(self, "_emitted", 0) + len(part.token_ids)
        return self._emitted

    def _tokens(self, prompt: list[int], params: SamplingParams, index: int) -> Any:
        """The outputs of one sequence, as deltas."""
        text = _TextOut(self.tokenizer, params)
        source = self._source(prompt, params, index)
        limit = params.max_tokens if params.max_tokens is not None else self.max_model_len - len(prompt)
        limit = min(limit, self.max_model_len - len(prompt))
        ids: list[int] = []
        for step, token_id in enumerate(source, start=1):
            ids.append(token_id)
            logprobs = None if params.logprobs is None else [self._position(token_id, params)]
            floor_met = step >= params.min_tokens
            reason: FinishReason | None = None
            stop: int | str | None = None
            is_eos = token_id == EOS and not params.ignore_eos
            if floor_met and (
                is_eos or (token_id == EOT and not params.ignore_eos) or token_id in params.stop_token_ids
            ):
                reason = FinishReason.STOP
                stop = None if is_eos else token_id
                piece = self.tokenizer.token_text(token_id) if params.include_stop_str_in_output and stop else ""
                emitted = text.finish() + piece
            else:
                emitted, matched = text.push(token_id, check=floor_met)
                if matched is not None:
                    reason, stop = FinishReason.STOP, matched
                elif floor_met and params.repetition_detection and _repeats(ids, params):
                    reason, stop = FinishReason.REPETITION, "repetition_detected"
                    emitted += text.finish()
                elif step >= limit:
                    reason = FinishReason.LENGTH
                    emitted += text.finish()
            if not params.detokenize:
                emitted = ""
            yield CompletionOutput(index, emitted, [token_id], None, logprobs, reason, stop)
            if reason is not None:
                return

    def _source(self, prompt: list[int], params: SamplingParams, index: int) -> Any:
        if params.is_greedy:
            script = itertools.chain(self.script(prompt), itertools.repeat(EOS))
            for num, token_id in enumerate(script, start=1):
                if token_id == EOS and num <= params.min_tokens:
                    yield ord("x")
                else:
                    yield token_id
        rng = random.Random(params.seed + index) if params.seed is not None else self._random
        while True:
            allowed = params.allowed_token_ids or range(97, 123)
            yield rng.choice(list(allowed))

    def _position(self, token_id: int, params: SamplingParams) -> PositionLogprobs:
        """A distribution that falls with the distance from the token: the sampled one is the most likely."""
        ids = range(self.tokenizer.vocab_size)
        weights = {i: -0.5 * ((i - token_id) % self.tokenizer.vocab_size) for i in ids}
        total = math.log(sum(math.exp(value) for value in weights.values()))
        ranked = sorted(ids, key=lambda i: -weights[i])
        if params.logprob_token_ids:
            wanted = [token_id, *(i for i in params.logprob_token_ids if i != token_id)]
        else:
            num = len(ranked) if params.logprobs == -1 else params.logprobs or 0
            wanted = [token_id, *(i for i in ranked[:num] if i != token_id)]
        return [Logprob(i, weights[i] - total, ranked.index(i) + 1, None) for i in wanted]

    def _prompt_logprobs(self, token_ids: list[int], params: SamplingParams) -> list[PositionLogprobs | None] | None:
        if params.prompt_logprobs is None:
            return None
        inner = params.with_(logprobs=params.prompt_logprobs, logprob_token_ids=())
        return [None, *(self._position(token_id, inner) for token_id in token_ids[1:])]


def _repeats(ids: list[int], params: SamplingParams) -> bool:
    detection = params.repetition_detection
    assert detection is not None
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        tail = ids[-size * detection.min_count :]
        if len(tail) == size * detection.min_count and tail == tail[:size] * detection.min_count:
            return True
    return False


class _TextOut:
    """Incremental text: half characters and stop prefixes are held back."""

    def __init__(self, tokenizer: ToyTokenizer, params: SamplingParams) -> None:
        self.tokenizer = tokenizer
        self.params = params
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""
        self.sent = 0

    def push(self, token_id: int, *, check: bool) -> tuple[str, str | None]:
        if token_id in SPECIALS and self.params.skip_special_tokens:
            new = ""
        else:
            new = self.decoder.decode(self.tokenizer.token_bytes(token_id))
        start = len(self.text)
        self.text += new
        if check:
            matched = self._match(start)
            if matched is not None:
                end, stop = matched
                cut = end if self.params.include_stop_str_in_output else end - len(stop)
                emitted = self.text[self.sent : max(cut, self.sent)]
                return emitted, stop
        hold = 0 if self.params.include_stop_str_in_output else self._held()
        emitted = self.text[self.sent : len(self.text) - hold]
        self.sent += len(emitted)
        return emitted, None

    def _match(self, start: int) -> tuple[int, str] | None:
        found: list[tuple[int, int, str]] = []
        for stop in self.params.stop:
            at = self.text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), -len(stop), stop))
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop

    def _held(self) -> int:
        longest = 0
        for stop in self.params.stop:
            for size in range(1, len(stop)):
                if self.text.endswith(stop[:size]):
                    longest = max(longest, size)
        return longest

    def finish(self) -> str:
        self.text += self.decoder.decode(b"", final=True)
        emitted = self.text[self.sent :]
        self.sent = len(self.text)
        return emitted
