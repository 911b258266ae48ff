"""Tokenizers from tokenizer.json and the files around it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from vkit.errors import CheckpointError
from vkit.text.settings import TokenizerSettings, read_json_object, read_settings, template_files
from vkit.text.tokenizer import Tokenizer
from vkit.text.vocabulary import WORD_START, Vocabulary, byte_level_bytes, plain_bytes, sentencepiece_bytes

NUM_PROBES = 256
"""How many ids are looked up to see whether a vocabulary has gaps."""


def tokenizer_from_directory(directory: Path, *, settings: TokenizerSettings | None = None) -> Tokenizer:
    """The tokenizer of a model directory. `settings`, if given, replaces its tokenizer_config.json.

    Raises:
        CheckpointError: tokenizer.json is missing, or a file is damaged.
    """
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise CheckpointError(
            f"{directory}: no tokenizer.json here",
            remedy="save the model with its fast tokenizer, or use a GGUF file, which holds its own",
        )
    if settings is None:
        settings = read_settings(directory)
    elif not settings.chat_templates:
        settings = replace(settings, chat_templates=template_files(directory, settings))
    if settings.eos_token is None and (directory / "config.json").is_file():
        return tokenizer_from_file(
            tokenizer_file, settings=settings, config=read_json_object(directory / "config.json")
        )
    return tokenizer_from_file(tokenizer_file, settings=settings)


def tokenizer_from_file(
    path: Path, *, settings: TokenizerSettings | None = None, config: Mapping[str, Any] | None = None
) -> Tokenizer:
    """The tokenizer in `path`, a tokenizer.json. `config` is the model's: it names BOS and EOS where `settings` do not.

    Raises:
        CheckpointError: the file is missing or damaged, or the settings name a token that it lacks.
    """
    settings = settings or TokenizerSettings()
    library = _read_library_tokenizer(path)
    _add_declared_tokens(library, settings, path)
    added = library.get_added_tokens_decoder()
    by_role = {token_id for text in settings.special_tokens if (token_id := library.token_to_id(text)) is not None}
    special_ids = frozenset({i for i, token in added.items() if token.special} | by_role & added.keys())
    bos = _role_id(library, settings.bos_token, config, "bos", path)
    eos = _role_id(library, settings.eos_token, config, "eos", path)
    prefix, suffix = _frame(library)
    if settings.add_bos is not None and (not prefix or prefix == [bos]):
        prefix = [bos] if settings.add_bos and bos is not None else []
    if settings.add_eos is not None and (not suffix or suffix == [eos]):
        suffix = [eos] if settings.add_eos and eos is not None else []
    vocabulary = _vocabulary(library, frozenset(added), special_ids)
    return Tokenizer(
        _LibraryEncoder(library, special_ids),
        vocabulary,
        prefix=prefix,
        suffix=suffix,
        bos_token_id=bos if bos is not None else (prefix[0] if len(prefix) == 1 else None),
        eos_token_id=eos,
        eos_token_ids=_config_ids(config, "eos", vocabulary.size),
        chat_templates=settings.chat_templates,
        settings=settings.raw,
        sequence_decoder=None if vocabulary.spell is not None else _LibraryDecoder(library),
    )


class _LibraryEncoder:
    """Encodes with the library, which also cuts the text at added tokens, with all their flags."""

    def __init__(self, library: LibraryTokenizer, special_ids: frozenset[int]) -> None:
        self._library = library
        self._lock = Lock()  # whether special tokens count is a state of the library's object
        unknown = getattr(library.model, "unk_token", None)
        self._forbidden = special_ids - {library.token_to_id(unknown) if unknown else None}

    def encode(self, text: str, parse_special: bool) -> list[int]:
        with self._lock:
            self._library.encode_special_tokens = not parse_special
            found = self._library.encode(text, add_special_tokens=False)
            token_ids: list[int] = found.ids
            if parse_special or self._forbidden.isdisjoint(token_ids):
                return token_ids
            return self._respell(text, token_ids, found.offsets)

    def _respell(self, text: str, token_ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """The same, with special tokens that ordinary merging arrived at spelled out by character."""
        spelled: list[int] = []
        for token_id, (start, end) in zip(token_ids, offsets, strict=True):
            if token_id not in self._forbidden:
                spelled.append(token_id)
                continue
            for character in text[start:end]:
                ids = self._library.encode(character, add_special_tokens=False).ids
                spelled += [i for i in ids if i not in self._forbidden]
        return spelled


class _LibraryDecoder:
    def __init__(self, library: LibraryTokenizer) -> None:
        self._library = library

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._library.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def _read_library_tokenizer(path: Path) -> LibraryTokenizer:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        library = LibraryTokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception; what else could come from here is its fault too
        raise CheckpointError(f"{path}: not a usable tokenizer.json: {_one_line(error)}") from error
    library.no_truncation()
    library.no_padding()
    return library


def _add_declared_tokens(library: LibraryTokenizer, settings: TokenizerSettings, path: Path) -> None:
    """Adds what tokenizer_config.json declares beyond tokenizer.json: further tokens, and flags that differ."""
    present = library.get_added_tokens_decoder()
    for declared in settings.declared_tokens:
        flags = {name: bool(declared.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        token = AddedToken(declared["content"], **flags, normalized=bool(declared.get("normalized", False)))
        known = present.get(declared["id"])
        if known is not None and known.content == token.content and known.special >= token.special:
            continue
        if library.token_to_id(token.content) not in (None, declared["id"]):
            raise CheckpointError(
                f"{path}: token {token.content!r} has id {library.token_to_id(token.content)}, "
                f"the settings say {declared['id']}"
            )
        library.add_tokens([token])
        if library.token_to_id(token.content) != declared["id"]:
            raise CheckpointError(
                f"{path}: the settings declare {token.content!r} as token {declared['id']}, "
                "which leaves a gap after the tokens of this file"
            )


def _role_id(
    library: LibraryTokenizer, text: str | None, config: Mapping[str, Any] | None, role: str, path: Path
) -> int | None:
    if text is None:
        return next(iter(_config_ids(config, role, library.get_vocab_size())), None)
    token_id: int | None = library.token_to_id(text)
    if token_id is None:
        raise CheckpointError(f"{path}: no token {text!r}, which the settings name as {role}_token")
    return token_id


def _config_ids(config: Mapping[str, Any] | None, role: str, vocab_size: int) -> list[int]:
    value = (config or {}).get(f"{role}_token_id")
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size]


def _frame(library: LibraryTokenizer) -> tuple[list[int], list[int]]:
    """What the file's post-processor puts before and after a text."""
    library.encode_special_tokens = True
    bare = library.encode("a", add_special_tokens=False).ids
    framed: list[int] = library.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


