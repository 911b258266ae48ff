"""A tokenizer as GGUF metadata: copied from a GGUF file, or read from tokenizer.json and proven equal on samples."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vkit.conversion.writing import ConversionError
from vkit.loaders import Checkpoint
from vkit.text.from_gguf import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, tokenizer_from_gguf
from vkit.text.pretokenizers import GPT2, PATTERNS, WHOLE_WORDS_FIRST
from vkit.text.settings import DEFAULT_TEMPLATE
from vkit.text.tokenizer import Tokenizer, load_tokenizer

Metadata = dict[str, Any]
NO_SCORE = -1e9
"""Score of a token that no merge makes."""

SAMPLES = (
    "Hello, world! It's 2026; 12345 apples don't cost $9.99.",
    "  leading and trailing spaces  \n\n\ttabs\r\nand lines\n",
    "def f(x):\n    return {'a': [x, 1_000]} # ok?\n",
    "Ünïcödé Größe naïve café Ελληνικά Русский العربية हिन्दी 中文字符 日本語テキスト 한국어 👍🏽 a😀b",
    "CamelCase snake_case kebab-case HTTPServer v1.2.3 user@example.com https://example.com/a?b=c#d",
    "",
    " ",
    "a",
)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def tokenizer_metadata(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[Metadata, list[str]]:
    """The keys `tokenizer.*`, and notes: none where the checkpoint has no tokenizer.

    Raises:
        ConversionError: a tokenizer that the format cannot express.
        CheckpointError: a damaged tokenizer file.
    """
    if checkpoint.gguf_metadata is not None:
        keys = [key for key in checkpoint.gguf_metadata if key.startswith("tokenizer.")]
        return {key: _plain(checkpoint.gguf_metadata[key]) for key in keys}, []
    path = Path(checkpoint.path) / "tokenizer.json"
    if not path.is_file():
        return {}, ["there is no tokenizer.json, so the file gets no tokenizer"]
    tokenizer = load_tokenizer(checkpoint)
    content = json.loads(path.read_text(encoding="utf-8"))
    metadata = _vocabulary(content, config, tokenizer) | _roles(checkpoint, tokenizer) | _templates(tokenizer)
    _check_equal(tokenizer, metadata, str(config.get("model_type") or ""), path)
    return metadata, []


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _vocabulary(content: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer) -> Metadata:
    model = content["model"]
    if model.get("type") != "BPE":
        raise ConversionError(f"a tokenizer of type {model.get('type')} cannot be written as GGUF, only BPE can")
    tokens, types = _tokens(content, int(config["vocab_size"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys: Metadata = {"tokens": tokens, "token_type": types}
    if "ByteLevel" in _kinds(content.get("pre_tokenizer")):
        keys |= {"model": "gpt2", "pre": _pre_name(content), "merges": merges}
    elif str(config.get("model_type", "")).startswith("gemma4"):
        keys |= {"model": "gemma4", "merges": merges}
    else:
        keys |= {"model": "llama", "scores": _scores(tokens, merges), "add_space_prefix": _has_prefix(content)}
        if (unknown := model.get("unk_token")) is not None:
            keys["unknown_token_id"] = tokens.index(unknown)
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _tokens(content: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types, one for each row of the embedding; rows without a token get one that no text makes."""
    model = content["model"]
    pieces = {int(token_id): text for text, token_id in model["vocab"].items()}
    added = {int(token["id"]): token for token in content.get("added_tokens") or ()}
    pieces |= {token_id: token["content"] for token_id, token in added.items()}
    if max(pieces, default=-1) >= vocab_size:
        raise ConversionError(f"the tokenizer has token {max(pieces)}, the embedding only {vocab_size} rows")
    tokens, types = [], []
    for token_id in range(vocab_size):
        text = pieces.get(token_id)
        tokens.append(f"[PAD{token_id}]" if text is None else text)
        types.append(_type(text, added.get(token_id), model))
    return tokens, types


