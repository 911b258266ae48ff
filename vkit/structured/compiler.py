"""Checks constraints and compiles them to grammars, away from the thread that asks, and remembers what it compiled."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from vkit.errors import InvalidRequest, MissingExtra
from vkit.sequence import Grammar
from vkit.structured.grammar import GrammarError, JsonGrammar, TokenGrammar
from vkit.structured.messages import in_one_line, refused
from vkit.structured.reasoning import AfterReasoning
from vkit.structured.source import explained, grammar_source
from vkit.structured.vocabulary import GrammarVocabulary, TokenSource
from vkit.types import StructuredOutputs

DEFAULT_CACHE_SIZE = 256
"""Compiled grammars kept."""

_Ready = tuple[TokenGrammar, GrammarVocabulary]


class GrammarCompiler:
    """Compiles for one tokenizer. May be used from any thread."""

    def __init__(
        self, tokenizer: TokenSource, end_ids: Collection[int], *, cache_size: int = DEFAULT_CACHE_SIZE
    ) -> None:
        """`end_ids`: the tokens that end an output."""
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._cache_size = cache_size
        self._cache: OrderedDict[str, Future[_Ready]] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._vocabulary: GrammarVocabulary | None = None
        self.num_compiled = 0
        """Grammars compiled, that is, not found in the cache."""

    def compile(self, constraint: StructuredOutputs) -> Future[Grammar]:
        """A grammar of its own for one sequence, at its start.

        The future fails with InvalidRequest when the constraint cannot be enforced.
        """
        ready = self._ready(constraint)
        result: Future[Grammar] = Future()

        def pass_on(done: Future[_Ready]) -> None:
            if done.cancelled():
                result.cancel()
            if not result.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(_fresh(done.result(), constraint))

        ready.add_done_callback(pass_on)
        return result

    def check(self, constraint: StructuredOutputs) -> None:
        """Wait until the constraint is compiled.

        Raises:
            InvalidRequest: it cannot be enforced; the message names the offender.
        """
        self._ready(constraint).result()

    def close(self) -> None:
        """Stop the worker."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(cancel_futures=True)

    def _ready(self, constraint: StructuredOutputs) -> Future[_Ready]:
        """The compiled grammar, from the cache or on its way."""
        key = cache_key(constraint)
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                return found
            if self._worker is None:
                self._worker = ThreadPoolExecutor(2, "vkit-grammar")
            future = self._worker.submit(self._compile, constraint)
            self._cache[key] = future
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        # What failed is not kept: its message may be long, and a client that repeats it is told again.
        future.add_done_callback(lambda done: self._forget_failure(key, done))
        return future

    def _forget_failure(self, key: str, done: Future[_Ready]) -> None:
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                if self._cache.get(key) is done:
                    del self._cache[key]

    def _compile(self, constraint: StructuredOutputs) -> _Ready:
        try:
            require_backend("structured output")
        except MissingExtra as error:
            raise InvalidRequest(error.message, remedy=error.remedy, param="structured_outputs") from None
        from llguidance import LLMatcher

        with self._vocabulary_lock:  # built once; whoever comes meanwhile waits for it here, on a worker
            vocabulary = self._vocabulary = self._vocabulary or GrammarVocabulary(self._tokenizer, self._end_ids)
            source = grammar_source(constraint, vocabulary.special_texts)
            is_json = source.is_json and vocabulary.json.backslash_id >= 0
            tokens = vocabulary.for_json if is_json else vocabulary.for_text
        matcher = LLMatcher(tokens, source.text, log_level=0)
        if matcher.is_error():
            raise explained(constraint, matcher.get_error())
        grammar = JsonGrammar(matcher, vocabulary) if is_json else TokenGrammar(matcher, vocabulary)
        _check_start(grammar, vocabulary, constraint.kind)
        self.num_compiled += 1
        return grammar, vocabulary


def require_backend(feature: str) -> None:
    """Refuse a feature where the grammar library is missing.

    Raises:
        MissingExtra: names the extra that brings it.
    """
    if find_spec("llguidance") is None:
        raise MissingExtra(feature, "structured")


def check_constraint(constraint: StructuredOutputs) -> None:
    """Refuse a constraint that no model could follow, before there is a model.

    Raises:
        InvalidRequest: names the offender.
        MissingExtra: the grammar library is not installed.
    """
    require_backend("structured output")
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar_source(constraint, {}).text)
    if is_error:
        raise explained(constraint, messages[0])


def cache_key(constraint: StructuredOutputs) -> str:
    """What makes two constraints the same: kind, text and options. The order of keys counts: outputs follow it."""
    return json.dumps(
        [
            constraint.kind,
            getattr(constraint, constraint.kind),
            constraint.disable_any_whitespace,
            constraint.whitespace_pattern,
            constraint.disable_additional_properties,
        ],
        default=_plain,
    )


def _plain(value: object) -> object:
    return dict(value) if hasattr(value, "keys") else repr(value)  # type: ignore[call-overload]


def _fresh(ready: _Ready, constraint: StructuredOutputs) -> Grammar:
    grammar, vocabulary = ready
    fork = grammar.fork()
    if constraint.begins_after is None:
        return fork
    return AfterReasoning(fork, constraint.begins_after, vocabulary)


def _check_start(grammar: TokenGrammar, vocabulary: GrammarVocabulary, kind: str) -> None:
    """Refuse a grammar that cannot even begin; this also does the first, costliest, part of its work ahead."""
    import numpy as np

    row = np.zeros(-(-vocabulary.size // 32), dtype=np.int32)
    try:
        grammar.fill_bitmask(row)
    except GrammarError as error:
        raise refused(kind, in_one_line(str(error))) from None
    if not row.any():
        raise refused(kind, "no output can satisfy it")
    _check_step(grammar, row.view(np.uint8), vocabulary, kind)


def _check_step(grammar: TokenGrammar, allowed: Any, vocabulary: GrammarVocabulary, kind: str) -> None:
    """Refuse a grammar that allows a token and cannot take it: the library meets some of its limits only then."""
    import numpy as np

    first = next((i for i in np.unpackbits(allowed, bitorder="little").nonzero()[0] if i not in vocabulary.end_ids), -1)
    trial = grammar.fork()
    if first >= 0 and not trial.accept_tokens([int(first)]):
        fault = trial.fault
        if fault is not None:
            raise refused(kind, f"it is too large to follow ({in_one_line(fault)})")
