"""The program over the real engine: a tiny checkpoint, a byte tokenizer, and everything that can be wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

GOLDENS = Path(__file__).parents[2].parent / "shared" / "goldens" / "models"
TOKENIZER = GOLDENS / "byte_tokenizer"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny Llama with a tokenizer beside it, to be damaged at will."""
    folder = tmp_path / "llama"
    folder.mkdir()
    for file in (GOLDENS / "llama" / "config.json", GOLDENS / "llama" / "model.safetensors", *TOKENIZER.iterdir()):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture
def complete(vkit_run: Run, model: Path) -> Run:
    return lambda *args: vkit_run("complete", "--model", str(model), "--prompt", "hello", *args)


SEEDED = ["--temperature", "1.2", "--seed", "7"]


@pytest.mark.parametrize("sampling", [[], SEEDED, [*SEEDED, "--top-k", "40", "--top-p", "0.9"]])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 24])
def test_streamed_equals_unstreamed(complete: Run, sampling: list[str], max_tokens: int) -> None:
    whole = complete(*sampling, "--max-tokens", str(max_tokens))
    streamed = complete(*sampling, "--max-tokens", str(max_tokens), "--stream")
    assert (whole.status, streamed.status) == (0, 0)
    assert streamed.stdout == whole.stdout
    as_json = json.loads(complete(*sampling, "--max-tokens", str(max_tokens), "--json").stdout)
    assert as_json["text"] + "\n" == whole.stdout
    assert len(as_json["token_ids"]) == max_tokens or as_json["finish_reason"] == "stop"
    assert as_json["usage"]["prompt_tokens"] == 5


def test_a_stop_text_ends_both_ways_alike(complete: Run) -> None:
    sampled = (*SEEDED, "--max-tokens", "40")
    text = json.loads(complete(*sampled, "--json").stdout)["text"]
    stop = next(text[i : i + 2] for i in range(8, len(text) - 1) if "\ufffd" not in text[i : i + 2])
    for extra in ([], ["--stream"]):
        result = complete(*sampled, "--stop", stop, *extra)
        assert result.stdout == text.partition(stop)[0] + "\n"
    shown = json.loads(complete(*sampled, "--stop", stop, "--json").stdout)
    assert (shown["finish_reason"], shown["stop_reason"]) == ("stop", stop)


def test_seeds_reproduce_and_their_absence_differs(complete: Run) -> None:
    hot = ("--temperature", "2", "--max-tokens", "16", "--json")
    ids = [json.loads(complete(*hot, *seed).stdout)["token_ids"] for seed in (["--seed=1"], ["--seed=1"], [], [])]
    assert ids[0] == ids[1]
    assert ids[2] != ids[3]


def test_logprobs_come_with_every_token(complete: Run) -> None:
    shown = json.loads(complete("--json", "--logprobs", "3", "--max-tokens", "4").stdout)
    assert [entry["token_id"] for entry in shown["logprobs"]] == shown["token_ids"]
    assert all(len(entry["top"]) == 3 and entry["rank"] == 1 for entry in shown["logprobs"])


def test_chat_template_from_the_flag(complete: Run) -> None:
    plain = complete("--max-tokens", "4")
    through = complete("--max-tokens", "4", "--chat", "--chat-template", "{{ messages[0].content }}")
    assert through.stdout == plain.stdout


def test_without_any_template_chat_is_refused_and_completion_works(complete: Run, vkit_run: Run, model: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    for refused in (complete("--chat"), vkit_run("chat", "--model", str(model), stdin="hello\n")):
        assert refused.status == 2
        assert "--chat-template" in refused.error
    assert complete().status == 0


def test_tokenizer_from_elsewhere(complete: Run, model: Path) -> None:
    expected = complete("--max-tokens", "4").stdout
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    assert complete("--max-tokens", "4").status != 0
    assert complete("--max-tokens", "4", "--tokenizer", str(TOKENIZER)).stdout == expected


def test_the_tiny_gguf_gives_the_same_text(vkit_run: Run, complete: Run) -> None:
    gguf = GOLDENS / "llama" / "model-f32.gguf"
    args = ("--prompt", "hello", "--max-tokens", "8", "--tokenizer", str(TOKENIZER))
    assert vkit_run("complete", "--model", str(gguf), *args).stdout == complete("--max-tokens", "8").stdout


def test_chat_remembers(vkit_run: Run, model: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    result = vkit_run(
        *("chat", "--model", str(model), "--max-tokens", "4", "--chat-template", template), stdin="hello\nagain\n"
    )
    assert result.status == 0
    first = vkit_run("complete", "--model", str(model), "--prompt", "hello", "--max-tokens", "4").stdout
    assert result.stdout.startswith(first)
    assert len(result.stdout) > len(first)


def test_a_prompt_that_is_too_long_names_both_lengths(complete: Run, vkit_run: Run, model: Path) -> None:
    result = vkit_run("complete", "--model", str(model), "--prompt", "x" * 80, "--max-model-len", "64")
    assert result.status == 2
    assert "80" in result.error
    assert "64" in result.error or "63" in result.error


def edit_config(**changes: Any) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def cut(name: str, num_bytes: int) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        data = (model / name).read_bytes()
        (model / name).write_bytes(data[:-num_bytes])

    return change


def missing_shard(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    weight_map = {
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda model: (model / "config.json").unlink(), "config.json"),
        (lambda model: (model / "config.json").write_text("{"), "config.json"),
        (lambda model: (model / "model.safetensors").unlink(), "safetensors"),
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda model: (model / "tokenizer.json").write_text("[]"), "tokenizer.json"),
        (cut("model.safetensors", 100), "model.safetensors"),
        (missing_shard, "model-00002-of-00002.safetensors"),
        (edit_config(architectures=["NoSuchForCausalLM"], model_type="no_such"), "NoSuchForCausalLM"),
        (edit_config(num_hidden_layers=7), "layers"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    complete: Run, model: Path, change: Callable[[Path], object], word: str
) -> None:
    change(model)
    result = complete()
    assert result.status in (1, 2)
    assert result.stdout == ""
    assert word in result.error
    assert "internal" not in result.error


@pytest.mark.parametrize("content", [b"", b"GGUF", b"NOPE" + bytes(60), b"GGUF" + b"\xff" * 60])
def test_a_damaged_gguf_is_one_line(vkit_run: Run, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    result = vkit_run("complete", "--model", str(tmp_path / "bad.gguf"), "--prompt", "x")
    assert result.status in (1, 2)
    assert "bad.gguf" in result.error
    assert "internal" not in result.error


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--max-model-len", "100000"], "--max-model-len"),
        (["--num-blocks", "100000000"], "--max-model-len"),
        (["--kv-cache-memory", "1"], "--kv-cache-memory"),
        (["--gguf-dequantize"], "--gguf-dequantize"),
        (["--tokenizer", "/no/such"], "/no/such"),
        (["--tokenizer-config", "/no/such"], "/no/such"),
    ],
)
def test_what_the_model_cannot_do_is_refused(complete: Run, args: list[str], word: str) -> None:
    result = complete(*args)
    assert result.status in (1, 2)
    assert word in result.error
    assert "internal" not in result.error
