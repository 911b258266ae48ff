"""Two real processes that share a model: same tokens as one, and an end in words whatever ends first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from vkit import LLM, EngineArgs, EngineDeadError, ImageMedia, ModelLoadError, SamplingParams, UsageError
from vkit.parallel import team
from vkit.parallel.launch import Launch, check_launch, find_launch
from vkit.parallel.messages import Start, Step

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
SMALL: dict[str, Any] = {
    "num_blocks": 64,
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "threads": 1,
    "cpu_precision": "exact",
}
SERVE = ["--num-blocks", "64", "--block-size", "16", "--tensor-parallel-size", "2", "--threads", "1"]

pytestmark = pytest.mark.skipif(not GOLDENS.is_dir(), reason="needs the shared goldens")


def open_golden(name: str, file: str = "", **keywords: Any) -> LLM:
    path = GOLDENS / name / file if file else GOLDENS / name
    settings = {**SMALL, "tensor_parallel_size": 2, **keywords}
    return LLM(str(path), tokenizer=str(GOLDENS / "byte_tokenizer"), **settings)


def cases(name: str) -> list[tuple[list[int], list[int]]]:
    golden = load_file(GOLDENS / name / "golden.safetensors")
    return [(golden[f"input_ids{part}"].tolist(), golden[f"greedy{part}"].tolist()) for part in ("", "_b")]


def greedy(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]


def followers(process: psutil.Process | None = None) -> list[psutil.Process]:
    """The ranks that a process has started."""
    parent = psutil.Process() if process is None else process
    return [child for child in parent.children(recursive=True) if "vkit.parallel.follower" in child.cmdline()]


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    """A model that two processes share, with chunked prompts, prefix caching and a pool that preempts."""
    with open_golden("llama", num_blocks=24, max_model_len=80, async_scheduling=True) as llm:
        yield llm


def test_continuations_are_the_recorded_ones(shared: LLM) -> None:
    work = cases("llama")
    for prompt, expected in work:
        assert greedy(shared, [prompt], len(expected)) == [expected]
    assert greedy(shared, [prompt for prompt, _ in work] * 3, 13) == [expected[:13] for _, expected in work] * 3
    values = {family.name: family.samples[0].value for family in shared.metrics() if family.samples}
    assert values["vllm:num_preemptions"] > 0
    assert values["vllm:prefix_cache_hits"] > 0
    assert len(followers()) == 1


def test_what_is_drawn_is_what_one_process_draws(shared: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12, logprobs=2, ignore_eos=True)
    prompt = cases("llama")[0][0]
    with open_golden("llama", tensor_parallel_size=1) as alone:
        expected = alone.generate([prompt], params)[0].outputs[0]
    found = shared.generate([prompt], params)[0].outputs[0]
    assert found.token_ids == expected.token_ids
    assert found.logprobs is not None
    assert expected.logprobs is not None
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
        assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-3)


@pytest.mark.parametrize("level", [1, 2])
def test_all_ranks_sleep_and_wake(shared: LLM, level: int) -> None:
    ((prompt, expected), _) = cases("llama")
    shared.sleep(level)
    shared.wake_up()
    assert greedy(shared, [prompt], len(expected)) == [expected]


def test_a_rank_that_ends_ends_the_engine(shared: LLM) -> None:
    """The last of the tests that share the model."""
    (child,) = followers()
    child.kill()
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {child.pid}\) was ended by SIGKILL"):
        greedy(shared, [[1, 2, 3]], 64)
    assert not followers()


# Refusals, before anything starts


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}, "--kv-transfer-config"),
        ({"moe_expert_cache": 2}, "--moe-expert-cache"),
        ({"cudagraph_capture_sizes": [1, 2]}, "--cudagraph-capture-sizes"),
        ({"speculative_config": {"method": "draft_model", "model": "x", "num_speculative_tokens": 2}}, "draft_model"),
    ],
)
def test_what_ranks_do_not_do_together_is_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"{words}.*does not work with --tensor-parallel-size 2"):
        EngineArgs(model="m", tensor_parallel_size=2, **keywords)


@pytest.mark.parametrize("size", [0, -1, True, "2"])
def test_sizes_are_checked(size: Any) -> None:
    with pytest.raises(UsageError, match="--tensor-parallel-size"):
        EngineArgs(model="m", tensor_parallel_size=size)


def test_heads_that_ranks_do_not_divide_are_refused_before_anything_starts() -> None:
    before = followers()
    with pytest.raises(UsageError, match=r"4 attention heads cannot be shared by 3 ranks \(.*2, 4 would do\)"):
        open_golden("llama", tensor_parallel_size=3)
    assert followers() == before


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_what_torchrun_says_is_read() -> None:
    assert find_launch({}) is None
    launch = find_launch({**TORCHRUN, "MASTER_ADDR": "host"})
    assert launch == Launch(1, 4, 1, 2, "host")
    assert not launch.is_one_host
    with pytest.raises(UsageError, match="MASTER_ADDR=None"):
        find_launch(TORCHRUN)
    with pytest.raises(UsageError, match=r"2, but torchrun started 4 processes \(use --tensor-parallel-size 4\)"):
        check_launch(2, launch)
    check_launch(4, launch)


# Slow


@pytest.mark.slow
def test_of_several_ranks_the_lost_one_is_named() -> None:
    """The others notice as soon as rank 0 does, and do not take the blame."""
    with open_golden("llama", tensor_parallel_size=4) as llm:
        children = followers()
        children[1].kill()
        with pytest.raises(EngineDeadError, match=rf"process {children[1].pid}\) was ended by SIGKILL"):
            greedy(llm, [[1, 2, 3]], 64)
    assert not followers()


@pytest.mark.slow
def test_a_rank_that_fails_says_how(caplog: pytest.LogCaptureFixture) -> None:
    """Here it is sent nonsense between two steps."""
    with open_golden("llama") as llm:
        shared: Any = llm._loaded.engine.runner
        shared._team.send(Step(None))  # type: ignore[arg-type]
        with pytest.raises(EngineDeadError, match="rank 1: AttributeError: 'NoneType'"):
            greedy(llm, [[1, 2, 3]], 64)
    assert "Traceback" in caplog.text
    assert not followers()


@pytest.mark.slow
def test_a_closed_model_leaves_no_process_behind() -> None:
    before = len(followers())
    with open_golden("llama"):
        assert len(followers()) == before + 1
    assert len(followers()) == before


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the others are told of a model that is not there."""
    monkeypatch.setattr(team, "Start", lambda config: Start(replace(config, model="/no/such/model")))
    before = followers()
    with pytest.raises(ModelLoadError, match="rank 1: /no/such/model: no such file"):
        open_golden("llama")
    assert followers() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "keywords"),
    [
        ("llama", "model-f32.gguf", {"tensor_parallel_size": 4}),
        ("gemma3", "", {"num_blocks": 192}),
        ("qwen3_5", "", {"num_blocks": 300, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
)
def test_families_in_processes(name: str, file: str, keywords: dict[str, Any]) -> None:
    work = cases(name)
    with open_golden(name, file, **keywords) as llm:
        assert greedy(llm, [prompt for prompt, _ in work], 13) == [expected[:13] for _, expected in work]


@pytest.mark.slow
def test_pictures_are_seen_by_all_ranks(tmp_path: Path) -> None:
    """Every rank has the whole tower, and is told what to encode."""
    for file in [*(GOLDENS / "byte_tokenizer").iterdir(), *(GOLDENS / "qwen3_vl").glob("*.json")]:
        shutil.copy(file, tmp_path / file.name)
    (tmp_path / "model.safetensors").symlink_to(GOLDENS / "qwen3_vl" / "model.safetensors")
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 1024}, "patch_size": 4}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(sizes))
    pixels = np.random.default_rng(0).integers(0, 256, (31, 17, 3), dtype=np.uint8)
    prompt = {
        "prompt": "a<|vision_start|><|image_pad|><|vision_end|>b, what",
        "multi_modal_data": {"image": ImageMedia(pixels)},
    }
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for size in (1, 2):
        settings = {**SMALL, "num_blocks": 200, "max_model_len": 120, "dtype": "float32"}
        with LLM(str(tmp_path), tensor_parallel_size=size, **settings) as llm:
            outputs = llm.generate([prompt, "only text", prompt], params)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.fixture
