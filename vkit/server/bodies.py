"""Request bodies: bytes to a typed struct, strictly, with every unknown field found."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from vkit.server.problems import Problem, bad_request, clip

Body = TypeVar("Body", bound=msgspec.Struct)

LEGACY_GUIDED_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
)

_BYTE_OFFSET = re.compile(r"\(byte (\d+)\)")
_ERROR_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_FLOAT_FOR_INT = re.compile(r"^Expected `int.*`, got `float` - at `\$\.(\w+)")
_NULL = b"null"


def check_content_type(header: str | None) -> None:
    """Refuse anything but JSON.

    Raises:
        Problem: 400.
    """
    media_type = (header or "").split(";", 1)[0].strip().lower()
    if media_type != "application/json":
        raise bad_request("Unsupported Media Type: Only 'application/json' is allowed")


def decode_body(raw: bytes, shape: type[Body]) -> tuple[Body, list[str]]:
    """The typed body and the dotted names of its unknown fields.

    Those of objects that the body's types leave open are known to its method `unknown_keys`, where it has one.

    Raises:
        Problem: 400 for bad JSON, a wrong type, or a removed field.
    """
    fields = _top_level(raw)
    for name in LEGACY_GUIDED_FIELDS:
        if name in fields and bytes(fields[name]) != _NULL:
            raise bad_request(f"{name}: this field was removed; use structured_outputs instead", name)
    try:
        body = _decoder(shape).decode(raw)
    except msgspec.ValidationError as exc:
        body = _with_integral_floats(raw, shape, exc)
    except msgspec.DecodeError as exc:
        raise _json_problem(exc, raw) from None
    unknown = list(_unknown_fields(fields, shape))
    inner = getattr(body, "unknown_keys", None)
    return body, unknown if inner is None else [*unknown, *inner()]


def _unknown_fields(fields: dict[str, msgspec.Raw], shape: type[msgspec.Struct], where: str = "") -> Iterator[str]:
    """Unknown fields of an object and of the typed objects in it."""
    known = _inner_shapes(shape)
    for name, value in fields.items():
        if bytes(value) == _NULL:
            continue
        if name not in known:
            yield where + name
            continue
        inner = known[name]
        if inner is not None and bytes(value).lstrip()[:1] == b"{":
            yield from _unknown_fields(_RAW_OBJECT.decode(value), inner, f"{where}{name}.")


def _with_integral_floats(raw: bytes, shape: type[Body], exc: msgspec.ValidationError) -> Body:
    """The body read again with 16.0 as 16 in each top-level field where the decoder wanted an integer.

    Raises:
        Problem: 400 when that was not the fault.
    """
    if _FLOAT_FOR_INT.search(str(exc)) is None:
        raise _schema_problem(exc) from None
    try:
        tree: dict[str, Any] = msgspec.json.decode(raw)
    except msgspec.ValidationError as wider:  # a number beyond float64 elsewhere
        raise _schema_problem(wider) from None
    repaired: set[str] = set()
    while True:
        found = _FLOAT_FOR_INT.search(str(exc))
        if found is None or found[1] in repaired:
            raise _schema_problem(exc) from None
        repaired.add(found[1])
        tree[found[1]] = _integral(tree[found[1]])
        try:
            return msgspec.convert(tree, shape, strict=True)
        except msgspec.ValidationError as again:
            exc = again


def _integral(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list):
        return [_integral(item) for item in value]
    if isinstance(value, dict):
        return {key: _integral(item) for key, item in value.items()}
    return value


def _top_level(raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _RAW_OBJECT.decode(raw)
    except msgspec.ValidationError:
        raise bad_request("Invalid JSON body: expected a JSON object") from None
    except msgspec.DecodeError as exc:
        raise _json_problem(exc, raw) from None


_RAW_OBJECT: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


@functools.cache
def _decoder(shape: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(shape, strict=True)


@functools.cache
def _inner_shapes(shape: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Field -> the type of the object it may be."""
    return {field.encode_name: _struct_in(field.type) for field in msgspec.structs.fields(shape)}


def _struct_in(declared: Any) -> type[msgspec.Struct] | None:
    for one in (declared, *typing.get_args(declared)):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return one
    return None


def _json_problem(exc: msgspec.DecodeError, raw: bytes) -> Problem:
    reason = str(exc)
    if not raw.strip():
        return bad_request("Invalid JSON body: the body is empty, expected a JSON object")
    found = _BYTE_OFFSET.search(reason)
    if found:
        before = raw[: int(found[1])]
        line = before.count(b"\n") + 1
        column = len(before) - (before.rfind(b"\n") + 1) + 1
        reason = f"{_BYTE_OFFSET.sub('', reason).strip()} at line {line} column {column}"
    elif reason == "Input data was truncated" and b"\\u" in raw:
        reason = "the text ends too early or holds an unpaired surrogate"
    return bad_request(f"Invalid JSON body: {clip(reason)}")


def _schema_problem(exc: msgspec.ValidationError) -> Problem:
    message = str(exc)
    found = _ERROR_PATH.search(message)
    path = dotted(found[1]) if found else None
    reason = _ERROR_PATH.sub("", message)
    missing = re.search(r"missing required field `([^`]+)`", reason)
    extra = re.search(r"contains unknown field `([^`]+)`", reason)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{path}: this field is required", path)
    if extra:
        where = path or extra[1]
        return bad_request(f"{where}: unknown key {clip(extra[1])!r}", where)
    return bad_request(f"{path}: {clip(reason)}" if path else clip(reason), path)


def dotted(path: str) -> str | None:
    """`.messages[0].content` as `messages.0.content`; map entries have no name in it."""
    text = re.sub(r"\[(\d+)\]", r".\1", path).replace("[...]", "").strip(".")
    return text or None


def convert(value: Any, shape: type[Any], where: str) -> Any:
    """A part of a body as a typed value.

    Raises:
        Problem: 400 naming the part by its dotted path.
    """
    try:
        return msgspec.convert(value, shape, strict=True)
    except msgspec.ValidationError as exc:
        problem = _schema_problem(exc)
        path = f"{where}.{problem.param}" if problem.param else where
        message = problem.message
        if problem.param and message.startswith(problem.param):
            message = message[len(problem.param) :].lstrip(": ")
        raise bad_request(f"{path}: {message}", path) from None
