"""A long prefix evicted and brought back from host memory, from disk after a restart, from Redis, or computed anew.

    python benchmarks/kv_offload.py [--model PATH] [--tokens 4000] [--threads 2] [--repetitions 3] [--json out.json]

Time to the first token of a prompt whose prefix the engine's own cache has forgotten. The prompt is as long as the
model's context allows, at most `--tokens`. Redis is measured where a server program is installed; the script starts
and stops it.
With `--accuracy` instead: what narrow caches cost, as perplexity and error of log-probabilities over a text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vkit import LLM, SamplingParams, resolve_model

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
NARROW = ("float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8")


def prompt_of(model: LLM, num_tokens: int) -> list[int]:
    """Tokens of text that does not repeat."""
    text = " ".join(f"Item {i} of the list is {i * i % 9973}, then {i * 31 % 977}." for i in range(num_tokens))
    return model.tokenize(text)[:num_tokens]


def first_token_s(model: LLM, prompt: list[int]) -> tuple[float, int]:
    """(seconds to the first token, tokens that were not computed)."""
    started = time.perf_counter()
    (output,) = model.generate([{"prompt_token_ids": prompt}], ONE)
    return time.perf_counter() - started, output.num_cached_tokens


def forget(model: LLM) -> None:
    """Wait until everything is stored, then empty the engine's own cache."""

    def work(engine: Any) -> None:
        transfer = engine._transfer
        assert transfer is None or transfer.worker.flush()
        assert engine.reset_prefix_cache()

    model._thread.call(work).result()


@contextmanager
def redis_server(folder: Path) -> Iterator[str | None]:
    """The address of a server of our own; None where none is installed."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    time.sleep(1.0)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds per way of having the prefix, and how many tokens it was."""

    def opened(connector: str | None = None, **extra: Any) -> LLM:
        transfer = None
        if connector is not None:
            transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return LLM(
            str(resolve_model(arguments.model)),
            max_num_seqs=2,
            threads=arguments.threads,
            kv_transfer_config=transfer,
            block_size=32,
        )

    seconds: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}

    def note(name: str, model: LLM) -> None:
        taken, num_cached = first_token_s(model, prompt)
        seconds.setdefault(name, []).append(taken)
        tokens[name] = num_cached

    with opened() as model:
        limit = model._loaded.engine.settings.limits.max_model_len - 2
        prompt = prompt_of(model, min(arguments.tokens, limit))
        first_token_s(model, prompt[: len(prompt) // 4][::-1])  # warm, with other tokens
        for _ in range(arguments.repetitions):
            forget(model)
            note("computed", model)
        for _ in range(arguments.repetitions):
            note("own cache", model)
    disk = str(folder / "disk")
    with opened("OffloadingConnector", root_dir=disk, cpu_bytes_to_use=1 << 30) as model:
        first_token_s(model, prompt)
        for _ in range(arguments.repetitions):
            forget(model)
            note("host memory", model)
    for _ in range(arguments.repetitions):
        with opened("OffloadingConnector", root_dir=disk, cpu_bytes_to_use=1 << 30) as model:
            first_token_s(model, prompt[: len(prompt) // 4][::-1])
            note("disk, after a restart", model)
    with redis_server(folder) as url:
        if url is not None:
            with opened("RedisConnector", url=url) as model:
                first_token_s(model, prompt)
                for _ in range(arguments.repetitions):
                    forget(model)
                    note("Redis", model)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"num_tokens": len(prompt), "seconds": medians, "num_cached": tokens}


def accuracy(arguments: argparse.Namespace) -> dict[str, Any]:
    """Per cache dtype: perplexity, and mean and largest error of log-probabilities against a float32 cache."""
    texts = [Path(name).read_text(encoding="utf-8") for name in arguments.text]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found: dict[str, torch.Tensor] = {}
    for dtype in NARROW:
        model_path = str(resolve_model(arguments.model))
        with LLM(model_path, max_num_seqs=2, threads=arguments.threads, kv_cache_dtype=dtype) as model:
            prompts = [model.tokenize(text)[: arguments.tokens] for text in texts]
            outputs = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        values = [
            entry[0].logprob for output in outputs for entry in (output.prompt_logprobs or [])[1:] if entry is not None
        ]
        found[dtype] = torch.tensor(values)
    wide = found["float32"]
    return {
        dtype: {
            "perplexity": float(torch.exp(-values.mean())),
            "mean_error": float((values - wide).abs().mean()),
            "largest_error": float((values - wide).abs().max()),
        }
        for dtype, values in found.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--text", nargs="*", default=[], help="files to read with --accuracy")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.accuracy:
        result = accuracy(arguments)
        for dtype, values in result.items():
            print(f"{dtype:10}", *(f"{name} {value:.5f}" for name, value in values.items()))
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(arguments, Path(folder))
        print(f"prefix of {result['num_tokens']} tokens, time to the first token")
        for name, taken in result["seconds"].items():
            ratio = result["seconds"]["computed"] / taken
            print(f"{name:24}{taken:8.3f} s   {result['num_cached'][name]:5} tokens not computed   {ratio:6.1f} x")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