def environment() -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if not key.startswith("VKIT_")}, "OMP_NUM_THREADS": "1"}


def command(*args: str) -> list[str]:
    return [*args, "--model", str(GOLDENS / "llama"), "--tokenizer", str(GOLDENS / "byte_tokenizer")]


class Served:
    """A server of two ranks, ready."""

    def __init__(self, program: list[str], environment: dict[str, str]) -> None:
        args = [*command(*program, "serve"), "--host", "127.0.0.1", "--port", "0", *SERVE]
        self.process = subprocess.Popen(args, stderr=subprocess.PIPE, text=True, env=environment)
        self.url = ""
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("listening on "):
                self.url = line.split()[-1]
            if line.startswith("ready after "):
                break

    def post(self, max_tokens: int) -> httpx.Response:
        body = {"prompt": "hello", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=200)

    def end(self) -> tuple[int, str]:
        """Exit status and the rest of what it said."""
        _, rest = self.process.communicate(timeout=120)
        return self.process.returncode, rest


@pytest.fixture
def served(environment: dict[str, str]) -> Iterator[Served]:
    server = Served([sys.executable, "-m", "vkit"], environment)
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.communicate()


@pytest.mark.slow
def test_a_server_of_two_ranks_answers_and_ends_cleanly(served: Served) -> None:
    children = followers(psutil.Process(served.process.pid))
    assert len(children) == 1
    assert served.post(8).json()["usage"]["completion_tokens"] == 8
    served.process.send_signal(signal.SIGTERM)
    assert served.end()[0] == 0
    assert not any(child.is_running() for child in children)


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_lost_rank_ends_the_server_in_words(served: Served, is_busy: bool) -> None:
    (child,) = followers(psutil.Process(served.process.pid))
    if is_busy:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=_LONG, timeout=200) as reply:
            lines = reply.iter_lines()
            next(lines)
            child.kill()
            assert '"error"' in "".join(lines)
    else:
        child.kill()
    status, said = served.end()
    assert status == 1
    assert f"rank 1 (process {child.pid}) was ended by SIGKILL" in said
    assert "Traceback" not in said


