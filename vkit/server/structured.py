"""Constraints on output, as requests of all routes ask for them: read, made one, compiled before an answer begins."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkit.errors import InvalidRequest
from vkit.server.call import Call
from vkit.server.parsing import ReplyContext
from vkit.server.problems import bad_request
from vkit.server.schema import ChoiceBody, ResponseFormat, StructuredOutputsBody
from vkit.types import StructuredOutputs


@dataclass(frozen=True, slots=True)
class Asked:
    """A constraint, and the field of the request that asked for it."""

    constraint: StructuredOutputs
    field: str


def asked_by(body: ChoiceBody, *, format_field: str = "response_format") -> Asked | None:
    """The constraint that a body's own fields ask for. `format_field`: what the client calls response_format.

    Raises:
        Problem: 400 for one that is malformed, and for two.
    """
    own = from_body(body.structured_outputs)
    from_format = from_response_format(body.response_format, format_field)
    if own is not None and from_format is not None:
        raise bad_request(f"structured_outputs: {format_field} already sets a constraint", "structured_outputs")
    if own is not None:
        return Asked(own, "structured_outputs")
    return None if from_format is None else Asked(from_format, format_field)


def from_body(body: StructuredOutputsBody | None) -> StructuredOutputs | None:
    """The constraint of `structured_outputs`.

    Raises:
        Problem: 400 unless exactly one constraint is set, and every modifier means something.
    """
    if body is None:
        return None
    values = {name: getattr(body, name) for name in body.__struct_fields__}
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        values[name] = bool(values[name])
    try:
        return StructuredOutputs(**values)
    except InvalidRequest as exc:
        raise bad_request(str(exc), "structured_outputs") from None


def from_response_format(body: ResponseFormat | None, field: str = "response_format") -> StructuredOutputs | None:
    """The constraint of `response_format`.

    Raises:
        Problem: 400.
    """
    if body is None or body.type == "text":
        return None
    if body.type == "json_object":
        return StructuredOutputs(json_object=True)
    if body.type == "json_schema":
        if body.json_schema is None:
            raise bad_request(f"{field}.json_schema: this field is required", f"{field}.json_schema")
        if body.json_schema.schema is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=body.json_schema.schema)
    if body.type == "structural_tag":
        if body.format is not None:
            return StructuredOutputs(structural_tag={"type": "structural_tag", "format": body.format})
        if body.structures is not None and body.triggers is not None:
            tag = {"type": "structural_tag", "structures": body.structures, "triggers": body.triggers}
            return StructuredOutputs(structural_tag=tag)
        raise bad_request(f"{field}: structural_tag needs format, or structures and triggers", field)
    raise bad_request(
        f"{field}.type: expected text, json_object, json_schema or structural_tag, got {body.type[:50]!r}",
        f"{field}.type",
    )


def of_reply(call: Call, asked: Asked | None, context: ReplyContext) -> Asked | None:
    """What a chat reply must be: a forced call, else the constraint asked for, else what `strict` tools ask for.

    Whatever it is, it begins when the model has thought.

    Raises:
        Problem: 400 for a forced call beside `structured_outputs`, or one that nothing can enforce.
    """
    parsers = call.state.parsers
    try:
        forced = parsers.forced_constraint(context)
    except InvalidRequest as exc:
        raise bad_request(str(exc), exc.param) from None
    if forced is not None:
        if asked is not None and asked.field == "structured_outputs":
            raise bad_request(
                f"structured_outputs: tool_choice {context.tool_choice} sets a constraint already", "structured_outputs"
            )
        return Asked(forced, "tool_choice")
    if asked is not None:
        return after_reasoning(call, asked, context)
    strict = parsers.strict_constraint(context)
    if strict is None and context.tool_choice == "auto":
        # Nothing tells where a call of this family begins, so nothing can hold it to a schema.
        call.ignored += [f"tools.{i}.strict" for i, tool in enumerate(context.tools) if tool["function"].get("strict")]
    return None if strict is None else Asked(strict, "tools")


def after_reasoning(call: Call, asked: Asked, context: ReplyContext) -> Asked:
    """The constraint, begun where the model's thoughts end."""
    marks = call.state.parsers.reasoning_marks(context)
    return asked if marks is None else Asked(replace(asked.constraint, begins_after=marks), asked.field)


async def check_enforceable(call: Call, asked: Asked | None) -> StructuredOutputs | None:
    """The constraint, compiled away from the event loop; the engine finds it ready.

    Raises:
        Problem: 400 naming the field; the message names the offender.
    """
    if asked is None:
        return None
    try:
        await call.state.engine.check_structured(asked.constraint)
    except InvalidRequest as exc:
        message = str(exc)
        if asked.field != "structured_outputs":
            message = message.replace("structured_outputs", asked.field, 1)
        raise bad_request(message, asked.field) from None
    return asked.constraint
