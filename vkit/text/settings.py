"""What tokenizer_config.json and the files beside it say: special tokens, BOS and EOS rules, chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vkit.errors import CheckpointError

DEFAULT_TEMPLATE = "default"


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Settings of a tokenizer; None where nothing is said."""

    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; the one without a name is "default"."""

    declared_tokens: tuple[Mapping[str, Any], ...] = ()
    """Added tokens with their flags: id, content, lstrip, rstrip, single_word, normalized, special."""

    special_tokens: tuple[str, ...] = ()
    """Texts of all tokens that are special by their role."""

    raw: Mapping[str, Any] = field(default_factory=dict)
    """The file as read."""


def read_settings_file(path: Path) -> TokenizerSettings:
    """The settings in a file such as tokenizer_config.json.

    Raises:
        CheckpointError: the file is missing, is not a JSON object, or a value has the wrong type.
    """
    return parse_settings(read_json_object(path), str(path))


def read_settings(directory: Path) -> TokenizerSettings:
    """The settings of a model directory, from tokenizer_config.json and its companions; empty if there are none.

    A template in a file of its own wins over one inside tokenizer_config.json.
    """
    settings = TokenizerSettings()
    if (directory / "tokenizer_config.json").is_file():
        settings = read_settings_file(directory / "tokenizer_config.json")
    if (directory / "special_tokens_map.json").is_file():
        older = read_settings_file(directory / "special_tokens_map.json")
        settings = replace(
            settings,
            bos_token=settings.bos_token if "bos_token" in settings.raw else older.bos_token,
            eos_token=settings.eos_token if "eos_token" in settings.raw else older.eos_token,
            special_tokens=tuple(dict.fromkeys((*settings.special_tokens, *older.special_tokens))),
        )
    return replace(settings, chat_templates={**settings.chat_templates, **template_files(directory, settings)})


def template_files(directory: Path, settings: TokenizerSettings) -> dict[str, str]:
    """The chat templates that `directory` keeps in files of their own, by name."""
    found: dict[str, str] = {}
    processor_file = directory / "chat_template.json"
    if DEFAULT_TEMPLATE not in settings.chat_templates and processor_file.is_file():
        content = read_json_object(processor_file).get("chat_template")
        found.update(_templates(content, str(processor_file)))
    if (directory / "chat_template.jinja").is_file():
        found[DEFAULT_TEMPLATE] = read_text(directory / "chat_template.jinja")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path)
    return found


def parse_settings(raw: Mapping[str, Any], origin: str) -> TokenizerSettings:
    """The settings in `raw`, the content of tokenizer_config.json; `origin` names it in messages.

    Raises:
        CheckpointError: a value has the wrong type.
    """
    roles = [key for key in raw if key.endswith("_token") and key not in ("add_bos_token", "add_eos_token")]
    texts = [_token_text(raw, key, origin) for key in roles if not isinstance(raw[key], bool)]
    extra = raw.get("additional_special_tokens")
    texts += [_content(token) for token in extra] if isinstance(extra, list) else []
    return TokenizerSettings(
        bos_token=_token_text(raw, "bos_token", origin),
        eos_token=_token_text(raw, "eos_token", origin),
        add_bos=_flag(raw, "add_bos_token", origin),
        add_eos=_flag(raw, "add_eos_token", origin),
        chat_templates=_templates(raw.get("chat_template"), origin),
        declared_tokens=_declared_tokens(raw.get("added_tokens_decoder"), origin),
        special_tokens=tuple(dict.fromkeys(text for text in texts if text)),
        raw=raw,
    )


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        CheckpointError: it cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text (byte {error.start})") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: it cannot be read, is not JSON, or is JSON but no object.
    """
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _content(token: object) -> str | None:
    if isinstance(token, str):
        return token
    content = token.get("content") if isinstance(token, Mapping) else None
    return content if isinstance(content, str) else None


def _token_text(raw: Mapping[str, Any], key: str, origin: str) -> str | None:
    value = raw.get(key)
    if value is None:
        return None
    text = _content(value)
    if text is None:
        raise CheckpointError(f"{origin}: {key}: expected a string or an object with 'content', got {value!r:.80}")
    return text


def _flag(raw: Mapping[str, Any], key: str, origin: str) -> bool | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{origin}: {key}: expected true or false, got {value!r:.80}")
    return value


def _templates(value: object, origin: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    entries = value if isinstance(value, list) else [value]
    named: dict[str, str] = {}
    for entry in entries:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(f"{origin}: chat_template: expected a string or a list of {{name, template}} objects")
        named[name] = template
    return named


def _declared_tokens(value: object, origin: str) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{origin}: added_tokens_decoder: expected an object, got {type(value).__name__}")
    tokens = []
    for key, entry in value.items():
        if not key.isdecimal() or not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
            raise CheckpointError(f"{origin}: added_tokens_decoder: entry {key!r} is not an id with a token")
        tokens.append({**entry, "id": int(key)})
    return tuple(sorted(tokens, key=lambda token: int(token["id"])))
