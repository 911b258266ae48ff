"""Record what llama.cpp makes of a further model, for the opt-in tests to compare with.

Run by hand with a Python that has llama-cpp-python (any 0.3 release) installed:

    python tests/judges/record_more_models.py MODEL.gguf NAME [BOS]

It writes tests/data/NAME_greedy.json; BOS is the id to begin with, where the model wants one. Nothing of vkit is
imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
from record_llamacpp import DATA, FLOAT32, continue_greedily, encode, write

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "東京は日本の",
]
NUM_NEW_TOKENS = 24


def main(path: str, name: str, *bos: str) -> None:
    model = llama_cpp.Llama(path, n_ctx=256, n_batch=256, n_threads=2, verbose=False, type_k=FLOAT32, type_v=FLOAT32)
    cases = []
    for prompt in PROMPTS:
        ids = [*map(int, bos), *encode(model, prompt, special=False)]
        found = continue_greedily(model, ids, NUM_NEW_TOKENS)
        top = [candidates[:5] for candidates in found["top"]]
        cases.append({"prompt": prompt, "prompt_token_ids": ids, "token_ids": found["token_ids"], "top": top})
    origin = f"llama-cpp-python {llama_cpp.__version__}, {Path(path).name}, CPU, f32 KV cache"
    write(DATA / f"{name}_greedy.json", {"origin": origin, "cases": cases})


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: record_more_models.py MODEL.gguf NAME [BOS]")
    main(*sys.argv[1:])
