"""What is refused at the door, and how prompts become token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fakes import BOS_ID, byte_tokenizer
from vkit.errors import InvalidRequest
from vkit.inputs import InputProcessor, PromptOptions
from vkit.media import ImageMedia
from vkit.types import OutputKind, SamplingParams

IMAGE = ImageMedia(np.zeros((4, 4, 3), np.uint8))


def processor(**keywords: Any) -> InputProcessor:
    tokenizer = keywords.pop("tokenizer", byte_tokenizer())
    return InputProcessor(**{"max_model_len": 64, "vocab_size": 258, "tokenizer": tokenizer, **keywords})


def process(
    prompt: Any, params: SamplingParams | None = None, inputs: InputProcessor | None = None, **keywords: Any
) -> Any:
    return (inputs or processor()).process(prompt, params or SamplingParams(), request_id="r", **keywords)


def test_known_pitfall_14_over_long_prompts_name_both_numbers() -> None:
    with pytest.raises(
        InvalidRequest, match="prompt: 80 tokens, but the context of 64 tokens leaves room for at most 63"
    ):
        process("x" * 80)
    assert len(process("x" * 63).prompt_token_ids) == 63
    with pytest.raises(InvalidRequest, match="64 tokens"):
        process("x" * 64)
    text = "abc" * 30
    left = process(text, options=PromptOptions(truncate_prompt_tokens=5))
    assert left.prompt_token_ids == [*b"bcabc"]
    right = process(text, options=PromptOptions(truncate_prompt_tokens=5, truncation_side="right"))
    assert right.prompt_token_ids == [*b"abcab"]
    assert len(process(text, options=PromptOptions(truncate_prompt_tokens=-1)).prompt_token_ids) == 63
    for bad in (0, -2, True, 1.5):
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
            process(text, options=PromptOptions(truncate_prompt_tokens=bad))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="truncation_side"):
        process(text, options=PromptOptions(truncate_prompt_tokens=3, truncation_side="up"))  # type: ignore[arg-type]


def test_known_pitfall_11_nothing_to_say() -> None:
    with pytest.raises(InvalidRequest, match="no tokens") as caught:
        process("")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="no tokens"):
        process([])
    with pytest.raises(InvalidRequest, match="no tokens"):
        process({"prompt_token_ids": []})
    assert process("", inputs=processor(tokenizer=byte_tokenizer(adds_bos=True))).prompt_token_ids == [BOS_ID]


def test_known_pitfall_12_one_bos() -> None:
    inputs = processor(tokenizer=byte_tokenizer(adds_bos=True))
    assert process("hi", inputs=inputs).prompt_token_ids == [BOS_ID, *b"hi"]
    plain = process("hi", inputs=inputs, options=PromptOptions(add_special_tokens=False))
    assert plain.prompt_token_ids == [*b"hi"]
    assert process([BOS_ID, BOS_ID, 5], inputs=inputs).prompt_token_ids == [BOS_ID, BOS_ID, 5]  # ids as they are


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a"], "expected token ids, got 'a'"),
        ([1, True], "expected token ids, got True"),
        ([1, 2.0], "expected token ids"),
        ([1, 258], "token id 258 is outside the vocabulary"),
        ([-1], "token id -1 is outside"),
        (b"bytes", "expected text or token ids, got bytes"),
        (7, "expected text or token ids, got int"),
        ({}, "expected exactly one of the keys"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "expected exactly one of the keys"),
        ({"prompt": "a", "promt": 1}, "expected exactly one of the keys"),
        ({"prompt": "a", "multi_modal_data": {"image": IMAGE}}, "image: this model takes text only"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt: expected a non-empty string"),
    ],
)
def test_prompts_that_cannot_be(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        process(prompt)


@pytest.mark.parametrize(
    ("params", "keywords", "field"),
    [
        ({"logit_bias": {258: 1}}, {}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, {}, "logit_bias"),
        ({"allowed_token_ids": (300,)}, {}, "allowed_token_ids"),
        ({"stop_token_ids": (300,)}, {}, "stop_token_ids"),
        ({"logprob_token_ids": (-2,)}, {}, "logprob_token_ids"),
        ({"logprobs": 21}, {}, "logprobs"),
        ({"logprobs": -1}, {}, "logprobs"),
        ({"prompt_logprobs": 21}, {}, "prompt_logprobs"),
        ({"n": 1, "best_of": 2, "output_kind": OutputKind.DELTA}, {}, "best_of"),
        ({"thinking_token_budget": 5}, {}, "thinking_token_budget"),
        ({}, {"priority": "high"}, "priority"),
        ({}, {"priority": True}, "priority"),
        ({}, {"cache_salt": ""}, "cache_salt"),
        ({}, {"cache_salt": 5}, "cache_salt"),
    ],
)
def test_known_pitfall_6_values_are_refused_by_name(params: Any, keywords: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        process("a", SamplingParams(**params), **keywords)
    assert caught.value.param == field
    assert str(caught.value).startswith(field)
    assert process("a").prompt_token_ids == [97]  # the next good one works


def test_limits_on_logprobs_can_be_lifted() -> None:
    assert process("a", SamplingParams(logprobs=-1), processor(max_logprobs=-1)).params.logprobs == -1
    assert process("a", SamplingParams(logprobs=50), options=PromptOptions(max_logprobs=50)).params.logprobs == 50


def test_max_tokens_is_clamped_to_the_context() -> None:
    assert process("abcd", SamplingParams(max_tokens=None)).max_total_tokens == 64
    assert process("abcd", SamplingParams(max_tokens=500)).max_total_tokens == 64
    assert process("abcd", SamplingParams(max_tokens=3)).max_total_tokens == 7


def test_defaults_come_from_the_generation_config_and_requests_win() -> None:
    inputs = processor(
        generation_config={"temperature": 0.3, "top_k": 7, "top_p": None, "max_new_tokens": 9, "junk": 1}
    )
    params = inputs.default_sampling_params(top_k=2)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.3, 2, 1.0, 9)


def test_plug_ins_may_refuse_requests() -> None:
    def check(params: SamplingParams) -> None:
        if params.extra_args.get("strength") == "huge":
            raise InvalidRequest("strength: too much", param="strength")

    inputs = processor(checks=(check,))
    assert process("a", SamplingParams(extra_args={"strength": 1}), inputs)
    with pytest.raises(InvalidRequest, match="strength"):
        process("a", SamplingParams(extra_args={"strength": "huge"}), inputs)


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    inputs = processor(tokenizer=None)
    assert process([5], inputs=inputs).prompt_token_ids == [5]
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        process("a", inputs=inputs)
    with pytest.raises(InvalidRequest, match="stop"):
        process([5], SamplingParams(stop=("a",)), inputs)
