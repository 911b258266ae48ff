"""Decoding steps that are captured, padded and replayed give the tokens of steps that run op by op."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.recorder import CallRecorder
from vkit import kernels
from vkit.decode_inputs import DecodeShape, NotCapturable
from vkit.graphs import CudaRecorder, DecodeGraphs, default_sizes, length_bounds, recorder_for
from vkit.runner import CapturedBatch, Runner
from vkit.sequence import Plan, ScheduledSequence, Sequence
from vkit.types import SamplingParams

SIZES = (1, 2, 4, 7)
NATIVE = pytest.mark.parametrize("backend", ["native"], indirect=True)


def poisoned(runner: Runner) -> None:
    """Whatever the step does not set itself is garbage: ids and slots far out of range, lengths below zero."""
    inputs = runner._builder._inputs
    assert inputs is not None
    inputs.memory.fill_(255)
    inputs.memory[: inputs._views[0].nbytes].view(torch.int64).fill_(1 << 40)
    for array in inputs._arrays:
        array.fill(array.dtype == bool or -(1 << 30))
    assert runner.graphs is not None
    if runner.graphs._logits is not None:
        runner.graphs._logits.fill_(torch.nan)


def capturing(model: Any, options: Any, recorder: CallRecorder, sizes: tuple[int, ...] = SIZES) -> Runner:
    runner = Runner(model, options, 200, recorder=recorder, capture_sizes=sizes)
    for slab in runner.store.slabs:
        slab.fill_(255)  # the null block too: padding must not see it, and may not change what others see
    return runner


@NATIVE
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3_5",  # recurrent states beside attention
        pytest.param("gemma3", marks=pytest.mark.slow),  # sliding windows
        pytest.param("nemotron_h", marks=pytest.mark.slow),  # states of another kind, experts
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("kimi_linear", marks=pytest.mark.slow),
    ],
)
def test_replays_equal_steps_run_op_by_op(
    name: str,
    backend: None,
    load_model: Callable[..., Any],
    load_golden: Callable[..., Any],
    make_options: Callable[..., Any],
    make_driver: Callable[..., Any],
) -> None:
    options = make_options(max_num_seqs=8)
    model, golden = load_model(name, options), load_golden(name)
    plain = make_driver(model, options)
    captured = make_driver(model, options)
    recorder = CallRecorder()
    captured.runner = runner = capturing(model, options, recorder)
    rng = random.Random(3)
    live: list[tuple[Sequence, Sequence]] = []
    num_decodes = 0
    for step in range(60):
        if len(live) < 8 and rng.random() < 0.4:
            prompt = golden.prompt(rng.choice(["", "_b"]))[: rng.randint(1, 20)]
            live.append((plain.start(f"{step}", prompt), captured.start(f"{step}", prompt)))
        chosen = rng.sample(live, rng.randint(0, len(live)))
        if rng.random() < 0.8:  # decode alone, most of the time
            chosen = [pair for pair in chosen if pair[0].num_tokens - pair[0].num_computed_tokens == 1]
        if not chosen:
            continue
        chunk = rng.randint(1, 9)
        shares = [[driver.share(pair[side], chunk) for pair in chosen] for side, driver in enumerate((plain, captured))]
        poisoned(runner)
        expected, found = plain.run(shares[0]), captured.run(shares[1])
        num_decodes += all(item.num_tokens == item.num_logits == 1 for item in shares[0])
        for pair, ours, theirs in zip(chosen, found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            if len(theirs):
                for sequence in pair:
                    sequence.token_ids.append(int(theirs[-1].argmax()))
        for pair in [pair for pair in live if rng.random() < 0.05 or pair[0].num_tokens > 60]:
            live.remove(pair)
            plain.finish(pair[0])
            captured.finish(pair[1])
    assert runner.graphs is not None
    assert runner.graphs.refusal is None
    assert 10 < recorder.num_replayed <= num_decodes
    assert recorder.num_recorded >= 2


@NATIVE
def test_states_do_not_advance_while_capturing(
    backend: None, load_model: Any, load_golden: Any, make_options: Any, make_driver: Any
) -> None:
    options = make_options()
    model, golden = load_model("qwen3_5", options), load_golden("qwen3_5")
    driver = make_driver(model, options)
    driver.runner = capturing(model, options, CallRecorder(warm_ups=5))
    sequence = driver.start("a", golden.prompt())
    tokens = []
    for _ in range(len(golden.greedy())):
        (logits,) = driver.run([driver.share(sequence, 1000)])
        tokens.append(int(logits[-1].argmax()))
        sequence.token_ids.append(tokens[-1])
    assert driver.runner.graphs.num_captured == 1
    assert tokens == golden.greedy()


@NATIVE
def test_all_sizes_are_captured_before_the_first_request(backend: None, load_model: Any, make_options: Any) -> None:
    options = make_options()
    recorder = CallRecorder()
    runner = capturing(load_model("llama", options), options, recorder)
    runner.capture()
    assert runner.graphs is not None
    assert runner.graphs.num_captured == len(SIZES)
    assert recorder.num_replayed == 0
    runner.close()
    assert runner.graphs is None


def test_what_reads_on_the_host_is_not_captured(
    load_model: Any, load_golden: Any, make_options: Any, make_driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The plain attention cuts sequences by lengths the host knows: replayed, it would see the first ones for ever."""
    options = make_options()
    with kernels.using_backend("cpu", "reference"):
        model, golden = load_model("llama", options), load_golden("llama")
        driver = make_driver(model, options)
        driver.runner = capturing(model, options, recorder := CallRecorder())
        sequence = driver.start("a", golden.prompt())
        tokens = []
        with caplog.at_level(logging.WARNING, "vkit.graphs"):
            for _ in range(len(golden.greedy())):
                (logits,) = driver.run([driver.share(sequence, 1000)])
                tokens.append(int(logits[-1].argmax()))
                sequence.token_ids.append(tokens[-1])
    assert tokens == golden.greedy()
    assert recorder.num_recorded == 0
    assert driver.runner.graphs.refusal
    assert caplog.text.count("are not captured") == 1


