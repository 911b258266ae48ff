"""Every key of --speculative-config: what is accepted, and by which name the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vkit.config import EngineArgs
from vkit.errors import UsageError
from vkit.speculative_config import SpeculativeSettings, SuffixSettings, parse_speculative_config


@pytest.mark.parametrize(
    ("given", "method", "lookup"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4}, "ngram", (5, 5)),
        ({"prompt_lookup_min": 2, "num_speculative_tokens": 1}, "ngram", (2, 2)),
        ({"prompt_lookup_max": 3, "num_speculative_tokens": 32}, "ngram", (3, 3)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 7, "num_speculative_tokens": 3}, "ngram", (2, 7)),
    ],
)
def test_accepted(given: dict[str, Any], method: str, lookup: tuple[int, int]) -> None:
    for value in (given, json.dumps(given)):
        settings = parse_speculative_config(value)
        assert (settings.method, settings.lookup_range) == (method, lookup)
    assert EngineArgs(model="m", speculative_config=json.dumps(given)).speculation == settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "suffix"}, SuffixSettings()),
        (
            {"suffix_decoding_max_tree_depth": 64, "suffix_decoding_max_spec_factor": 2},
            SuffixSettings(max_tree_depth=64, max_spec_factor=2),
        ),
        (
            {"suffix_decoding_max_cached_requests": 0, "suffix_decoding_min_token_prob": 0.5},
            SuffixSettings(max_cached_requests=0, min_token_prob=0.5),
        ),
        ({"suffix_decoding_max_spec_factor": float("inf")}, SuffixSettings(max_spec_factor=256)),
        ({"suffix_decoding_max_spec_factor": 1e308}, SuffixSettings(max_spec_factor=256)),
    ],
)
def test_suffix_accepted(given: dict[str, Any], expected: SuffixSettings) -> None:
    settings = parse_speculative_config({**given, "num_speculative_tokens": 6})
    assert (settings.method, settings.suffix) == ("suffix", expected)


SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{", "not a JSON object"),
        ("[1]", "expected a JSON object"),
        ({}, "method: is required"),
        ({"num_speculative_tokens": 3}, "method: is required"),
        ({"method": None, "num_speculative_tokens": 3}, "method: expected one of ngram, suffix, draft_model"),
        ({"method": 5, "num_speculative_tokens": 3}, "got 5"),
        ({"method": ["ngram"], "num_speculative_tokens": 3}, "got ['ngram']"),
        ({"method": "ngrams", "num_speculative_tokens": 3}, "did you mean 'ngram'"),
        ({"method": "medusa", "num_speculative_tokens": 3}, "'medusa' is known but not implemented"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "'eagle3' is known but not implemented"),
        ({"method": "dflash", "num_speculative_tokens": 4}, "model: dflash needs the path of a draft checkpoint"),
        ({"model": "", "num_speculative_tokens": 4}, "model: draft_model needs the path"),
        ({"method": "mtp", "model": "m"}, "model: mtp reads no draft checkpoint"),
        ({"method": "mtp", "prompt_lookup_max": 3}, "prompt_lookup_max: applies to ngram, not to mtp"),
        (
            {"method": "dflash", "model": "m", "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
            "dflash drafts are never drawn",
        ),
        ({"method": "ngram"}, "num_speculative_tokens: is required"),
        ({**NGRAM, "num_speculative_tokens": 0}, "expected an integer in 1..32, got 0"),
        ({**NGRAM, "num_speculative_tokens": 33}, "expected an integer in 1..32, got 33"),
        ({**NGRAM, "num_speculative_tokens": True}, "expected an integer in 1..32, got True"),
        ({**NGRAM, "num_speculative_tokens": "4"}, "expected an integer in 1..32, got '4'"),
        ({**NGRAM, "model": "draft"}, "model: ngram reads no draft checkpoint"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min: expected an integer of at least 1"),
        ({**NGRAM, "prompt_lookup_min": 6, "prompt_lookup_max": 5}, "prompt_lookup_min: 6 is above"),
        ({**NGRAM, "num_speculative_token": 4}, "did you mean 'num_speculative_tokens'"),
        ({**NGRAM, "disable_by_batch_size": 4}, "disable_by_batch_size: known but not implemented"),
        ({"method": "suffix"}, "num_speculative_tokens: is required for suffix"),
        ({**SUFFIX, "model": "draft"}, "model: suffix reads no draft checkpoint"),
        ({**SUFFIX, "prompt_lookup_max": 3}, "prompt_lookup_max: applies to ngram, not to suffix"),
        ({**SUFFIX, "suffix_decoding_max_tree_depth": 1}, "max_tree_depth: expected an integer in 2..256, got 1"),
        ({**SUFFIX, "suffix_decoding_max_tree_depth": 24.0}, "expected an integer in 2..256, got 24.0"),
        ({**SUFFIX, "suffix_decoding_max_cached_requests": -1}, "expected an integer of at least 0, got -1"),
        ({**SUFFIX, "suffix_decoding_max_spec_factor": 0}, "max_spec_factor: expected a number of at least 0.1, got 0"),
        ({**SUFFIX, "suffix_decoding_max_spec_factor": float("nan")}, "of at least 0.1, got nan"),
        ({**SUFFIX, "suffix_decoding_min_token_prob": 1.5}, "min_token_prob: expected a number in 0..1, got 1.5"),
        ({**SUFFIX, "suffix_decoding_min_token_prob": True}, "expected a number in 0..1, got True"),
        ({**SUFFIX, "suffix_decoding_min_prob": 0.2}, "did you mean 'suffix_decoding_min_token_prob'"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 24}, "max_tree_depth: applies to suffix, not to ngram"),
        ({**SUFFIX, "draft_sample_method": "probabilistic"}, "suffix drafts are never drawn"),
        ({**NGRAM, "zzz": 4}, "unknown key 'zzz'"),
        ({**NGRAM, "draft_sample_method": "probabilistic"}, "draft_sample_method: ngram drafts are never drawn"),
        ({**NGRAM, "draft_sample_method": "best"}, "draft_sample_method: 'best' is unknown"),
        ({**NGRAM, "rejection_sample_method": "block"}, "rejection_sample_method: 'block' is known but not"),
    ],
)
def test_refused_by_name(given: Any, expected: str) -> None:
    with pytest.raises(UsageError) as failure:
        EngineArgs(model="m", speculative_config=given)
    assert failure.value.message.startswith("--speculative-config: ")
    assert expected in failure.value.message
    if "key" in failure.value.message:
        assert "accepted keys: method" in (failure.value.remedy or "")


def test_settings_are_checked_however_they_come() -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens"):
        SpeculativeSettings(method="ngram")


def test_json_that_is_nested_too_deeply() -> None:
    with pytest.raises(UsageError, match="--speculative-config: not a JSON object"):
        parse_speculative_config("[" * 100_000)