def _vocabulary(library: LibraryTokenizer, added_ids: frozenset[int], special_ids: frozenset[int]) -> Vocabulary:
    decoders = _flatten(_state(library.decoder))
    kinds = [str(decoder.get("type")) for decoder in decoders]

    def piece(token_id: int) -> str | None:
        text: str | None = library.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return text

    plain_ids = added_ids
    spell, has_prefix, has_bytes = None, False, False
    if kinds == ["ByteLevel"]:
        spell = byte_level_bytes
    elif kinds and all(map(_is_sentencepiece_step, decoders)):
        writes_spaces = any(kind in ("Replace", "Metaspace") for kind in kinds)
        spell = sentencepiece_bytes if writes_spaces else plain_bytes
        has_bytes = "ByteFallback" in kinds
        has_prefix = any(map(_takes_prefix_away, decoders))
        # Gemma lists its runs of spaces as added tokens, and merging makes them too.
        plain_ids = special_ids | {i for i in added_ids if WORD_START not in (piece(i) or "")}
    return Vocabulary(
        size=_vocab_size(library, added_ids),
        piece=piece,
        added_ids=plain_ids,
        special_ids=special_ids,
        spell=spell,
        byte_values=_byte_values(library) if has_bytes else {},
        has_space_prefix=has_prefix,
    )


def _is_sentencepiece_step(decoder: Mapping[str, Any]) -> bool:
    """Whether a step of a decoder is one of those that amount to joining bytes and writing U+2581 as a space."""
    match decoder.get("type"):
        case "ByteFallback" | "Fuse":
            return True
        case "Replace":
            return bool(decoder.get("pattern") == {"String": WORD_START} and decoder.get("content") == " ")
        case "Strip":
            return decoder.get("content") == " " and (decoder.get("start"), decoder.get("stop")) in ((0, 0), (1, 0))
        case "Metaspace":
            return str(decoder.get("replacement")) == WORD_START
    return False


def _takes_prefix_away(decoder: Mapping[str, Any]) -> bool:
    if decoder.get("type") == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return bool(decoder.get("type") == "Strip" and decoder.get("start") == 1)


def _byte_values(library: LibraryTokenizer) -> dict[int, int]:
    ids = ((library.token_to_id(f"<0x{value:02X}>"), value) for value in range(256))
    return {token_id: value for token_id, value in ids if token_id is not None}


def _vocab_size(library: LibraryTokenizer, added_ids: frozenset[int]) -> int:
    """One more than the highest id. Listing a whole vocabulary takes 0.1 s, so only one with gaps is listed."""
    count: int = library.get_vocab_size(with_added_tokens=True)
    probes = {*range(0, count, max(1, count // NUM_PROBES)), count - 1}
    has_gaps = library.id_to_token(count) is not None or None in map(library.id_to_token, probes)
    if has_gaps or max(added_ids, default=0) >= count:
        return 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
    return count


def _state(component: Any) -> Mapping[str, Any]:
    """The JSON form of a part of a library tokenizer."""
    if component is None:
        return {}
    state: Mapping[str, Any] = json.loads(component.__getstate__())
    return state


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder] if decoder else []
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