def _type(text: str | None, added: Mapping[str, Any] | None, model: Mapping[str, Any]) -> int:
    if text is None:
        return UNUSED
    if text == model.get("unk_token"):
        return UNKNOWN
    if added is not None:
        return CONTROL if added.get("special") else USER_DEFINED
    return BYTE if model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(text) else NORMAL


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores that fall with the rank of the merge that makes a token, as SentencePiece's own do."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks[token]) if token in ranks else NO_SCORE for token in tokens]


def _steps(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a pre-tokenizer, normaliser or decoder, sequences laid flat."""
    if component is None:
        return []
    for key in ("pretokenizers", "normalizers", "decoders"):
        if key in component:
            return [step for part in component[key] for step in _steps(part)]
    return [component]


def _kinds(component: Mapping[str, Any] | None) -> list[str]:
    return [str(step.get("type")) for step in _steps(component)]


def _has_prefix(content: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text."""
    metaspace = [step for step in _steps(content.get("pre_tokenizer")) if step.get("type") == "Metaspace"]
    return "Prepend" in _kinds(content.get("normalizer")) or any(
        step.get("prepend_scheme", "always") != "never" for step in metaspace
    )


def _pre_name(content: Mapping[str, Any]) -> str:
    """The name under which GGUF files know the pre-tokenizer's patterns."""
    patterns: list[str] = []
    for step in _steps(content["pre_tokenizer"]):
        match step.get("type"):
            case "Split":
                pattern = step["pattern"]
                patterns.append(pattern.get("Regex") or re.escape(pattern["String"]))
            case "Digits" if step.get("individual_digits"):
                patterns.append(r"\p{N}")
            case "ByteLevel" if step.get("use_regex", True):
                patterns += GPT2
    ignores_merges = bool(content["model"].get("ignore_merges"))
    names = [name for name, known in PATTERNS.items() if known == tuple(patterns)]
    fitting = [name for name in names if (name in WHOLE_WORDS_FIRST) == ignores_merges]
    if not fitting:
        raise ConversionError(f"the tokenizer cuts words by {patterns}, which no GGUF pre-tokenizer does")
    return fitting[0]


def _roles(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Metadata:
    """Ids of tokens with a role, and what is put around a text."""
    keys: Metadata = {"add_bos_token": tokenizer.adds_bos}
    framed = tokenizer.encode("a", add_special_tokens=True)
    keys["add_eos_token"] = tokenizer.eos_token_id is not None and framed[-1] == tokenizer.eos_token_id
    if tokenizer.bos_token_id is not None:
        keys["bos_token_id"] = tokenizer.bos_token_id
    if tokenizer.eos_token_id is not None:
        keys["eos_token_id"] = tokenizer.eos_token_id
    ends = checkpoint.generation_config.get("eos_token_id")
    further = [end for end in (ends if isinstance(ends, list) else []) if end != tokenizer.eos_token_id]
    for role, end in zip(("eot", "eom"), further, strict=False):
        keys[f"{role}_token_id"] = end
    padding = checkpoint.config.get("pad_token_id")
    if isinstance(padding, int) and not isinstance(padding, bool) and padding >= 0:
        keys["padding_token_id"] = padding
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _templates(tokenizer: Tokenizer) -> Metadata:
    templates = dict(tokenizer.chat_templates)
    default = templates.pop(DEFAULT_TEMPLATE, None)
    keys: Metadata = {} if default is None else {"tokenizer.chat_template": default}
    if templates:
        keys["tokenizer.chat_templates"] = sorted(templates)
    return keys | {f"tokenizer.chat_template.{name}": text for name, text in templates.items()}


def _check_equal(tokenizer: Tokenizer, metadata: Metadata, architecture: str, path: Path) -> None:
    """Refuse a vocabulary that would cut texts otherwise than the tokenizer it came from."""
    rebuilt = tokenizer_from_gguf(metadata, architecture=architecture, origin=str(path))
    texts = [*SAMPLES, *tokenizer.chat_templates.values()]
    for text in texts:
        for parses in (False, True):
            expected = tokenizer.encode(text, parse_special=parses)
            if rebuilt.encode(text, parse_special=parses) != expected:
                raise ConversionError(
                    f"{path}: the tokenizer would give other ids as GGUF, for instance of {text[:60]!r}"
                )
