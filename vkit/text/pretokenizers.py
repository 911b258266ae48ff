"""How GGUF files name the regular expressions that cut text into words before byte-level BPE.

A name stands for a list of patterns. They are applied one after another, each to the pieces the one before left; a
match is a piece, and so is what lies between two matches. Patterns are in the dialect of the `tokenizers` library.

Source: the pre-tokenizer names of llama.cpp's `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_HAN = r"&&[^\p{Han}]"
_NO_WORD = r"[^\r\n\p{L}\p{N}]?"


def _cased_words(after: str = "", without: str = "") -> str:
    """Words that end at a change from lower to upper case, each optionally followed by the pattern `after`."""
    return (
        f"{_NO_WORD}[{_UPPER}{without}]*[{_LOWER}{without}]+{after}"
        f"|{_NO_WORD}[{_UPPER}{without}]+[{_LOWER}{without}]*{after}"
    )


GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_LLAMA3 = (rf"{_CONTRACTIONS}|{_NO_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",)
_QWEN2 = (rf"{_CONTRACTIONS}|{_NO_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",)
_QWEN35 = (rf"{_CONTRACTIONS}|{_NO_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)
_STARCODER = (r"\p{N}", *GPT2)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *GPT2, r"[0-9][0-9][0-9]")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_TEKKEN = (rf"{_cased_words()}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",)
_GPT4O = (rf"{_cased_words(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",)
_KIMI_K2 = (
    rf"[\p{{Han}}]+|{_cased_words(_CONTRACTIONS + '?', _NOT_HAN)}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
LINES = (r"[^\n]+|[\n]+",)
_LAGUNA = (*LINES, *_QWEN2)
_BLOOM = (r" ?[^(\s|.,!?…。，、।۔،)]+",)

_NAMES: dict[tuple[str, ...], str] = {
    GPT2: "gpt-2 mpt olmo jais phi-2 gpt-neox",
    _LLAMA3: "llama-bpe llama3 llama-v3 falcon3 dbrx smaug-bpe glm4 chatglm-bpe",
    _QWEN2: "qwen2 stablelm2 hunyuan grok-2 megrez deepseek-r1-qwen",
    _QWEN35: "qwen35",
    _STARCODER: "starcoder refact command-r smollm codeshell exaone minerva",
    _FALCON: "falcon",
    _DEEPSEEK_LLM: "deepseek-llm",
    _DEEPSEEK_CODER: "deepseek-coder",
    _DEEPSEEK_V3: "deepseek-v3 hunyuan-dense",
    _TEKKEN: "tekken pixtral",
    _GPT4O: "gpt-4o llama4 minimax-m2",
    _KIMI_K2: "kimi-k2",
    _LAGUNA: "laguna",
    _BLOOM: "bloom poro gpt3-finnish",
}
PATTERNS: dict[str, tuple[str, ...]] = {name: patterns for patterns, names in _NAMES.items() for name in names.split()}

WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""Names whose vocabularies add BOS by default and take a word that is a token at once, without merging."""


def patterns_for(name: str | None) -> tuple[str, ...]:
    """The patterns of pre-tokenizer `name`; GPT-2's, with a warning, when the name is missing or unknown."""
    patterns = PATTERNS.get(name or "")
    if patterns is None:
        given = "names no pre-tokenizer" if name is None else f"names an unknown pre-tokenizer {name!r}"
        logger.warning("the model file %s: using the gpt-2 one, token ids may differ from the model's training", given)
        return GPT2
    return patterns
