"""The tokenizer of a GGUF file as the content of tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vkit.errors import ModelLoadError
from vkit.text.from_gguf import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    GGUFVocabulary,
    has_space_prefix,
    merges_by_score,
    tokenizer_from_gguf,
)
from vkit.text.pretokenizers import LINES, WHOLE_WORDS_FIRST, patterns_for
from vkit.text.settings import DEFAULT_TEMPLATE
from vkit.text.tokenizer import Tokenizer
from vkit.text.vocabulary import WORD_START

Content = dict[str, Any]


def tokenizer_files(metadata: Mapping[str, Any], *, architecture: str, origin: str) -> tuple[Content, Content]:
    """(tokenizer.json, tokenizer_config.json) of the tokenizer that `metadata` describes.

    Raises:
        CheckpointError: as `tokenizer_from_gguf`.
        ModelLoadError: a vocabulary that merges cannot express.
    """
    data = GGUFVocabulary(metadata, architecture, origin)
    tokenizer = tokenizer_from_gguf(metadata, architecture=architecture, origin=origin)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(data),
        **(_byte_level(data) if data.model == "gpt2" else _characters(data)),
        "post_processor": _frame(tokenizer),
    }
    return content, _settings(tokenizer)


def _added_tokens(data: GGUFVocabulary) -> list[Content]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    kinds = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    return [
        {"id": i, "content": data.tokens[i], **flags, "special": kinds[kind]}
        for i, kind in enumerate(data.types)
        if kind in kinds
    ]


def _model(data: GGUFVocabulary, merges: Sequence[str], **settings: Any) -> Content:
    # Added tokens are in the vocabulary as well: only so do they keep ids in the middle of it.
    vocab = {token: i for i, token in enumerate(data.tokens)}
    defaults = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**defaults, **settings, "vocab": vocab, "merges": list(merges)}


def _byte_level(data: GGUFVocabulary) -> Content:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns_for(data.pre)
    ]
    alphabet = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, alphabet]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(data, data.merges, ignore_merges=data.pre in WHOLE_WORDS_FIRST),
    }


def _characters(data: GGUFVocabulary) -> Content:
    """SentencePiece and its like: spaces are U+2581, bytes the last resort."""
    has_prefix = data.model == "llama" and has_space_prefix(data)
    unknown = data.token_id("unknown")
    spaces: Content = {"type": "Replace", "pattern": {"String": " "}, "content": WORD_START}
    prepend = {"type": "Prepend", "prepend": WORD_START}
    decoders: list[Content] = [
        {"type": "Replace", "pattern": {"String": WORD_START}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    lines = {"type": "Split", "pattern": {"Regex": LINES[0]}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, spaces]} if has_prefix else spaces,
        "pre_tokenizer": lines if data.model == "gemma4" else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            data,
            data.merges if data.model == "gemma4" else _score_merges(data),
            unk_token=None if unknown is None else data.tokens[unknown],
            fuse_unk=unknown is not None,
            byte_fallback=True,
        ),
    }


def _score_merges(data: GGUFVocabulary) -> list[str]:
    ranked = merges_by_score(data)
    if ranked is None:
        raise ModelLoadError(f"{data.origin}: two tokens have one score, which a list of merges cannot express")
    return [f"{left} {right}" for left, right in ranked]


def _frame(tokenizer: Tokenizer) -> Content | None:
    """What puts BOS and EOS around a text."""
    framed = tokenizer.encode("a")
    plain = tokenizer.encode("a", add_special_tokens=False)
    before = [tokenizer.bos_token_id] if tokenizer.adds_bos else []
    after = framed[len(before) + len(plain) :]
    if not before and not after:
        return None
    special = {i: tokenizer.token_piece(i) for i in (*before, *after) if i is not None}

    def single(kind: str, type_id: int) -> list[Content]:
        def tokens(ids: list[Any]) -> list[Content]:
            return [{"SpecialToken": {"id": special[i], "type_id": type_id}} for i in ids]

        return [*tokens(before), {"Sequence": {"id": kind, "type_id": type_id}}, *tokens(after)]

    return {
        "type": "TemplateProcessing",
        "single": single("A", 0),
        "pair": [*single("A", 0), *single("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for i, text in special.items()},
    }


def _settings(tokenizer: Tokenizer) -> Content:
    templates = dict(tokenizer.chat_templates)
    settings: Content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "clean_up_tokenization_spaces": False,
    }
    if list(templates) == [DEFAULT_TEMPLATE]:
        settings["chat_template"] = templates[DEFAULT_TEMPLATE]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return settings
