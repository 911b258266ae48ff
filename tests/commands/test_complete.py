"""`vkit complete`: streams, sources of the prompt, refusals, and both ways out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vkit.types import StructuredOutputs

Run = Callable[..., Any]


@pytest.fixture
def complete(vkit_run: Run, fake_llm: Any, model_file: Path) -> Run:
    return lambda *args, **kw: vkit_run("complete", "--model", str(model_file), *args, **kw)


def test_stdout_is_the_text_and_one_newline(complete: Run, fake_llm: Any) -> None:
    result = complete("--prompt", "The capital of France is", "--max-tokens", "6")
    assert (result.status, result.stdout) == (0, " Paris\n")
    assert "loaded in" in result.stderr
    (llm,) = fake_llm.made
    assert llm.prompts == ["The capital of France is"]
    assert llm.is_closed


@pytest.mark.parametrize("max_tokens", [1, 8, 9, 10, 100])
def test_streamed_text_equals_unstreamed(complete: Run, max_tokens: int) -> None:
    whole = complete("--prompt", "x", "--max-tokens", str(max_tokens))
    streamed = complete("--prompt", "x", "--max-tokens", str(max_tokens), "--stream")
    assert streamed.stdout == whole.stdout


def test_every_flag_reaches_the_engine(complete: Run, fake_llm: Any) -> None:
    result = complete(
        *("--prompt", "x", "--temperature", "0.7", "--top-p", "0.9", "--top-k", "5", "--seed", "3"),
        *("--stop", "a", "--stop", "b", "--logprobs", "2", "--max-num-seqs", "4", "--threads=2", "--no-mmap"),
        *("--disable-radix-attention", "--hf-overrides", '{"rope_theta": 2}', "--block-size", "16"),
    )
    assert result.status == 0
    (llm,) = fake_llm.made
    (params,) = llm.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.7, 0.9, 5, 3)
    assert (params.stop, params.logprobs, params.max_tokens) == (("a", "b"), 2, 16)
    given = {"max_num_seqs": 4, "threads": 2, "no_mmap": True, "enable_prefix_caching": False, "block_size": 16}
    assert given.items() <= llm.keywords.items()
    assert llm.keywords["hf_overrides"] == '{"rope_theta": 2}'


def test_json_is_one_object(complete: Run) -> None:
    result = complete("--prompt", "x", "--json", "--max-tokens", "3", "--logprobs", "1")
    shown = json.loads(result.stdout)
    assert {"text", "token_ids", "finish_reason", "usage", "timings"} <= shown.keys()
    assert (shown["text"], shown["token_ids"], shown["finish_reason"]) == (" Pa", [32, 80, 97], "length")
    assert shown["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert shown["timings"]["decode_tokens_per_s"] == pytest.approx(2.0)
    assert shown["timings"]["first_token_s"] == pytest.approx(0.5)
    first = shown["logprobs"][0]
    never = {"token_id": 0, "token": "never", "logprob": None, "rank": 2}
    assert first == {"token_id": 32, "token": " ", "logprob": -0.5, "rank": 1, "top": [never]}


@pytest.mark.parametrize("extra", [[], ["--stream"]])
def test_logprobs_leave_stdout_alone(complete: Run, extra: list[str]) -> None:
    result = complete("--prompt", "x", "--max-tokens", "2", "--logprobs", "1", *extra)
    assert result.stdout == " P\n"
    assert "'P'" in result.stderr
    assert "-0.5000" in result.stderr


def test_prompt_from_stdin_is_taken_as_it_is(complete: Run, fake_llm: Any) -> None:
    assert complete("--prompt", "-", stdin="zwei\nZeilen\r\n").status == 0
    assert fake_llm.made[0].prompts == ["zwei\nZeilen\r\n"]


def test_prompt_from_file(complete: Run, fake_llm: Any, tmp_path: Path) -> None:
    (tmp_path / "p").write_text("é😀", encoding="utf-8")
    assert complete("--prompt-file", str(tmp_path / "p")).status == 0
    assert fake_llm.made[0].prompts == ["é😀"]


def test_chat_sends_one_user_message(complete: Run, fake_llm: Any) -> None:
    for extra in ([], ["--stream"]):
        assert complete("--prompt", "hi", "--chat", *extra).status == 0
    assert [llm.prompts for llm in fake_llm.made] == [["<user>hi"], ["<user>hi"]]


def test_chat_without_template_is_exit_2(complete: Run, fake_llm: Any) -> None:
    fake_llm.has_template = False
    result = complete("--prompt", "hi", "--chat")
    assert result.status == 2
    assert "chat template" in result.error


def test_repeat_loads_once_and_shows_one_text(complete: Run, fake_llm: Any) -> None:
    result = complete("--prompt", "x", "--repeat", "3", "--max-tokens", "6")
    assert result.stdout == " Paris\n"
    assert [f"run {i} of 3" in result.stderr for i in (1, 2, 3)] == [True] * 3
    assert len(fake_llm.made) == 1
    assert len(fake_llm.made[0].prompts) == 3


def test_negative_temperature_is_greedy(complete: Run, fake_llm: Any) -> None:
    assert complete("--prompt", "x", "--temperature", "-0.1").status == 0
    assert fake_llm.made[0].params[0].is_greedy


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        ([], "--prompt"),
        (["--prompt", ""], "--prompt"),
        (["--prompt", "-"], "--prompt"),
        (["--prompt", "x", "--prompt-file", "y"], "--prompt-file"),
        (["--prompt-file", "no/such/file"], "--prompt-file"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature"),
        (["--prompt", "x", "--temperature", "inf"], "--temperature"),
        (["--prompt", "x", "--temperature", "-inf"], "--temperature"),
        (["--prompt", "x", "--temperature", "2.1"], "--temperature"),
        (["--prompt", "x", "--top-p", "0"], "--top-p"),
        (["--prompt", "x", "--top-p", "1.1"], "--top-p"),
        (["--prompt", "x", "--top-p", "nan"], "--top-p"),
        (["--prompt", "x", "--top-k", "-2"], "--top-k"),
        (["--prompt", "x", "--max-tokens", "0"], "--max-tokens"),
        (["--prompt", "x", "--max-tokens", "many"], "--max-tokens"),
        (["--prompt", "x", "--max-tokens"], "--max-tokens"),
        (["--prompt", "x", "--seed", "1.5"], "--seed"),
        (["--prompt", "x", "--stop", ""], "--stop"),
        (["--prompt", "x", "--logprobs", "-1"], "--logprobs"),
        (["--prompt", "x", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["--prompt", "x", "--repeat", "0"], "--repeat"),
        (["--prompt", "x", "--repeat", "2", "--stream"], "--repeat"),
        (["--prompt", "x", "--json", "--stream"], "--json"),
        (["--prompt", "x", "--chat-template", "t"], "--chat-template"),
        (["--prompt", "x", "--block-size", "24"], "--block-size"),
        (["--prompt", "x", "--device", "tpu"], "--device"),
        (["--prompt", "x", "--dtype", "int4"], "--dtype"),
        (["--prompt", "x", "--hf-overrides", "{"], "--hf-overrides"),
        (["--prompt", "x", "--gpu-memory-utilization", "nan"], "--gpu-memory-utilization"),
        (["--prompt", "x", "--max-num-batched-tokens", "4"], "--max-num-batched-tokens"),
        (["--prompt", "x", "--revision", "main"], "--revision"),
        (["--prompt", "x", "--enable-prefix-caching", "--disable-radix-attention"], "--disable-radix-attention"),
        (["--prompt", "x", "--enable-prefix-caching", "--enable-radix-attention"], "--enable-radix-attention"),
        (["--prompt", "x", "--speculative-config", "{}"], "--speculative-config"),
        (["--prompt", "x", "--json-schema", '{"uniqueItems": true}'], "--json-schema: the keyword 'uniqueItems'"),
        (["--prompt", "x", "--json-schema", "{"], "--json-schema: not JSON"),
        (["--prompt", "x", "--json-schema", "missing.json"], "--json-schema: missing.json: no such file"),
        (["--prompt", "x", "--regex", "(["], "--regex: '(['"),
        (["--prompt", "x", "--regex", "a", "--choice", "b"], "--regex and --choice"),
        (["--prompt", "x", "--grammar", "root ::= ("], "--grammar: line 1, column 10"),
        (["--prompt", "x", "--grammar", "start: nobody"], "--grammar"),
        (["--prompt", "x", "--image", "cat.png"], "--image"),
        (["--prompt", "x", "--quantization", "int3"], "--quantization"),
    ],
)
def test_refusals_name_the_flag_before_anything_loads(complete: Run, fake_llm: Any, args: list[str], flag: str) -> None:
    result = complete(*args)
    assert result.status == 2
    assert flag in result.error
    assert result.stdout == ""
    assert fake_llm.made == []


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--json-schema", '{"type": "integer"}'], StructuredOutputs(json='{"type": "integer"}')),
        (["--json-schema", "FILE"], StructuredOutputs(json='{"type": "integer"}')),
        (["--regex", "[ab]+"], StructuredOutputs(regex="[ab]+")),
        (["--choice", "yes", "--choice", "no"], StructuredOutputs(choice=["yes", "no"])),
        (["--grammar", 'root ::= "a"'], StructuredOutputs(grammar='root ::= "a"')),
    ],
)
def test_constraints_reach_the_engine(
    complete: Run, fake_llm: Any, tmp_path: Path, args: list[str], expected: StructuredOutputs
) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}', encoding="utf-8")
    result = complete("--prompt", "x", *(str(file) if arg == "FILE" else arg for arg in args))
    assert result.status == 0
    assert fake_llm.made[0].params[0].structured_outputs == expected


def test_text_that_is_not_utf8_is_refused(complete: Run) -> None:
    result = complete("--prompt", "-", stdin=b"ab\xff")
    assert (result.status, "byte 2" in result.error) == (2, True)


def test_a_failed_request_is_exit_1(complete: Run, fake_llm: Any) -> None:
    fake_llm.error = "logits are NaN"
    for extra in ([], ["--stream"]):
        result = complete("--prompt", "x", *extra)
        assert result.status == 1
        assert "logits are NaN" in result.error


def test_missing_model_path(vkit_run: Run, fake_llm: Any) -> None:
    result = vkit_run("complete", "--prompt", "x", "--model", "no/such/dir/model.gguf")
    assert result.status == 2
    assert "no/such/dir/model.gguf" in result.error


class TestAsAProcess:
    """Signals and closed pipes, with a model that answers slowly."""

    @pytest.fixture
    def slow(self, start: Callable[..., subprocess.Popen[bytes]], model_file: Path) -> Callable[..., Any]:
        def begin(**pipes: Any) -> subprocess.Popen[bytes]:
            process = start(
                *("complete", "--model", str(model_file), "--prompt", "x", "--stream"),
                settings="delay_s=0.2;answer=" + "y" * 1000,
                **pipes,
            )
            assert process.stdout is not None
            assert process.stdout.read(1) == b"y"
            return process

        return begin

    @pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_signals_end_it_cleanly(self, slow: Callable[..., Any], signum: int, status: int) -> None:
        process = slow()
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == status
        assert b"Traceback" not in stderr

    def test_a_closed_pipe_is_quiet(self, slow: Callable[..., Any]) -> None:
        process = slow()
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=120) == 1
        assert b"Traceback" not in stderr
        assert b"rror" not in stderr

    def test_deltas_arrive_one_by_one(self, slow: Callable[..., Any]) -> None:
        process = slow()
        assert len(os.read(process.stdout.fileno(), 1000)) < 900


@pytest.mark.parametrize("command", [("complete", "--prompt", "x"), ("chat",), ("bench",), ("serve",)])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model", ""), "--model: expected a directory"),
        (("--trust-remote-code",), "--trust-remote-code: code inside a checkpoint is never run"),
        (("--trust-remote-code",), "LlamaForCausalLM"),
    ],
)
def test_no_model_and_no_foreign_code(
    vkit_run: Run, command: tuple[str, ...], args: tuple[str, ...], words: str
) -> None:
    result = vkit_run(*command, *args)
    assert result.status == 2
    assert words in result.error


def test_a_choice_is_refused_in_plain_words(vkit_run: Run) -> None:
    result = vkit_run("complete", "--prompt", "x", "--device", "tpu")
    assert result.status == 2
    assert result.error.startswith("--device: 'tpu' is not one of")