_LONG = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.mark.slow
def test_a_lost_leader_leaves_no_rank_behind(served: Served) -> None:
    (child,) = followers(psutil.Process(served.process.pid))
    served.process.kill()
    served.end()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.slow
def test_an_interrupt_while_loading_leaves_no_rank_behind(environment: dict[str, str]) -> None:
    args = [*command(sys.executable, "-m", "vkit", "complete"), "--prompt", "hello", *SERVE]
    process = subprocess.Popen(args, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 200
    while not (children := followers(psutil.Process(process.pid))) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=30)
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in alive)


TORCHRUN_PROGRAM = [sys.executable, "-m", "torch.distributed.run"]
GREEDY = ["--prompt", "hello", "--max-tokens", "8", "--temperature", "0", "--num-blocks", "64"]


@pytest.fixture(scope="module")
def expected_text() -> str:
    """What one process says."""
    args = [*command(sys.executable, "-m", "vkit", "complete"), *GREEDY]
    return subprocess.run(args, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.slow
def test_torchrun_starts_the_same(expected_text: str, environment: dict[str, str]) -> None:
    program = [*TORCHRUN_PROGRAM, "--standalone", "--nproc-per-node", "2", "-m", "vkit", "complete"]
    args = [*command(*program), *GREEDY, "--tensor-parallel-size", "2"]
    done = subprocess.run(args, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected_text != ""


@pytest.mark.slow
def test_torchrun_starts_ranks_as_on_several_hosts(expected_text: str, environment: dict[str, str]) -> None:
    """Two processes told what torchrun tells those of two hosts: nothing says that both are on this one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    told = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    args = [*command(sys.executable, "-m", "vkit", "complete"), *GREEDY, "--tensor-parallel-size", "2"]
    ranks = []
    for rank in ("1", "0"):
        own = {**environment, **told, "RANK": rank}
        ranks.append(subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own))
    try:
        other, first = (process.communicate(timeout=120) for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], (first, other)
    assert first[0] == expected_text
    assert other[0] == ""
