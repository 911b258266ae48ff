"""What HTTP streaming costs: the same load on AsyncLLM in this process and through `vkit serve`, in turns.

    python benchmarks/server_overhead.py [--model PATH] [--streams 32] [--tokens 64] [--rounds 3]

Prints tokens per second of both, their ratio (target: at least 0.9 at 32 streams), and the time to first token at idle
of both (target: within 5 ms). The server is a process of its own and shares the machine with the client, as the engine
shares it with this program when it runs directly; only ratios are meaningful, and only on a machine that is idle
otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time

import httpx

from vkit import AsyncLLM, EngineArgs, SamplingParams, resolve_model
from vkit.types import OutputKind

PROMPT = "Once upon a time there was a"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


async def direct(llm: AsyncLLM, num_streams: int, num_tokens: int) -> tuple[float, float]:
    """(tokens per second, seconds to the first token of the first stream)."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0, output_kind=OutputKind.DELTA)
    first: list[float] = []
    begin = time.perf_counter()

    async def one(number: int) -> int:
        count = 0
        async for output in llm.generate(f"{PROMPT} {number}", params):
            first.append(time.perf_counter() - begin)
            count += len(output.outputs[0].token_ids)
        return count

    counts = await asyncio.gather(*(one(number) for number in range(num_streams)))
    return sum(counts) / (time.perf_counter() - begin), first[0]


async def over_http(client: httpx.AsyncClient, num_streams: int, num_tokens: int) -> tuple[float, float]:
    """(tokens per second, seconds to the first token of the first stream)."""
    first: list[float] = []
    begin = time.perf_counter()

    async def one(number: int) -> int:
        body = {"prompt": f"{PROMPT} {number}", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            async for chunk in reply.aiter_raw():
                first.append(time.perf_counter() - begin)
                if b"[DONE]" in chunk:
                    return num_tokens
        raise RuntimeError("the stream ended early")

    counts = await asyncio.gather(*(one(number) for number in range(num_streams)))
    return sum(counts) / (time.perf_counter() - begin), first[0]


async def measure(options: argparse.Namespace, url: str, llm: AsyncLLM) -> None:
    """Both ways in turns, so that both meet the same machine."""
    limits = httpx.Limits(max_connections=None)
    rates: dict[str, list[float]] = {"direct": [], "http": []}
    waits: dict[str, list[float]] = {"direct": [], "http": []}
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        for _ in range(2):  # warm both
            await direct(llm, 1, 4)
            await over_http(client, 1, 4)
        for _ in range(options.rounds):
            rates["direct"].append((await direct(llm, options.streams, options.tokens))[0])
            rates["http"].append((await over_http(client, options.streams, options.tokens))[0])
            for _ in range(5):
                waits["direct"].append((await direct(llm, 1, 1))[1])
                waits["http"].append((await over_http(client, 1, 1))[1])
    ratios = [http / own for http, own in zip(rates["http"], rates["direct"], strict=True)]
    for name in rates:
        rate, wait = statistics.median(rates[name]), statistics.median(waits[name])
        print(
            f"{name:7} {rate:8.1f} tok/s at {options.streams} streams, first token after {wait * 1000:.1f} ms at idle"
        )
    print(f"ratio   {statistics.median(ratios):8.3f}  ({', '.join(f'{ratio:.3f}' for ratio in ratios)})")


def main() -> None:
    """Start a server and an engine on the same model, and compare."""
    options = arguments()
    path = str(resolve_model(options.model))
    command = [sys.executable, "-m", "vkit", "serve", "--model", path, "--host", "127.0.0.1", "--port", "0"]
    command += ["--max-num-seqs", str(options.streams), "--threads", str(options.threads), "--disable-access-log"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = ""
        assert server.stderr is not None
        for line in server.stderr:
            if line.startswith("listening on "):
                url = line.split()[-1]
            if line.startswith("ready after "):
                break
        llm = AsyncLLM(EngineArgs(model=path, max_num_seqs=options.streams, threads=options.threads))
        asyncio.run(measure(options, url, llm))
        llm.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
