"""SamplingParams refuses what can never be served, and says which field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vkit.errors import InvalidRequest
from vkit.types import OutputKind, RepetitionDetection, SamplingParams, StructuredOutputs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("n", 0),
        ("n", 1.0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", 3),
        ("stop_token_ids", ["a"]),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("logprob_token_ids", list(range(129))),
        ("logit_bias", {"abc": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("thinking_token_budget", -2),
        ("best_of", 0),
        ("repetition_penalty", 10**400),
        ("repetition_detection", {}),
        ("repetition_detection", 5),
        ("repetition_detection", {"max_pattern_size": 3, "max": 1}),
        ("ignore_eos", 1),
        ("detokenize", "no"),
        ("skip_special_tokens", None),
        ("spaces_between_special_tokens", 0),
        ("include_stop_str_in_output", "yes"),
        ("skip_reading_prefix_cache", 1),
        ("output_kind", "all"),
        ("output_kind", {}),
        ("extra_args", None),
        ("extra_args", [1]),
        ("logits_processors", None),
        ("logits_processors", [print, 3]),
        ("logit_bias", [1]),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


def test_plain_values_stand_for_objects() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 3}, output_kind="delta")  # type: ignore[arg-type]
    assert params.repetition_detection == RepetitionDetection(max_pattern_size=3)
    assert params.output_kind is OutputKind.DELTA
    with pytest.raises(InvalidRequest, match=r"repetition_detection\.min_count"):
        SamplingParams(repetition_detection={"max_pattern_size": 3, "min_count": "2"})  # type: ignore[arg-type]


def test_greedy_switches_the_random_filters_off() -> None:
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


def test_tiny_temperature_is_raised() -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01


def test_normalised_values() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3, 3, 2], seed=-1, logit_bias={"5": 300})
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 2)
    assert params.seed is None
    assert params.logit_bias == {5: 100.0}


@pytest.mark.parametrize("field", ["stop_token_ids", "logprob_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("token_id", [-1, 256])
def test_ids_outside_the_vocabulary(field: str, token_id: int) -> None:
    params = SamplingParams(**{field: [0, token_id]})
    with pytest.raises(InvalidRequest) as caught:
        params.check_vocabulary(256)
    assert caught.value.param == field


def test_structured_outputs_take_exactly_one_kind() -> None:
    assert StructuredOutputs(json=False).json is False
    with pytest.raises(InvalidRequest):
        StructuredOutputs()
    with pytest.raises(InvalidRequest):
        StructuredOutputs(regex="a", choice=["b"])


def test_a_range_without_an_upper_end_is_said_in_words() -> None:
    with pytest.raises(InvalidRequest, match=r"^repetition_penalty: must be above 0 and finite, got 0$"):
        SamplingParams(repetition_penalty=0)
