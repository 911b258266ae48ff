"""The tiny golden model behind a connector."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from vkit import LLM, RequestOutput, SamplingParams

MODELS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"

TINY = {"block_size": 16, "num_blocks": 20, "max_model_len": 128, "max_num_seqs": 4, "dtype": "float32", "threads": 1}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
_random = random.Random(1)
PROMPT = [_random.randrange(3, 200) for _ in range(70)]


class Tiny(LLM):
    """A tiny model with what tests want to know about its connector."""

    def answer(self, prompt: list[int] = PROMPT) -> RequestOutput:
        """Eight greedy tokens."""
        return self.generate([{"prompt_token_ids": prompt}], PARAMS)[0]

    def tokens(self, prompt: list[int] = PROMPT) -> list[int]:
        """Their ids."""
        return self.answer(prompt).outputs[0].token_ids

    def settle(self, *, forgets: bool = True) -> None:
        """Wait until everything is stored; then forget the engine's own prefixes."""

        def work(engine: Any) -> None:
            assert engine._transfer.worker.flush()
            assert not forgets or engine.reset_prefix_cache()

        self._thread.call(work).result()

    def counters(self) -> dict[str, float]:
        """Every counter sample by name and first label."""
        return {
            "/".join([family.name.removeprefix("vllm:"), *sample.labels.values()]): sample.value
            for family in self.metrics()
            for sample in family.samples
            if family.kind == "counter"
        }


@pytest.fixture(autouse=True, scope="package")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Digests of weights go where the tests' files go; kernels that are built already are not built again."""
    built = platformdirs.user_cache_path("vkit") / "kernels"
    built.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("cache")
    (folder / "vkit").mkdir()
    (folder / "vkit" / "kernels").symlink_to(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture
def open_tiny() -> Iterator[Callable[..., Tiny]]:
    """Opens tiny models; those left open are closed."""
    opened: list[Tiny] = []

    def make(connector: str | None = None, role: str = "kv_both", policy: str = "fail", **more: Any) -> Tiny:
        model = more.pop("model", "llama")
        keywords: dict[str, Any] = {**TINY, "tokenizer": str(MODELS / "byte_tokenizer")}
        keywords.update(
            {key: more.pop(key) for key in list(more) if key in {*TINY, "kv_cache_dtype", "speculative_config"}}
        )
        if connector is not None:
            keywords["kv_transfer_config"] = {
                "kv_connector": connector,
                "kv_role": role,
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": more,
            }
        opened.append(Tiny(str(MODELS / model), **keywords))
        return opened[-1]

    yield make
    for model in opened:
        model.close()


@pytest.fixture(scope="session")
def plain_tokens() -> list[int]:
    """What the model says without any connector."""
    with Tiny(str(MODELS / "llama"), **{**TINY, "tokenizer": str(MODELS / "byte_tokenizer")}) as model:
        return model.tokens()