@NATIVE
@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (torch.OutOfMemoryError("no memory"), False),
        (RuntimeError("operation not permitted when stream is capturing\nsecond line"), True),
    ],
)
def test_a_capture_that_fails_leaves_steps_op_by_op(
    error: Exception,
    is_refused: bool,
    backend: None,
    load_model: Any,
    load_golden: Any,
    make_options: Any,
    make_driver: Any,
) -> None:
    options = make_options()
    model, golden = load_model("llama", options), load_golden("llama")
    driver = make_driver(model, options)
    driver.runner = capturing(model, options, recorder := CallRecorder(error=error))
    sequence = driver.start("a", golden.prompt())
    tokens = []
    for _ in range(4):
        (logits,) = driver.run([driver.share(sequence, 1000)])
        tokens.append(int(logits[-1].argmax()))
        sequence.token_ids.append(tokens[-1])
    assert tokens == golden.greedy()[:4]
    assert (driver.runner.graphs.refusal is not None) == is_refused
    assert recorder.num_recorded == recorder.num_replayed == 0


@NATIVE
def test_an_error_of_the_pass_itself_is_not_swallowed(backend: None, load_model: Any, make_options: Any) -> None:
    options = make_options()
    runner = capturing(load_model("llama", options), options, CallRecorder(error=RuntimeError("a kernel failed")))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        runner.capture()


def make_graphs(step: Callable[[Any], torch.Tensor] = lambda batch: torch.zeros(1, 4)) -> DecodeGraphs:
    return DecodeGraphs(step, lambda shape: shape, CallRecorder(is_strict=True), sizes=(4, 1), max_model_len=20000)


def items(*starts: int, **changes: Any) -> list[ScheduledSequence]:
    sequences = [Sequence(f"{i}", [1] * (at + 1), 1, SamplingParams(), 0.0) for i, at in enumerate(starts)]
    return [
        dataclasses.replace(ScheduledSequence(sequence, at, 1, 1, True), **changes)
        for sequence, at in zip(sequences, starts, strict=True)
    ]


