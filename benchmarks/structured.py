"""Time of grammar masks: per token for a large synthetic vocabulary, and as a share of the demo model's steps.

    python benchmarks/structured.py [--vocab-size 131072] [--tokens 200] [--no-model]

The first table fills masks of random walks through a schema, at batch 1 and 32, on the one thread that the engine
uses. The second runs the demo model with and without a constraint: what counts is the step time that masks add, since
they are filled while the model runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from vkit import LLM, SamplingParams, StructuredOutputs, resolve_model
from vkit.logits import apply_bitmask
from vkit.sequence import Plan, ScheduledSequence, Sequence
from vkit.structured.compiler import GrammarCompiler
from vkit.structured.masks import FilledMasks, GrammarMasks

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "kind": {"enum": ["person", "animal", "machine"]},
        "notes": {"type": "string"},
    },
    "required": ["name", "age", "tags", "kind", "notes"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "json schema": StructuredOutputs(json=SCHEMA),
    "json object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"([A-Z][a-z]{2,12} ){5,40}[0-9]{3}"),
}


class SyntheticTokenizer:
    """All bytes, an end, and random words with and without a space before them, up to the size asked for."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        words: dict[bytes, None] = {}
        alphabet = "etaoinshrdlucmfwypvbgkqjxz"
        while len(words) < vocab_size - 257:
            word = "".join(rng.choices(alphabet, weights=range(26, 0, -1), k=rng.randint(2, 9)))
            form = rng.choice(("{}", " {}", "{}", " {}", "{}", '"{}', "{}_", "{}."))
            words[form.format(word.capitalize() if rng.random() < 0.2 else word).encode()] = None
        self.pieces = [bytes([value]) for value in range(256)] + [b""] + list(words)
        self.vocab_size = vocab_size
        self.special_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token."""
        return self.pieces[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """One token per byte."""
        return list(text.encode())


def measure_masks(compiler: GrammarCompiler, constraint: StructuredOutputs, batch: int, num_tokens: int, v: int) -> Any:
    """(fill, apply, accept) in microseconds per token: medians over steps, each divided by the batch."""
    sequences = []
    for index in range(batch):
        sequence = Sequence(str(index), [0], 1, SamplingParams(), 0.0)
        sequence.grammar = compiler.compile(constraint).result()
        sequences.append(sequence)
    masks, logits = GrammarMasks(v), torch.randn(batch, v)
    times: list[tuple[float, float, float]] = []
    rng = random.Random(1)
    for _ in range(num_tokens):
        plan = Plan(1, [ScheduledSequence(sequence, 0, 1, 1, True) for sequence in sequences])
        begin = time.perf_counter()
        pending: Future[FilledMasks] | None = masks.begin(plan)
        assert pending is not None
        filled = pending.result()
        filled_at = time.perf_counter()
        apply_bitmask(logits, range(batch), filled.words[:batch])
        applied_at = time.perf_counter()
        chosen = [_any_token(words, rng) for words in filled.words[:batch]]
        accept_at = time.perf_counter()
        for sequence, token_id in zip(sequences, chosen, strict=True):
            grammar = sequence.grammar
            assert grammar is not None
            grammar.accept_tokens([token_id])
        end = time.perf_counter()
        times.append((filled_at - begin, applied_at - filled_at, end - accept_at))
        for sequence in sequences:
            if sequence.grammar is not None and sequence.grammar.is_terminated():
                sequence.grammar.reset()
    masks.close()
    return [statistics.median(column) / batch * 1e6 for column in zip(*times, strict=True)]


def _any_token(words: Any, rng: random.Random) -> int:
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return int(ids[rng.randrange(len(ids))])


def synthetic_table(vocab_size: int, num_tokens: int) -> None:
    """Print the cost per token for a vocabulary of that size."""
    tokenizer = SyntheticTokenizer(vocab_size)
    compiler = GrammarCompiler(tokenizer, (256,))
    begin = time.perf_counter()
    compiler.check(CONSTRAINTS["json schema"])
    print(f"vocabulary of {vocab_size}: first grammar ready after {time.perf_counter() - begin:.2f} s")
    print(f"{'constraint':<14}{'batch':>6}{'fill us':>10}{'apply us':>10}{'accept us':>11}   per token")
    for name, constraint in CONSTRAINTS.items():
        for batch in (1, 32):
            fill, apply, accept = measure_masks(compiler, constraint, batch, num_tokens, vocab_size)
            print(f"{name:<14}{batch:>6}{fill:>10.0f}{apply:>10.0f}{accept:>11.0f}")
    compiler.close()


def model_table(num_tokens: int, rounds: int = 5) -> None:
    """Print step times of the demo model, free and constrained in turns, and the median of the paired ratios."""
    with LLM(str(resolve_model(None)), max_num_seqs=32, max_model_len=512, num_blocks=600) as llm:
        constraint = StructuredOutputs(regex="(?s).{400,}")  # masks of the costly kind that leave the text as it is
        llm.generate(["x"], SamplingParams(max_tokens=2, structured_outputs=constraint))
        print(f"\n{'batch':>6}{'free ms':>10}{'masked ms':>11}{'added':>8}   per step")
        for batch in (1, 32):
            free, masked = [], []
            for _ in range(rounds):
                for times, own in ((free, None), (masked, constraint)):
                    params = SamplingParams(
                        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, structured_outputs=own
                    )
                    begin = time.perf_counter()
                    llm.generate(["Once upon a time"] * batch, params)
                    times.append((time.perf_counter() - begin) / num_tokens * 1e3)
            ratio = statistics.median(b / a for a, b in zip(free, masked, strict=True)) - 1
            print(f"{batch:>6}{statistics.median(free):>10.2f}{statistics.median(masked):>11.2f}{ratio:>8.1%}")


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--no-model", action="store_true", help="leave out the demo model")
    given = parser.parse_args()
    synthetic_table(given.vocab_size, given.tokens)
    if not given.no_model:
        model_table(min(given.tokens, 64))


if __name__ == "__main__":
    main()
