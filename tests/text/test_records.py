"""Token ids and rendered conversations of well-known families, against what other programs made of them.

The records, and where they come from, are described in tests/data/text/README.md.
"""

from __future__ import annotations

import gzip
import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vkit.text.detokenizer import Detokenizer
from vkit.text.from_files import tokenizer_from_directory
from vkit.text.from_gguf import tokenizer_from_gguf
from vkit.text.template import ChatTemplate
from vkit.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data" / "text"
FAMILIES = ("llama3", "qwen3", "gemma3", "mistral_nemo", "deepseek_v3")


@cache
def read(name: str) -> Any:
    with gzip.open(DATA / f"{name}.json.gz") as file:
        return json.load(file)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Tokenizer]:
    record = read(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "tokenizer.json").write_text(json.dumps(record["tokenizer"]), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(record["config"]), encoding="utf-8")
    return request.param, record, tokenizer_from_directory(directory)


class TestFamilies:
    @pytest.mark.parametrize("key", ["plain", "special"])
    def test_ids(self, family: tuple[str, Any, Tokenizer], key: str) -> None:
        _, record, tokenizer = family
        assert len(record["cases"]) >= 200
        for case in record["cases"]:
            ids = tokenizer.encode(case["text"], add_special_tokens=False, parse_special=key == "special")
            assert ids == case[key], case["text"]

    def test_text_comes_back_whole_and_in_pieces(self, family: tuple[str, Any, Tokenizer]) -> None:
        name, record, tokenizer = family
        for case in record["cases"]:
            text = tokenizer.decode(case["special"], skip_special_tokens=False)
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
            assert detokenizer.extend(case["special"]) + detokenizer.finish() == text
            # Qwen normalises; Gemma writes U+2581 and a space alike.
            expected = unicodedata.normalize("NFC", case["text"]) if name == "qwen3" else case["text"]
            assert text == (expected.replace("▁", " ") if name == "gemma3" else expected)

    def test_text_never_makes_special_tokens(self, family: tuple[str, Any, Tokenizer]) -> None:
        _, _, tokenizer = family
        for token_id in tokenizer.special_ids:
            text = tokenizer.token_piece(token_id)
            for wrapped in (text, f"a{text}b", f" {text} "):
                assert tokenizer.special_ids.isdisjoint(tokenizer.encode(wrapped, add_special_tokens=False)), wrapped
                assert token_id in tokenizer.encode(wrapped, parse_special=True), wrapped

    def test_facts(self, family: tuple[str, Any, Tokenizer]) -> None:
        name, _, tokenizer = family
        bos, eos, adds_bos = {
            "llama3": ("<|begin_of_text|>", "<|end_of_text|>", False),
            "qwen3": (None, "<|im_end|>", False),
            "gemma3": ("<bos>", "<end_of_turn>", True),
            "mistral_nemo": ("<s>", "</s>", True),
            "deepseek_v3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", True),
        }[name]
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.adds_bos) == (bos, eos, adds_bos)
        assert tokenizer.eos_token_ids == {tokenizer.eos_token_id}

    def test_pitfall_12_rendered_conversations_have_one_bos(self, family: tuple[str, Any, Tokenizer]) -> None:
        _, record, tokenizer = family
        if tokenizer.bos_token_id is None:
            return
        for chat in record["chats"]:
            ids = tokenizer.encode(chat["rendered"], parse_special=True)
            assert ids.count(tokenizer.bos_token_id) == 1

    def test_conversations(self, family: tuple[str, Any, Tokenizer]) -> None:
        _, record, tokenizer = family
        assert len(record["chats"]) >= 6
        template = ChatTemplate.for_tokenizer(tokenizer)
        for chat in record["chats"]:
            assert render(template, chat["given"]) == chat["rendered"], chat["name"]


def render(template: ChatTemplate, given: dict[str, Any]) -> str:
    messages = given["messages"]
    return template.render(messages, **{key: value for key, value in given.items() if key != "messages"})


def test_templates_of_other_families() -> None:
    templates = read("templates")
    assert sum(bool(record["chats"]) for record in templates.values()) >= 12
    for name, record in templates.items():
        template = ChatTemplate(record["template"], bos_token="<BOS>", eos_token="<EOS>")
        for chat in record["chats"]:
            assert render(template, chat["given"]) == chat["rendered"], (name, chat["name"])


@pytest.mark.parametrize("name", sorted(read("vocabularies")))
def test_gguf_vocabularies_give_llama_cpps_ids(name: str) -> None:
    record = read("vocabularies")[name]
    metadata = record["metadata"]
    tokenizer = tokenizer_from_gguf(metadata, architecture=metadata["general.architecture"])
    assert len(record["cases"]) >= 40
    for case in record["cases"]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False)
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids) == case["text"]
