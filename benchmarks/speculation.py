"""Drafting against plain decoding: tokens per second at concurrency 1, and mean acceptance length.

    python benchmarks/speculation.py [--model PATH] [--rounds 9] [--tokens 160] [--only TEXT] [--config JSON]
        [--clock cpu]

Two engines over one model answer the same prompts in turns, so that both meet the same machine: a JSON document to be
edited and code to be rewritten, whose answers repeat their prompts, prose drawn at random, which does not repeat, and
a question that each round asks again (only `suffix` remembers; the first round warms up).
A row is the median over rounds of plain time over drafting time. Outputs must be equal but for near ties of the fast
kernels, which round differently by batch size; rows say in how many rounds they were. Targets: 1.5 on text that
repeats, at least 0.97 on text that does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from vkit import LLM, SamplingParams, resolve_model

DEFAULT_CONFIG = {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
PEOPLE = [
    {"id": index, "name": name, "email": f"{name.lower()}@example.org", "active": True, "roles": ["reader", role]}
    for index, (name, role) in enumerate(
        [("Ada", "editor"), ("Brook", "author"), ("Chen", "editor"), ("Dora", "reviewer"), ("Emil", "author")]
    )
]
CODE = '''class Account:
    """Money of one owner, in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
'''
DOCUMENT = json.dumps(PEOPLE, indent=1)
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "JSON editing": (
        f"Set active to false for Brook and leave the rest as it is.\n\nBefore:\n{DOCUMENT}\n\nAfter:\n"
        + DOCUMENT[: DOCUMENT.index("Brook")],
        {"temperature": 0.0},
    ),
    "code rewriting": (
        f"# account.py, before\n{CODE}\n\n# account.py, after: the class is called Wallet\n"
        + CODE[: CODE.index('"""Money')].replace("Account", "Wallet"),
        {"temperature": 0.0},
    ),
    "prose, drawn": (
        "The lighthouse keeper had not spoken to anyone for three winters when the ship came in.",
        {"temperature": 1.0, "ignore_eos": True},
    ),
    "prose, drawn, beside a long text": (
        f"Some data:\n{DOCUMENT}\n\nSome code:\n{CODE}\n\nNow a story about a lighthouse keeper.\n\nOnce",
        {"temperature": 1.0, "ignore_eos": True},
    ),
    "an answer given before": (
        "Question: How does a lighthouse work, and who looks after it?\nAnswer:",
        {"temperature": 0.0, "repetition_penalty": 1.2, "ignore_eos": True},
    ),
}


def answer(llm: LLM, prompt: str, params: SamplingParams, *, by_cpu: bool) -> tuple[float, list[int]]:
    """Seconds from the first token to the last (or processor seconds in all, prompt included), and the tokens."""
    begin = time.process_time()
    (output,) = llm.generate([prompt], params)
    if by_cpu:
        return time.process_time() - begin, output.outputs[0].token_ids
    assert output.metrics is not None
    assert output.metrics.first_token_time is not None
    assert output.metrics.last_token_time is not None
    return output.metrics.last_token_time - output.metrics.first_token_time, output.outputs[0].token_ids


def drafts_of(llm: LLM) -> tuple[float, float]:
    """Verifications and accepted drafts so far."""
    values = {family.name: family.samples[0].value for family in llm.metrics() if family.samples}
    return values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_accepted_tokens"]


def measure(plain: LLM, drafting: LLM, name: str, num_rounds: int, num_tokens: int, *, by_cpu: bool) -> str:
    """One row of the table."""
    prompt, values = PROMPTS[name]
    ratios, rates = [], []
    num_equal = 0
    before = drafts_of(drafting)
    for number in range(-1, num_rounds):  # the first round warms up
        params = SamplingParams(max_tokens=num_tokens, seed=100 + number, **values)
        pair = [plain, drafting] if number % 2 else [drafting, plain]
        found = {llm is drafting: answer(llm, prompt, params, by_cpu=by_cpu) for llm in pair}
        if number < 0:
            before = drafts_of(drafting)
            continue
        (slow, expected), (fast, token_ids) = found[False], found[True]
        num_equal += token_ids == expected
        # Per token, since a near tie may end one of them earlier.
        ratios.append(slow / (len(expected) - 1) * (len(token_ids) - 1) / fast)
        rates.append(((len(expected) - 1) / slow, (len(token_ids) - 1) / fast))
    verified, accepted = (now - old for now, old in zip(drafts_of(drafting), before, strict=True))
    length = f"{1 + accepted / verified:.2f}" if verified else "no drafts"
    slow_rate, fast_rate = (statistics.median(rate) for rate in zip(*rates, strict=True))
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    counts = f"{verified / num_rounds:.0f} | {num_equal}/{num_rounds}"
    return f"| {name} | {slow_rate:.1f} | {fast_rate:.1f} | {ratio} | {length} | {counts} |"


def main() -> None:
    """Run the comparison and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint; by default the demo model")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", choices=list(PROMPTS), help="one text alone")
    parser.add_argument("--config", default=json.dumps(DEFAULT_CONFIG))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for busy machines, one thread")
    chosen = parser.parse_args()
    by_cpu = chosen.clock == "cpu"
    settings: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 4, "threads": 1 if by_cpu else chosen.threads}
    model = str(resolve_model(chosen.model))
    with LLM(model, **settings) as plain, LLM(model, **settings, speculative_config=chosen.config) as drafting:
        for llm in (plain, drafting):
            llm.generate(["Warm up."], SamplingParams(max_tokens=8))
        print(f"{chosen.config}\n")
        print("| text | plain, tok/s | drafting, tok/s | ratio (range) | acceptance length | verifications | equal |")
        print("|---|---|---|---|---|---|---|")
        for name in [chosen.only] if chosen.only else PROMPTS:
            print(measure(plain, drafting, name, chosen.rounds, chosen.tokens, by_cpu=by_cpu), flush=True)


if __name__ == "__main__":
    main()
