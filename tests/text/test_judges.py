"""Comparison with the full vocabularies and with llama.cpp itself, where somebody has put them on this machine.

See tests/data/text/README.md for the variables that say where.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vkit.errors import ModelLoadError
from vkit.text.from_files import tokenizer_from_directory
from vkit.text.from_gguf import tokenizer_from_gguf
from vkit.text.tokenizer import Tokenizer

pytestmark = pytest.mark.judge

FAMILIES = ("llama3", "qwen3", "gemma3", "mistral_nemo", "deepseek_v3")
VOCABULARIES = (
    *("aquila", "baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "gpt-neox"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
WITHOUT_PRE_TOKENIZER = ("aquila", "gpt-neox")
"""Files that name none: llama.cpp then uses another one than we do."""

NUM_STRINGS = 1000

LLAMA_CPP = """
import json, sys
import llama_cpp
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
ids = [[model.tokenize(s.encode(), add_bos=False, special=f) for f in (False, True)] for s in json.load(sys.stdin)]
json.dump(ids, sys.stdout)
"""


def folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    return Path(value)


def vocabulary_path(name: str) -> Path:
    return folder("LLAMA_CPP_MODELS") / f"ggml-vocab-{name}.gguf"


@cache
def read_metadata(path: Path) -> Mapping[str, Any]:
    import gguf

    fields = gguf.GGUFReader(path).fields
    keys = [key for key in fields if key.startswith("tokenizer.") or key == "general.architecture"]
    return {key: fields[key].contents() for key in keys}


@cache
def build(path: Path) -> Tokenizer:
    metadata = read_metadata(path)
    return tokenizer_from_gguf(metadata, architecture=metadata["general.architecture"])


def random_strings(tokenizer: Tokenizer) -> list[str]:
    """Random characters, words of the vocabulary, and special tokens, in random company."""
    rng = random.Random(1)
    added = tokenizer.vocabulary.added_ids
    # llama.cpp makes control tokens of some user-defined ones by their names, and phi-3's padding swallows space there.
    own_ways = ("fim", "[PAD", "</s>", "<|tool_response>")
    special = [text for i in sorted(added)[:80] if (text := tokenizer.token_piece(i)).strip()]
    special = [text for text in special if not any(name in text for name in own_ways)]
    alphabet = "abcdefgh ABC  \n\t\r0123456789.,;:'\"!?<>|/\\-_=+()éèüßñ你好世界こんにちは안녕привет🙂🚀👍🏽"
    strings = []
    for _ in range(NUM_STRINGS):
        parts = []
        for _ in range(rng.randint(1, 8)):
            kind = rng.random()
            if kind < 0.5:
                parts.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 12))))
            elif kind < 0.95 or not special:
                token_id = rng.randrange(tokenizer.vocab_size)
                parts.append("" if token_id in added else tokenizer.token_text(token_id).replace("\ufffd", ""))
            else:
                parts.append(rng.choice(special))
        strings.append("".join(parts).replace("\0", ""))
    return strings


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpps_own_vocabulary_tests(name: str) -> None:
    path = vocabulary_path(name)
    if not path.with_name(path.name + ".inp").exists():
        pytest.skip("no test texts for this one")
    tokenizer = build(path)
    texts = path.with_name(path.name + ".inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(i) for i in line.split()], text


@pytest.mark.parametrize("name", [name for name in VOCABULARIES if name not in WITHOUT_PRE_TOKENIZER])
def test_random_strings_against_llama_cpp(name: str) -> None:
    python = folder("LLAMA_CPP_PYTHON")
    path = vocabulary_path(name)
    tokenizer = build(path)
    strings = random_strings(tokenizer)
    run = subprocess.run(
        [python, "-c", LLAMA_CPP, path], input=json.dumps(strings), capture_output=True, text=True, check=True
    )
    wrong = []
    for text, expected in zip(strings, json.loads(run.stdout), strict=True):
        for parse_special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
            if ids != expected[parse_special]:
                wrong.append((text, parse_special, ids, expected[parse_special]))
    assert not wrong, (len(wrong), wrong[0])


@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_never_makes_control_tokens(name: str) -> None:
    tokenizer = build(vocabulary_path(name))
    for token_id in tokenizer.special_ids:
        text = tokenizer.token_piece(token_id)
        for wrapped in (text, f"a{text}b", f" {text} "):
            assert tokenizer.special_ids.isdisjoint(tokenizer.encode(wrapped, add_special_tokens=False)), wrapped


@pytest.mark.parametrize("name", ["bert-bge", "nomic-bert-moe"])
def test_vocabularies_of_other_kinds_are_refused_by_name(name: str) -> None:
    path = vocabulary_path(name)
    with pytest.raises(ModelLoadError, match=repr(read_metadata(path)["tokenizer.ggml.model"])):
        build(path)


@pytest.mark.parametrize("name", FAMILIES)
def test_full_families_against_the_record(name: str) -> None:
    import gzip

    tokenizer = tokenizer_from_directory(folder("TOKENIZER_FAMILIES") / name)
    with gzip.open(Path(__file__).resolve().parents[1] / "data" / "text" / f"{name}.json.gz") as file:
        cases = json.load(file)["cases"]
    for case in cases:
        for key in ("plain", "special"):
            ids = tokenizer.encode(case["text"], add_special_tokens=False, parse_special=key == "special")
            assert ids == case[key], case["text"]
    for token_id in tokenizer.special_ids:
        text = tokenizer.token_piece(token_id)
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(f"a{text}b", add_special_tokens=False)), text
