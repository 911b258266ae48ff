"""Record what llama.cpp makes of the demo model: token ids and greedy continuations, for the tests to compare with.

Run by hand with a Python that has llama-cpp-python (any 0.3 release) installed:

    python tests/judges/record_llamacpp.py MODEL.gguf FLOAT32.gguf

It writes tests/data/text/demo_ids.json, tests/data/demo_greedy.json and tests/data/demo_greedy_f32.json. The last holds
what llama.cpp makes of the same weights expanded to float32 (expand_to_float32.py), where it does not quantise
activations to 8 bits. Nothing of vkit is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from corpus_strings import diverse_strings

DATA = Path(__file__).resolve().parent.parent / "data"
NUM_NEW_TOKENS = 48
NUM_CANDIDATES = 10
FLOAT32 = 0
"""ggml's number of the type."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at a temperature of",
    "The three most important things to remember when writing a letter are",
    "Q: What is the largest planet in our solar system?\nA:",
    "Dear Sir or Madam,\n\nI am writing to you about",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    '{"name": "Alice", "age": 30, "city":',
    "import numpy as np\n\n# Compute the mean of each column\n",
    "I love 🍕 and 🍣, but my favourite food is",
    "😀 😃 😄 😁",
    "你好，世界！今天",
    "東京は日本の",
    "La tour Eiffel est située à",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 5, 8, 13,",
]

PASSAGE = (
    "The lighthouse keeper climbed the stairs every evening before the sun went down. There were two hundred and six "
    "of them, and he had counted them more often than he could remember. At the top he cleaned the great lens, filled "
    "the lamp with oil, wound the clockwork that turned the light, and wrote the weather into a thick grey book. Most "
    "evenings the entry was short: wind from the west, sea moderate, visibility good. On some evenings it was longer. "
)


def long_prompt(model: llama_cpp.Llama, num_tokens: int = 500) -> str:
    """A text of exactly `num_tokens` tokens that survives being detokenised and encoded again."""
    ids = encode(model, PASSAGE * 8, special=False)[:num_tokens]
    text = model.detokenize(ids).decode()
    assert encode(model, text, special=False) == ids
    return text


def encode(model: llama_cpp.Llama, text: str, *, special: bool) -> list[int]:
    return list(model.tokenize(text.encode(), add_bos=False, special=special))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def continue_greedily(model: llama_cpp.Llama, ids: list[int], num_new_tokens: int = NUM_NEW_TOKENS) -> dict[str, Any]:
    """The most likely token again and again, end tokens included, with the best candidates of each step."""
    model.reset()
    model.eval(ids)
    chosen: list[int] = []
    candidates: list[list[list[float]]] = []
    for _ in range(num_new_tokens):
        logits = np.ctypeslib.as_array(model._ctx.get_logits(), shape=(model.n_vocab(),))
        logprobs = log_softmax(logits)
        best = np.argsort(-logprobs, kind="stable")[:NUM_CANDIDATES]
        candidates.append([[int(i), round(float(logprobs[i]), 4)] for i in best])
        chosen.append(int(best[0]))
        model.eval([chosen[-1]])
    return {"token_ids": chosen, "top": candidates}


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def record_greedy(model: llama_cpp.Llama, origin: str, path: Path) -> None:
    cases = []
    for prompt in [*PROMPTS, long_prompt(model)]:
        special = "<|im_start|>" in prompt
        prompt_ids = encode(model, prompt, special=special)
        cases.append(
            {"prompt": prompt, "parse_special": special, "prompt_token_ids": prompt_ids}
            | continue_greedily(model, prompt_ids)
        )
    write(path, {"origin": origin, "cases": cases})


def main(model_path: str, float_path: str) -> None:
    model = llama_cpp.Llama(model_path, n_ctx=1024, n_batch=1024, n_threads=2, verbose=False)
    origin = f"llama-cpp-python {llama_cpp.__version__}, {Path(model_path).name}, CPU, f16 KV cache"
    strings = diverse_strings()
    ids = [
        {"text": s, "plain": encode(model, s, special=False), "special": encode(model, s, special=True)}
        for s in strings
    ]
    write(DATA / "text" / "demo_ids.json", {"origin": origin, "cases": ids})
    record_greedy(model, origin, DATA / "demo_greedy.json")
    floats = llama_cpp.Llama(
        float_path, n_ctx=1024, n_batch=1024, n_threads=2, verbose=False, type_k=FLOAT32, type_v=FLOAT32
    )
    origin = f"llama-cpp-python {llama_cpp.__version__}, {Path(model_path).name} expanded to float32, CPU, f32 KV cache"
    record_greedy(floats, origin, DATA / "demo_greedy_f32.json")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: record_llamacpp.py MODEL.gguf FLOAT32.gguf")
    main(sys.argv[1], sys.argv[2])
