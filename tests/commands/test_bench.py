"""`vkit bench`: whole runs against a replay server and a scripted engine, and every refusal."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import vkit
from tests.benchmark.replay import (
    DONE,
    Answer,
    ReplayServer,
    Script,
    Seen,
    Wait,
    answer,
    chat_chunk,
    counting,
    error_answer,
    last_chunk,
    text_chunk,
    usage,
)
from vkit.types import CompletionOutput, FinishReason, RequestOutput, SamplingParams

DEAD_URL = "http://127.0.0.1:9"
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="extra `plots`")
needs_plotext = pytest.mark.skipif(importlib.util.find_spec("plotext") is None, reason="extra `bench`")


class Serving:
    """A replay server on a thread of its own, in real time."""

    def __init__(self, script: Script) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = ReplayServer(script)
        asyncio.run_coroutine_threadsafe(self.server.__aenter__(), self._loop).result(10)
        self.url = self.server.url

    @property
    def seen(self) -> list[Seen]:
        return self.server.seen

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.__aexit__(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)
        self._loop.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Script], Serving]]:
    """Start a replay server with a script."""
    running: list[Serving] = []

    def start(script: Script) -> Serving:
        running.append(Serving(script))
        return running[-1]

    yield start
    for serving in running:
        serving.close()


def three_tokens(request: Seen, num_prompt_tokens: int) -> Answer:
    """Three tokens, 30 ms before the first and 20 ms before each other one, counted event by event."""
    steps: list[Any] = []
    for i, seconds in enumerate((0.03, 0.02, 0.02), start=1):
        chunk = {"usage": usage(num_prompt_tokens, i), "choice": {"token_ids": [i]}}
        steps += [Wait(seconds), text_chunk("abc"[i - 1], **chunk)]
    return Answer([*steps, last_chunk(num_prompt_tokens, 3), DONE])


GOOD = counting(three_tokens)


def test_a_server_is_measured_and_reported(vkit_run: Any, serve: Any, tmp_path: Path) -> None:
    server = serve(GOOD)
    path = tmp_path / "out.json"
    options = ("--num-prompts", "6", "--concurrency", "2", "--output-len", "3", "--input-len", "10")
    run = vkit_run("bench", "--url", server.url, *options, "--slo", "ttft:60000,tpot:1", "--json", str(path))
    assert run.status == 0, run.stderr
    assert "estimated" not in run.stderr
    for name in ("completed requests", "output, decode (tok/s)", "goodput", "TTFT", "TPOT", "ITL", "E2E", "p99"):
        assert name in run.stdout
    assert "\x1b" not in run.stdout
    found = json.loads(path.read_text())
    (result,) = found["runs"]
    summary = result["summary"]
    assert (summary["completed"], summary["failed"]) == (6, 0)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (60, 18)
    assert summary["ttft_ms"]["mean"] >= 30
    assert summary["tpot_ms"]["mean"] >= 19
    assert summary["e2e_ms"]["mean"] >= 70
    assert summary["goodput"] == {"requests_per_s": 0.0, "share": 0.0}
    assert summary["requests_per_s"] == pytest.approx(6 / summary["duration_s"])
    settings = found["settings"]
    assert settings["url"] == server.url + "/v1"
    assert (settings["model"], settings["concurrency"], settings["num_prompts"]) == ("replay", 2, 6)
    assert len({request.body["prompt"] for request in server.seen[-6:]}) == 6


def test_a_failed_request_fails_the_run_and_enters_no_latency(vkit_run: Any, serve: Any, tmp_path: Path) -> None:
    def script(request: Seen) -> Answer:
        return error_answer(500, "kaput") if request.body["prompt"] == "bad" else answer([(0, "abc")], 4, 1)

    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "bad"}, {"prompt": "c", "output_len": 1}])
    run = vkit_run("bench", "--url", serve(script).url, "--dataset-path", str(path), "--json", "-")
    assert run.status == 1
    assert "1 of 3 requests failed: POST /completions: HTTP 500: kaput" in run.stderr
    assert "1 answers are shorter than asked for" in run.stderr
    summary = json.loads(run.stdout)["runs"][0]["summary"]
    assert (summary["completed"], summary["failed"], summary["total_input_tokens"]) == (2, 1, 8)


def write_jsonl(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    return path


def test_json_on_stdout_leaves_nothing_else_there(vkit_run: Any, serve: Any) -> None:
    run = vkit_run("bench", "--url", serve(GOOD).url, "--num-prompts", "1", "--output-len", "3", "--json", "-")
    assert run.status == 0, run.stderr
    assert json.loads(run.stdout)["runs"][0]["summary"]["completed"] == 1
    assert "completed requests" in run.stderr


def test_pitfall_10_through_the_command(vkit_run: Any, serve: Any) -> None:
    def script(_: Seen) -> Answer:
        contents = ["aaaa", "b", "ccc"]
        chunks = [chat_chunk({"role": "assistant", "content": ""}), *(chat_chunk({"content": c}) for c in contents)]
        return Answer([*chunks, chat_chunk({"content": ""}, usage=usage(7, 8)), DONE])

    server = serve(script)
    run = vkit_run("bench", "--url", server.url, "--endpoint", "chat", "--num-prompts", "2", "--json", "-")
    assert run.status == 0, run.stderr
    summary = json.loads(run.stdout)["runs"][0]["summary"]
    assert (summary["completed"], summary["total_output_tokens"], summary["total_input_tokens"]) == (2, 16, 14)
    assert "2 answers state only their sum of tokens" in run.stderr
    assert {request.path for request in server.seen} == {"/v1/chat/completions"}


def test_model_and_key_are_sent_and_the_key_is_kept_out_of_results(vkit_run: Any, serve: Any) -> None:
    server = serve(GOOD)
    options = ("--served-model-name", "mine", "--api-key", "s3cret", "--num-prompts", "1", "--json", "-")
    run = vkit_run("bench", "--url", server.url, *options)
    assert run.status == 0, run.stderr
    assert {request.body["model"] for request in server.seen} == {"mine"}
    assert {request.headers["authorization"] for request in server.seen} == {"Bearer s3cret"}
    assert "s3cret" not in run.stdout + run.stderr


def test_an_open_loop_and_shared_prefixes(vkit_run: Any, serve: Any) -> None:
    server = serve(GOOD)
    prompts = ("--dataset", "shared-prefix", "--input-len", "21", "--prefix-len", "11", "--num-prefixes", "2")
    loop = ("--request-rate", "200", "--burstiness", "0.5", "--seed", "3", "--num-prompts", "6")
    run = vkit_run("bench", "--url", server.url, *prompts, *loop, "--json", "-")
    assert run.status == 0, run.stderr
    settings = json.loads(run.stdout)["settings"]
    assert (settings["request_rate"], settings["burstiness"], settings["dataset"]) == (200, 0.5, "shared-prefix")
    sent = [request.body["prompt"].split() for request in server.seen[-6:]]
    assert {len(words) for words in sent} == {20}
    assert len({tuple(words[:10]) for words in sent}) == 2
    assert len({tuple(words) for words in sent}) == 6


def test_a_sweep_reports_each_batch_size(vkit_run: Any, serve: Any) -> None:
    server = serve(GOOD)
    run = vkit_run("bench", "--url", server.url, "--batch-sizes", "1, 3", "--num-batches", "2", "--json", "-")
    assert run.status == 0, run.stderr
    runs = json.loads(run.stdout)["runs"]
    assert [(item["batch_size"], item["summary"]["completed"]) for item in runs] == [(1, 2), (3, 6)]
    assert "batch size" in run.stderr
    sent = [request.body["prompt"] for request in server.seen[-8:]]
    assert len(set(sent)) == 8, "no batch repeats a prompt"


def test_ids_of_a_server_are_written_in_submission_order(vkit_run: Any, serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    run = vkit_run("bench", "--url", serve(GOOD).url, "--num-prompts", "2", "--output-token-ids", str(path))
    assert run.status == 0, run.stderr
    assert json.loads(path.read_text()) == [[1, 2, 3], [1, 2, 3]]


@needs_matplotlib
@needs_plotext
def test_plots_are_drawn(vkit_run: Any, serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    options = ("--num-prompts", "3", "--plot", str(path), "--plot-terminal")
    run = vkit_run("bench", "--url", serve(GOOD).url, *options)
    assert run.status == 0, run.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "Request latency" in run.stdout
    assert "\x1b" not in run.stdout


def test_two_results_are_compared(vkit_run: Any, serve: Any, tmp_path: Path) -> None:
    server = serve(GOOD)
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    for path, num in ((a, "1"), (b, "4")):
        assert vkit_run("bench", "--url", server.url, "--num-prompts", num, "--json", str(path)).status == 0
    run = vkit_run("bench", "--compare", str(a), str(b))
    assert run.status == 0, run.stderr
    rows = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines() if line.split()}
    assert rows["completed"] == ["1", "4", "+3", "4.000"]
    assert rows["num_prompts"] == ["1", "4"]
    assert "ttft_ms.p99" in rows
    as_json = vkit_run("bench", "--compare", str(a), str(b), "--json", "-")
    figures = json.loads(as_json.stdout)["runs"][0]["figures"]
    assert {"figure": "completed", "a": 1, "b": 4, "difference": 3, "ratio": 4.0} in figures


def test_nobody_at_the_address_is_one_line(vkit_run: Any) -> None:
    run = vkit_run("bench", "--url", DEAD_URL)
    assert run.status == 1
    assert DEAD_URL in run.error


class FakeAsyncLLM:
    """Stands in for vkit.AsyncLLM: as many tokens as asked for, two at a time."""

    made: ClassVar[list[FakeAsyncLLM]]
    max_model_len = 100_000

    class tokenizer:
        vocab_size = 300
        special_ids = frozenset({256, 257})

        @staticmethod
        def encode(text: str) -> list[int]:
            return list(text.encode())

    def __init__(self, args: vkit.EngineArgs, *, on_load_progress: object = None) -> None:
        self.args = args
        self.params: list[SamplingParams] = []
        self.is_shut_down = False
        self.made.append(self)

    async def generate(
        self, prompt: Any, params: SamplingParams, *, request_id: str, lora: str | None
    ) -> AsyncIterator[RequestOutput]:
        self.params.append(params)
        left = params.max_tokens or 0
        while left:
            count = min(2, left)
            left -= count
            reason = None if left else FinishReason.LENGTH
            output = CompletionOutput(0, "", [left] * count, finish_reason=reason)
            await asyncio.sleep(0)
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], [output], finished=not left)

    async def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeAsyncLLM]:
    """The engines made by the command."""
    made: list[FakeAsyncLLM] = []
    fake = type("FakeAsyncLLM", (FakeAsyncLLM,), {"made": made})
    monkeypatch.setattr(vkit, "AsyncLLM", fake, raising=False)
    return made


def test_an_engine_in_this_process_is_measured(
    vkit_run: Any, engines: list[FakeAsyncLLM], model_file: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    options = (
        "--num-prompts",
        "3",
        "--input-len",
        "20",
        "--output-len",
        "5",
        "--concurrency",
        "40",
        "--dtype",
        "float32",
    )
    run = vkit_run("bench", "--model", str(model_file), *options, "--json", "-", "--output-token-ids", str(ids))
    assert run.status == 0, run.stderr
    found = json.loads(run.stdout)
    summary = found["runs"][0]["summary"]
    assert (summary["completed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (3, 60, 15)
    assert found["settings"]["dtype"] == "float32"
    assert json.loads(ids.read_text()) == [[3, 3, 1, 1, 0]] * 3
    (engine,) = engines
    assert (engine.args.model, engine.args.dtype, engine.args.num_blocks) == (str(model_file), "float32", None)
    assert engine.args.max_num_seqs == 40
    assert engine.is_shut_down
    assert all(params.ignore_eos for params in engine.params)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), 8),
        (("--concurrency", "9"), 9),
        (("--batch-sizes", "2,16"), 16),
        (("--request-rate", "1000"), 128),
        (("--max-num-seqs", "3"), 3),
    ],
)
def test_the_engine_takes_as_many_sequences_as_the_load_asks_for(
    vkit_run: Any, engines: list[FakeAsyncLLM], model_file: Path, options: tuple[str, ...], expected: int
) -> None:
    run = vkit_run("bench", "--model", str(model_file), "--output-len", "1", *options)
    assert run.status == 0, run.stderr
    assert engines[0].args.max_num_seqs == expected


def test_a_synthetic_model_is_a_checkpoint_for_as_long_as_it_runs(
    vkit_run: Any, engines: list[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    generate = FakeAsyncLLM.generate

    def looking(self: FakeAsyncLLM, *args: Any, **keywords: Any) -> AsyncIterator[RequestOutput]:
        seen.append({path.name for path in Path(self.args.model).iterdir()})
        return generate(self, *args, **keywords)

    monkeypatch.setattr(FakeAsyncLLM, "generate", looking)
    run = vkit_run("bench", "--synthetic", "--json", "-")
    assert run.status == 0, run.stderr
    assert json.loads(run.stdout)["settings"]["model"] == "synthetic"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= seen[0]
    assert not Path(engines[0].args.model).exists()


@pytest.mark.parametrize(("value", "greedy"), [("-3", True), ("0", True), ("0.7", False)])
def test_a_temperature_below_zero_is_greedy_and_sampling_is_seeded(
    vkit_run: Any, engines: list[FakeAsyncLLM], model_file: Path, value: str, greedy: bool
) -> None:
    run = vkit_run("bench", "--model", str(model_file), "--num-prompts", "2", "--seed", "5", f"--temperature={value}")
    assert run.status == 0, run.stderr
    assert [(params.is_greedy, params.seed) for params in engines[0].params[1:]] == (
        [(True, None)] * 2 if greedy else [(False, 5), (False, 6)]
    )


REFUSALS = [
    (("--url", DEAD_URL, "--model", "m"), "--model: excludes --url"),
    (("--url", DEAD_URL, "--synthetic"), "--synthetic: excludes --url"),
    (("--synthetic", "--model", "m"), "--synthetic: excludes --model"),
    (("--url", DEAD_URL, "--num-blocks", "4"), "--num-blocks: cannot be used here: --url"),
    (("--url", DEAD_URL, "--max-num-batched-tokens", "4"), "--max-num-batched-tokens"),
    (("--url", DEAD_URL, "--max-num-seqs", "4"), "--max-num-seqs"),
    (("--url", DEAD_URL, "--no-enable-prefix-caching"), "--enable-prefix-caching"),
    (("--url", DEAD_URL, "--dtype", "auto"), "--dtype"),
    (("--url", DEAD_URL, "--tokenizer", "t"), "--tokenizer"),
    (("--url", "localhost"), "--url: 'localhost' is not the address"),
    (("--url", DEAD_URL + "/v1/completions"), "--url:"),
    (("--url", DEAD_URL, "--api-key", "a", "--api-key", "b"), "--api-key: given more than once"),
    (("--synthetic", "--api-key", "k"), "--api-key: cannot be used here: it is for --url"),
    (("--synthetic", "--served-model-name", "k"), "--served-model-name"),
    (("--synthetic", "--endpoint", "chat"), "--endpoint"),
    (("--synthetic", "--endpoint", "responses"), "--endpoint"),
    (("--synthetic", "--concurrency", "2", "--request-rate", "1"), "--request-rate: excludes --concurrency"),
    (("--synthetic", "--concurrency", "2", "--batch-sizes", "1"), "--batch-sizes: excludes --concurrency"),
    (("--synthetic", "--request-rate", "2", "--batch-sizes", "1"), "--batch-sizes: excludes --request-rate"),
    (("--synthetic", "--burstiness", "2"), "--burstiness"),
    (("--synthetic", "--num-batches", "2"), "--num-batches"),
    (("--synthetic", "--batch-sizes", "2", "--num-prompts", "4"), "--num-prompts"),
    (("--synthetic", "--batch-sizes", "2,0"), "--batch-sizes: expected whole numbers"),
    (("--synthetic", "--batch-sizes", "a"), "--batch-sizes: expected whole numbers"),
    (("--synthetic", "--batch-sizes", ""), "--batch-sizes: expected whole numbers"),
    (("--synthetic", "--batch-sizes", "2,2"), "--batch-sizes: a size is given twice"),
    (("--synthetic", "--request-rate", "0"), "--request-rate"),
    (("--synthetic", "--request-rate", "nan"), "--request-rate"),
    (("--synthetic", "--request-rate", "inf"), "--request-rate"),
    (("--synthetic", "--request-rate", "1", "--burstiness", "0"), "--burstiness"),
    (("--synthetic", "--request-rate", "1", "--burstiness", "nan"), "--burstiness"),
    (("--synthetic", "--concurrency", "0"), "--concurrency"),
    (("--synthetic", "--num-prompts", "0"), "--num-prompts"),
    (("--synthetic", "--input-len", "0"), "--input-len"),
    (("--synthetic", "--output-len", "0"), "--output-len"),
    (("--synthetic", "--output-len", "x"), "--output-len"),
    (("--synthetic", "--num-blocks", "-1"), "--num-blocks"),
    (("--synthetic", "--block-size", "20"), "--block-size"),
    (("--synthetic", "--seed", "-1"), "--seed"),
    (("--synthetic", "--temperature", "nan"), "--temperature"),
    (("--synthetic", "--temperature", "2.1"), "--temperature"),
    (("--synthetic", "--temperature=-inf"), "--temperature"),
    (("--synthetic", "--slo", "ttfb:3"), "--slo"),
    (("--synthetic", "--dataset", "alpaca"), "--dataset"),
    (("--synthetic", "--dataset", "sharegpt"), "--dataset: sharegpt needs a file"),
    (("--synthetic", "--dataset", "jsonl"), "--dataset: jsonl needs a file"),
    (("--synthetic", "--dataset", "random", "--dataset-path", "x.json"), "--dataset-path: cannot be used here"),
    (("--synthetic", "--dataset-path", "none.json"), "--dataset-path: none.json: No such file"),
    (("--synthetic", "--dataset-path", "none.json", "--input-len", "3"), "--input-len: cannot be used here"),
    (("--synthetic", "--prefix-len", "3"), "--prefix-len: cannot be used here"),
    (("--synthetic", "--num-prefixes", "3"), "--num-prefixes: cannot be used here"),
    (("--synthetic", "--dataset", "shared-prefix", "--prefix-len", "16"), "--prefix-len: 16 leaves nothing"),
    (("--synthetic", "--dataset", "shared-prefix", "--input-len", "1"), "--prefix-len: 1 leaves nothing"),
    (("--synthetic", "--plot", "out.gif"), "--plot"),
    (("--synthetic", "--plot", "none/out.png"), "--plot"),
    (("--synthetic", "--json", "none/out.json"), "--json: none/out.json"),
    (("--synthetic", "--json", "."), "--json"),
    (("--synthetic", "--output-token-ids", "none/x"), "--output-token-ids"),
    (("--compare", "a.json"), "--compare"),
    (("--compare", "a.json", "b.json"), "a.json: No such file"),
    (("--compare", "a.json", "b.json", "--num-prompts", "3"), "--num-prompts: cannot be used here: --compare"),
    (("--compare", "a.json", "b.json", "--synthetic"), "--synthetic: cannot be used here: --compare"),
    (("--compare", "a.json", "b.json", "--url", DEAD_URL), "--url: cannot be used here: --compare"),
    (("--compare", "a.json", "b.json", "--output-token-ids", "x"), "--output-token-ids"),
    (("--no-such-flag",), "--no-such-flag"),
]


@pytest.mark.parametrize(("options", "message"), REFUSALS, ids=[" ".join(options) for options, _ in REFUSALS])
def test_refusals_name_the_flag_and_end_before_anything_runs(
    vkit_run: Any,
    engines: list[FakeAsyncLLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Any,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = vkit_run("bench", *options)
    assert run.status == 2
    assert message in run.error
    assert engines == []
    assert run.stdout == ""


def test_a_damaged_data_set_is_refused_before_the_model_loads(
    vkit_run: Any, engines: list[FakeAsyncLLM], tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    run = vkit_run("bench", "--synthetic", "--dataset-path", str(path))
    assert run.status == 2
    assert f'{path}:2: expected "prompt"' in run.error
    assert engines == []


def test_more_prompts_than_a_file_holds_are_refused(vkit_run: Any, engines: list[FakeAsyncLLM], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}] * 3)
    run = vkit_run("bench", "--synthetic", "--dataset-path", str(path), "--num-prompts", "4")
    assert run.status == 2
    assert "holds 3 prompts, 4 are asked for" in run.error
    assert engines == []


def test_missing_extras_are_named_before_anything_runs(
    vkit_run: Any, engines: list[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for option, extra in ((("--plot", "out.png"), "plots"), (("--plot-terminal",), "bench")):
        run = vkit_run("bench", "--synthetic", *option)
        assert run.status == 2
        assert f"vkit[{extra}]" in run.error
    assert engines == []


def test_the_command_line_goes_over_standing_values(
    vkit_run: Any, engines: list[FakeAsyncLLM], model_file: Path, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    monkeypatch.setenv("VKIT_MODEL", str(model_file))
    monkeypatch.setenv("VKIT_NUM_BLOCKS", "64")
    monkeypatch.setenv("VKIT_REQUEST_RATE", "5")
    monkeypatch.setenv("VKIT_BURSTINESS", "2")
    run = vkit_run("bench", "--concurrency", "3", "--json", "-")
    assert run.status == 0, run.stderr
    settings = json.loads(run.stdout)["settings"]
    assert (settings["concurrency"], "request_rate" in settings) == (3, False)
    assert engines[0].args.num_blocks == 64
    run = vkit_run("bench", "--url", serve(GOOD).url, "--concurrency", "3")
    assert run.status == 0, run.stderr
    monkeypatch.setenv("VKIT_CONCURRENCY", "4")
    assert "--request-rate: excludes --concurrency" in vkit_run("bench").error