@pytest.mark.parametrize(
    ("scheduled", "shape"),
    [
        (items(0), DecodeShape(1, 2048)),
        (items(5, 2047), DecodeShape(4, 2048)),
        (items(5, 2048, 7), DecodeShape(4, 8192)),
        (items(8192, 1, 1, 1), DecodeShape(4, 20000)),
        (items(1, 2, 3, 4, 5), None),
        ([], None),
        (items(3, num_tokens=2), None),
        (items(3, num_logits=0), None),
        (items(3, num_tokens=2, num_logits=2, num_drafts=1), None),
    ],
)
def test_which_steps_are_replayed(scheduled: list[ScheduledSequence], shape: DecodeShape | None) -> None:
    assert make_graphs().shape_for(Plan(1, scheduled)) == shape


def test_sizes_and_bounds() -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(3) == (1, 2, 3)
    assert default_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert default_sizes(300)[-4:] == (256, 272, 288, 300)
    assert length_bounds(100) == (100,)
    assert length_bounds(2048) == (2048,)
    assert length_bounds(4095) == (4095,)
    assert length_bounds(8193) == (2048, 8193)
    assert length_bounds(131072) == (2048, 8192, 32768, 131072)


@pytest.mark.parametrize(
    "step",
    [
        lambda batch: torch.zeros(1, int(torch.ones(()))),
        lambda batch: torch.tensor([[1.0]]),
        lambda batch: torch.ones(3, 2)[torch.tensor(True).expand(3)],
        lambda batch: torch.ones(3, 2).nonzero().float(),
        lambda batch: torch.full((1, 1), torch.ones(()).item()),
    ],
)
def test_host_reads_are_found_without_a_card(step: Callable[[Any], torch.Tensor]) -> None:
    graphs = make_graphs(step)
    assert not graphs.capture(DecodeShape(1, 2048))
    assert graphs.refusal
    assert graphs.shape_for(Plan(1, items(0))) is None


def test_what_is_sent_once_and_kept_is_no_hindrance() -> None:
    kept: list[torch.Tensor] = []

    def step(batch: Any) -> torch.Tensor:
        if not kept:
            kept.append(torch.tensor([[3.0, 4.0]]))
        return kept[0] + 1

    graphs = make_graphs(step)
    assert graphs.capture(DecodeShape(1, 2048))
    assert graphs.run(DecodeShape(1, 2048), 1).tolist() == [[4.0, 5.0]]


def test_rows_on_the_host_are_refused_whatever_is_asked_of_them() -> None:
    from vkit.decode_inputs import NoHostRows

    rows = NoHostRows()
    for ask in (lambda: rows[0], lambda: len(rows), lambda: list(rows), lambda: torch.tensor(rows)):
        with pytest.raises(NotCapturable):
            ask()


def test_a_captured_batch_says_how_many_rows_count() -> None:
    assert CapturedBatch(DecodeShape(4, 2048), 3).num_rows == 3


class InventedCuda:
    """The calls that a capture makes, in order; `fails` in the middle of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.end_fails = False
        calls = self.calls

        class Stream:
            def __init__(self, *_: Any) -> None:
                self.name = "side"

            def wait_stream(self, other: Any) -> None:
                calls.append("wait")

        class Graph:
            def capture_begin(graph, pool: Any, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                calls.append("begin")

            def capture_end(graph) -> None:
                calls.append("end")
                if self.end_fails:
                    raise RuntimeError("capture was invalidated")

            def replay(graph) -> None:
                calls.append("replay")

        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", Stream)
        monkeypatch.setattr(cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(cuda, "current_stream", Stream)
        monkeypatch.setattr(cuda, "synchronize", lambda: calls.append("synchronize"))
        monkeypatch.setattr(cuda, "stream", lambda stream: nullcontext())


def test_a_capture_is_warmed_up_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    found = InventedCuda(monkeypatch)
    recorder = recorder_for(torch.device("cuda"))
    assert isinstance(recorder, CudaRecorder)
    replay = recorder.record(lambda: found.calls.append("run"))
    assert found.calls == ["wait", "run", "run", "wait", "synchronize", "begin", "run", "end"]
    replay()
    assert found.calls[-1] == "replay"
    assert recorder_for(torch.device("cpu")) is None


def test_a_capture_that_fails_says_what_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = InventedCuda(monkeypatch)
    found.end_fails = True

    def run() -> None:
        if "begin" in found.calls:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaRecorder(torch.device("cuda")).record(run)
    assert found.calls[-1] == "end"
