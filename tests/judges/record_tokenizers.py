"""Record what other programs make of texts and conversations with the tokenizers of well-known model families.

Run by hand with a Python that has transformers and gguf installed:

    python tests/judges/record_tokenizers.py FAMILIES VOCABULARIES

FAMILIES holds one folder per family (llama3, qwen3, gemma3, mistral_nemo, deepseek_v3) with the tokenizer.json and
tokenizer_config.json of a model; VOCABULARIES is the folder `models` of the llama.cpp sources, with ggml-vocab-*.gguf,
the .inp and .out files beside them, and templates/. It writes the files of tests/data/text/ that README.md there
describes. Nothing of vkit is imported.

The vocabularies are cut down to what the recorded texts can touch. That changes no token id: a merge applies only where
its two parts stand side by side in a text, so every merge that could apply is one whose result is a substring of one.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
from corpus_strings import diverse_strings
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parent.parent / "data" / "text"
FAMILIES = ("llama3", "qwen3", "gemma3", "mistral_nemo", "deepseek_v3")
MAX_TOKEN_LEN = 80

TEMPLATES = (
    *("Qwen-Qwen2.5-7B-Instruct", "Qwen3.5-4B", "meta-llama-Llama-3.1-8B-Instruct", "GLM-4.6", "google-gemma-2-2b-it"),
    *("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "mistralai-Mistral-Nemo-Instruct-2407", "moonshotai-Kimi-K2"),
    *(
        "microsoft-Phi-3.5-mini-instruct",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "ibm-granite-granite-3.3-2B-Instruct",
    ),
    *("MiniMax-M2", "Qwen3-Coder"),
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city; <b>now</b> & here",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name, e.g. Zürich"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ASK = {"role": "user", "content": "What's the weather in Zürich & <Bern>?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"sky": "clear"}'}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one": {"messages": [{"role": "user", "content": " Hello, wörld! 😀 "}], "add_generation_prompt": True},
    "turns": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!\nHow can I help?"},
            {"role": "user", "content": "Say 'no'."},
        ],
        "add_generation_prompt": True,
    },
    "closed": {
        "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
        "add_generation_prompt": False,
    },
    "system": {
        "messages": [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "Who are you?"}],
        "add_generation_prompt": True,
    },
    "thinking off": {"messages": [ASK], "add_generation_prompt": True, "enable_thinking": False},
    "tools": {"messages": [ASK], "tools": [WEATHER], "add_generation_prompt": True},
    "tool call": {"messages": [ASK, CALL, RESULT], "tools": [WEATHER], "add_generation_prompt": True},
}
FIXED = {"date_string": "26 Jul 2024", "strftime_now": None}


def substrings(texts: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(len(text), start + MAX_TOKEN_LEN) + 1):
                found.add(text[start:end])
    return found


def byte_alphabet() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


ALPHABET = byte_alphabet()


def in_byte_alphabet(text: str) -> str:
    return "".join(ALPHABET[b] for b in text.encode())


def as_pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def reduced_tokenizer_json(full: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """The tokenizer.json with only the vocabulary that `texts` can touch; ids are kept."""
    model = full["model"]
    if model.get("byte_fallback"):
        touched = substrings("\u2581" + text.replace(" ", "\u2581") for text in texts)
        touched |= {f"<0x{b:02X}>" for b in range(256)}
    else:
        touched = substrings(map(in_byte_alphabet, texts)) | set(ALPHABET.values())
    added = [t for t in full["added_tokens"] if (t["special"] and t["id"] < 8) or any(t["content"] in s for s in texts)]
    ends = ("eot", "eos", "end", "bos", "begin", "im_", "turn")
    added += [
        t for t in full["added_tokens"] if t not in added and any(e in t["content"] for e in ends) and t["special"]
    ]
    vocab = {token: i for token, i in model["vocab"].items() if token in touched}
    vocab |= {t["content"]: t["id"] for t in added}
    if model.get("unk_token"):
        vocab[model["unk_token"]] = model["vocab"][model["unk_token"]]
    pairs = map(as_pair, model["merges"])
    merges = [[a, b] for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
    return {**full, "added_tokens": added, "model": {**model, "vocab": vocab, "merges": merges}}


def family_record(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    full = json.loads((folder / "tokenizer.json").read_text())
    judge = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    texts = diverse_strings()
    cases = []
    for text in texts:
        special = judge(text, add_special_tokens=False)["input_ids"]
        plain = judge(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        cases.append({"text": text, "special": special, "plain": plain})
    kept = ("add_bos_token", "add_eos_token", "bos_token", "eos_token", "chat_template", "tokenizer_class")
    return {
        "config": {key: config[key] for key in kept if key in config},
        "tokenizer": reduced_tokenizer_json(full, texts),
        "cases": cases,
        "chats": chat_records(
            config["chat_template"], content(config.get("bos_token")), content(config.get("eos_token"))
        ),
    }


def content(token: Any) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def chat_records(template: str, bos: str | None, eos: str | None) -> list[dict[str, Any]]:
    """Each conversation as transformers renders it; those a template refuses, or dates, are left out."""
    if "strftime_now" in template and "date_string" not in template:
        return []
    judge = PreTrainedTokenizerFast(tokenizer_object=bare_tokenizer(), bos_token=bos, eos_token=eos)
    records = []
    for name, given in CONVERSATIONS.items():
        given = {**given, "date_string": "26 Jul 2024"}
        for variant in (with_object_arguments(given), given):
            try:
                text = judge.apply_chat_template(**call(variant), chat_template=template, tokenize=False)
            except Exception:  # whatever a template does with a conversation it cannot take
                continue
            records.append({"name": name, "given": given, "rendered": text})
            break
    return records


def call(given: dict[str, Any]) -> dict[str, Any]:
    return {"conversation": given["messages"], **{k: v for k, v in given.items() if k != "messages"}}


def bare_tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))


def with_object_arguments(given: dict[str, Any]) -> dict[str, Any]:
    copy = json.loads(json.dumps(given))
    for message in copy["messages"]:
        for tool_call in message.get("tool_calls", []):
            tool_call["function"]["arguments"] = json.loads(tool_call["function"]["arguments"])
    return copy


def vocabulary_record(path: Path) -> dict[str, Any]:
    """A llama.cpp test vocabulary cut down to what its own test texts touch, renumbered, with llama.cpp's ids."""
    fields = gguf.GGUFReader(path).fields
    values = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    texts = path.with_name(path.name + ".inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    expected = [[int(i) for i in line.split()] for line in lines]
    prefix = "tokenizer.ggml."
    tokens, types = values[prefix + "tokens"], values[prefix + "token_type"]
    byte_level = values[prefix + "model"] == "gpt2"
    spaced = ["\u2581" + text.replace(" ", "\u2581") for text in texts]
    touched = substrings(map(in_byte_alphabet, texts) if byte_level else spaced)
    touched |= set(ALPHABET.values()) if byte_level else set()
    plain = substrings(texts)
    roles = [value for key, value in values.items() if key.endswith("_token_id")]
    kept = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if i in roles or kind == 6 or (kind in (1, 5) and token in touched) or (kind == 4 and token in plain)
        or (kind in (2, 3) and not token.startswith("<|reserved") and len(roles) and i < 40)
    ]  # fmt: skip
    new_id = {old: new for new, old in enumerate(kept)}
    kept_texts = {tokens[i] for i in kept}
    record: dict[str, Any] = {"general.architecture": fields["general.architecture"].contents()}
    for key, value in values.items():
        if key.endswith("_token_id"):
            record[key] = new_id[value]
        elif key in (prefix + "tokens", prefix + "token_type", prefix + "scores"):
            record[key] = [value[i] for i in kept]
        elif key == prefix + "merges":
            pairs = (merge.split(" ") for merge in value)
            record[key] = [f"{a} {b}" for a, b in pairs if a in kept_texts and b in kept_texts and a + b in kept_texts]
        elif key != "tokenizer.chat_template":
            record[key] = value
    pairs = zip(texts, expected, strict=False)
    cases = [{"text": text, "ids": [new_id[i] for i in ids]} for text, ids in pairs if all(i in new_id for i in ids)]
    lost = {tokens[i] for ids in expected for i in ids if i not in new_id}
    assert not lost, (path, lost)
    return {"metadata": record, "cases": cases}


def write(name: str, value: object) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    with (DATA / name).open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as packed:
        packed.write(data)


def main(families: Path, vocabularies: Path) -> None:
    for family in FAMILIES:
        write(f"{family}.json.gz", family_record(families / family))
    templates = {}
    for name in TEMPLATES:
        source = (vocabularies / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        templates[name] = {"template": source, "chats": chat_records(source, "<BOS>", "<EOS>")}
    write("templates.json.gz", templates)
    supported = {}
    for path in sorted(vocabularies.glob("ggml-vocab-*.gguf")):
        model = gguf.GGUFReader(path).fields["tokenizer.ggml.model"].contents()
        if path.with_name(path.name + ".inp").exists() and model in ("gpt2", "llama", "gemma4"):
            supported[path.stem.removeprefix("ggml-vocab-")] = vocabulary_record(path)
    write("vocabularies.json.gz", supported)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: record_tokenizers.py FAMILIES VOCABULARIES")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
