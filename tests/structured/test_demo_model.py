"""The demo model under constraints, at temperature 1: whatever it wants to say, the result is valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.structured.kit import vectors
from vkit import LLM, SamplingParams, StructuredOutputs
from vkit.parsers.forced import forced_schema
from vkit.types import FinishReason, RequestOutput

pytestmark = pytest.mark.slow

NUM_SEEDS = 50
SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "state": {"enum": ["idle", "busy", None]},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "points": {
        "type": "array",
        "items": {"$ref": "#/$defs/P"},
        "minItems": 1,
        "maxItems": 2,
        "$defs": {
            "P": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -99, "maximum": 99}, "on": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "either": {
        "anyOf": [
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            {"type": "string", "format": "date"},
            {"type": "array", "items": {"enum": [1, 2.5, "ü"]}, "minItems": 2, "maxItems": 3},
        ]
    },
}
PROMPTS = ("Answer in JSON: ", "Once upon a time", "Value: ")


@pytest.fixture(scope="module")
def llm(demo_model_path: Path) -> Iterator[LLM]:
    with LLM(str(demo_model_path), max_num_seqs=50, max_model_len=512, num_blocks=400) as made:
        yield made


def sampled(llm: LLM, constraint: StructuredOutputs, prompt: str, **values: Any) -> list[RequestOutput]:
    values = {"temperature": 1.0, "max_tokens": 96, **values}
    params = [SamplingParams(seed=seed, structured_outputs=constraint, **values) for seed in range(NUM_SEEDS)]
    return llm.generate([prompt] * NUM_SEEDS, params)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_seed_gives_json_that_the_schema_accepts(llm: LLM, name: str) -> None:
    prompt = PROMPTS[list(SCHEMAS).index(name)]
    found = sampled(llm, StructuredOutputs(json=SCHEMAS[name]), prompt)
    validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    for output in found:
        completion = output.outputs[0]
        assert completion.finish_reason is FinishReason.STOP, completion
        validator.validate(json.loads(completion.text))
    assert len({output.outputs[0].text for output in found}) > 5, "the constraint leaves the model its say"


def test_forced_calls_are_always_calls(llm: LLM) -> None:
    case = next(case for case in vectors("tool_choice/cases.json") if case["name"] == "required_single_tool")
    schema = forced_schema(case["tools"], parallel=False)
    schema["items"]["properties"]["parameters"]["additionalProperties"] = False
    for output in sampled(llm, StructuredOutputs(json=schema), "Tune the radio to 98.1. "):
        (call,) = json.loads(output.outputs[0].text)
        assert call["name"] == "tune_radio"
        jsonschema.validate(call["parameters"], case["tools"][0]["function"]["parameters"])


def test_jumping_changes_nothing(demo_model_path: Path) -> None:
    """Exact arithmetic: a forced chunk rounds as single tokens do."""
    settings: dict[str, Any] = {"cpu_precision": "exact", "max_num_seqs": 8, "max_model_len": 256, "num_blocks": 100}
    texts, saved = [], []
    for jumps in (False, True):
        with LLM(str(demo_model_path), enable_jump_forward=jumps, **settings) as llm:
            constraint = StructuredOutputs(json=SCHEMAS["person"], disable_any_whitespace=True)
            params = [
                SamplingParams(seed=seed, temperature=float(seed % 2), max_tokens=60, structured_outputs=constraint)
                for seed in range(8)
            ]
            texts.append([output.outputs[0].token_ids for output in llm.generate(["Someone: "] * 8, params)])
            saved.append(next(f for f in llm.metrics() if f.name == "vkit:jump_forward_tokens").samples[0].value)
    assert texts[0] == texts[1]
    assert saved[0] == 0
    assert saved[1] >= 8


def test_patterns_and_grammars(llm: LLM) -> None:
    pattern = r"(\+49|0)[ -]?[1-9][0-9]{2,4}"
    for constraint, check in (
        (StructuredOutputs(regex=pattern), pattern),
        (StructuredOutputs(grammar='root ::= item ("," item){1,3}\nitem ::= [a-c]+ [0-9]{2}'), r"([a-c]+\d\d,?){2,4}"),
        (StructuredOutputs(choice=["größer", "kleiner", "gleich"]), "größer|kleiner|gleich"),
    ):
        for output in sampled(llm, constraint, "So: ", max_tokens=64, repetition_penalty=1.3):
            text, reason = output.outputs[0].text, output.outputs[0].finish_reason
            assert reason is FinishReason.LENGTH or re.fullmatch(check, text), text
