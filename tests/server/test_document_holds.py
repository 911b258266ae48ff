"""Requests made from /openapi.json itself: no reply is a fault of the server, or other than the document says."""

from __future__ import annotations

import zlib

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
USER = [{"role": "user", "content": "hi"}]
SOUND = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"model": "tiny", "messages": USER, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": USER},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}},
    "/generative_scoring": {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104, 105]},
}
SOUND |= {f"{path}/render": SOUND[path] for path in list(SOUND)[:4]}
NUM_KEPT = 2
"""Generated fields added to a request that is sound otherwise: with all, nearly every one is refused."""


@pytest.fixture(scope="module")
def server(launch_once, programs, tmp_path_factory):
    """A tiny model with every route there is."""
    model = programs.make_tiny_checkpoint(tmp_path_factory.mktemp("fuzzed") / "tiny")
    process = launch_once(model, "--max-model-len", "64", "--num-blocks", "64", "--enable-tokenizer-info-endpoint")
    assert process.url, "".join(process.lines)
    yield process
    assert httpx.get(f"{process.url}/health").status_code == 200
    assert process.stop() == 0
    assert "Traceback" not in "".join(process.lines)


@pytest.fixture(scope="module")
def document(server):
    """The schema as a client finds it."""
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.fixture(scope="module")
def stored(server):
    """A response that can be read, cancelled and forgotten."""
    return httpx.post(f"{server.url}/v1/responses", json={"input": "hi", "max_output_tokens": 4}).json()["id"]


bounded = hypothesis.settings(
    max_examples=12, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), database=None
)


def _num_successes(operation, prepare):
    """Of the requests generated for one operation; raises what a check found."""
    count = 0

    @bounded
    @hypothesis.given(operation.as_strategy())
    def send(case):
        nonlocal count
        prepare(case)
        reply = case.call()
        count += reply.status_code == 200
        case.validate_response(reply, checks=CHECKS)

    send()
    return count


def _checked(document, prepare, *methods):
    """(what each operation did wrong, how many of its requests succeeded)."""
    wrong, successes = {}, {}
    for found in document.get_all_operations():
        operation = found.ok()
        if operation.method.upper() not in methods:
            continue
        try:
            successes[operation.label] = _num_successes(operation, prepare)
        except (Failure, FailureGroup) as error:  # all of them are wanted, not only the first
            wrong[operation.label] = str(error)
    return wrong, successes


def test_any_request(document):
    wrong, successes = _checked(document, lambda case: None, "GET", "POST", "DELETE")
    assert wrong == {}
    assert successes["GET /v1/models"] > 0


def test_nearly_sound_requests(document, stored):
    """Most of what is generated is refused at once; these get further."""

    def prepare(case):
        if isinstance(case.body, dict) and case.path in SOUND:
            case.body = _tamed(case.body, SOUND[case.path])
        if "response_id" in (case.path_parameters or {}):
            case.path_parameters["response_id"] = stored

    wrong, successes = _checked(document, prepare, "POST")
    assert wrong == {}
    assert [path for path in SOUND if not successes[f"POST {path}"]] == []


def _tamed(body, sound):
    """The sound request with a few of the generated fields, chosen by content."""
    others = sorted(set(body) - set(sound), key=lambda name: zlib.crc32(f"{name}{body!r}".encode()))
    return {**{name: body[name] for name in others[:NUM_KEPT]}, **sound}
