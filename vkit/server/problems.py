"""Every failure as the error object its client expects: OpenAI's shape, or Anthropic's under /v1/messages.

The one place of the server that decides what a client may learn about an error: details of our own faults go to the
log, never into a reply.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec

from vkit.errors import EngineDeadError, InvalidRequest, RequestFailed
from vkit.media.unusable import ForbiddenMedia, UnusableMedia

logger = logging.getLogger("vkit.server")

MAX_MESSAGE_LEN = 4000
MAX_VALUE_LEN = 200
RETRY_AFTER_S = 5

ERROR_TYPES: Mapping[int, tuple[str, str]] = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    403: ("PermissionDeniedError", "permission_error"),
    404: ("NotFoundError", "not_found_error"),
    405: ("MethodNotAllowedError", "invalid_request_error"),
    409: ("ConflictError", "invalid_request_error"),
    413: ("RequestEntityTooLargeError", "request_too_large"),
    422: ("UnprocessableEntityError", "invalid_request_error"),
    429: ("RateLimitError", "rate_limit_error"),
    431: ("BadRequestError", "invalid_request_error"),
    500: ("InternalServerError", "api_error"),
    501: ("NotImplementedError", "api_error"),
    503: ("ServiceUnavailableError", "overloaded_error"),
}
"""HTTP status to (OpenAI type, Anthropic type)."""


@dataclass(eq=False)
class Problem(Exception):
    """A reply other than success. `param` is the dotted path of the offending field."""

    status: int
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


class ContextOverflow(Problem):
    """A prompt that leaves no room for output."""

    def __init__(self, num_tokens: int, max_model_len: int, param: str) -> None:
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len
        super().__init__(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{num_tokens} tokens. Please reduce the length of the input.",
            param,
        )


class OpenAIError(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: int


class OpenAIErrorBody(msgspec.Struct):
    """Error object of every route outside /v1/messages."""

    error: OpenAIError


class AnthropicError(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct):
    """Error object of /v1/messages."""

    error: AnthropicError
    request_id: str
    type: str = "error"


def bad_request(message: str, param: str | None = None) -> Problem:
    """A 400 naming the field."""
    return Problem(400, message, param)


def not_found(message: str, param: str | None = None) -> Problem:
    """A 404 naming the field."""
    return Problem(404, message, param)


def unavailable(message: str) -> Problem:
    """A 503 that asks the client to come back."""
    return Problem(503, message, headers={"Retry-After": str(RETRY_AFTER_S)})


def renamed(problem: Problem, names: Mapping[str, str]) -> Problem:
    """The problem as a route tells it that calls fields by other names; `names`: the name here -> the route's."""
    field, dot, rest = (problem.param or "").partition(".")
    name = names.get(field)
    if name is None:
        return problem
    message = problem.message
    if message.startswith((f"{field}:", f"{field}.")):
        message = name + message.removeprefix(field)
    return Problem(problem.status, message, f"{name}{dot}{rest}", problem.headers)


def clip(value: object) -> str:
    """A client's value as text for a message, cut to a length that is safe to echo."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_VALUE_LEN else text[:MAX_VALUE_LEN] + "…"


def problem_from(exc: BaseException) -> Problem:
    """The reply for any exception. Faults of ours become a generic 500; the log has the rest."""
    if isinstance(exc, Problem):
        return exc
    if isinstance(exc, InvalidRequest):
        status = 422 if isinstance(exc, UnusableMedia) else 403 if isinstance(exc, ForbiddenMedia) else 400
        return Problem(status, str(exc), exc.param)
    if isinstance(exc, RequestFailed | EngineDeadError):
        logger.error("request failed: %s", exc)
    else:
        logger.error("unexpected failure", exc_info=exc)
    return Problem(500, "Internal server error")


def is_anthropic_path(path: str) -> bool:
    """Whether errors on this path have Anthropic's shape."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def openai_error(problem: Problem) -> OpenAIErrorBody:
    """OpenAI's error object."""
    kind = ERROR_TYPES.get(problem.status, (HTTPStatus(problem.status).phrase, ""))[0]
    return OpenAIErrorBody(OpenAIError(problem.message[:MAX_MESSAGE_LEN], kind, problem.param, problem.status))


def anthropic_error(problem: Problem, request_id: str) -> AnthropicErrorBody:
    """Anthropic's error object; the field is named in front of the message, since there is no key for it."""
    kind = ERROR_TYPES.get(problem.status, ("", "api_error"))[1]
    message = problem.message
    if problem.param and problem.param not in message:
        message = f"{problem.param}: {message}"
    return AnthropicErrorBody(AnthropicError(kind, message[:MAX_MESSAGE_LEN]), f"req_{request_id}")


def error_body(problem: Problem, path: str, request_id: str) -> bytes:
    """The JSON body of an error reply, in the shape of the path's family."""
    if is_anthropic_path(path):
        return msgspec.json.encode(anthropic_error(problem, request_id))
    return msgspec.json.encode(openai_error(problem))
