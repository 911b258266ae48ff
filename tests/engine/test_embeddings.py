"""Embeddings through the engine: the recorded ones, whatever the chunks, batch mates, preemption and cache hits."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vkit import LLM, AsyncLLM, EngineArgs, PromptOptions, SamplingParams
from vkit.cli import main
from vkit.errors import ExitStatus, InvalidRequest, ModelLoadError, UsageError
from vkit.loading import load_model
from vkit.pooling import embedding_form, shortened

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
POOLED = {"last": "embedding", "mean": "embedding_mean"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "embedder"
    path.mkdir()
    for source in (GOLDENS / "llama_embed", GOLDENS / "byte_tokenizer"):
        for file in source.iterdir():
            if file.name != "golden.safetensors":
                shutil.copyfile(file, path / file.name)
    return path


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDENS / "llama_embed" / "golden.safetensors")


def open_llm(model: Path, pooling: str, **keywords: Any) -> LLM:
    overrides = {"pooling_type": pooling}
    return LLM(str(model), threads=1, cpu_precision="exact", hf_overrides=overrides, block_size=16, **keywords)


def test_sizes_to_capture_are_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="--cudagraph-capture-sizes: embedder makes embeddings"):
        open_llm(model, "last", cudagraph_capture_sizes="1,2")


def largest_error(found: list[float], expected: torch.Tensor) -> float:
    return float((torch.tensor(found) - expected).abs().max())


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_chunks_and_batches_do_not_matter(
    pooling: str, budget: int, model: Path, golden: dict[str, torch.Tensor]
) -> None:
    prompts = [golden["input_ids"].tolist(), golden["input_ids_b"].tolist()]
    keywords = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "async_scheduling": budget == 7}
    with open_llm(model, pooling, **keywords) as llm:
        together, alone = llm.embed(prompts * 2), [llm.embed(prompt)[0] for prompt in prompts]
    for vector, suffix in zip([*together, *alone], ["", "_b"] * 3, strict=True):
        if pooling == "cls":
            expected = torch.nn.functional.normalize(golden[f"hidden{suffix}"][0], dim=0)
        else:
            expected = golden[POOLED[pooling] + suffix]
        assert largest_error(vector, expected) < 1e-5
        assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_preemption_does_not_matter(pooling: str, model: Path, golden: dict[str, torch.Tensor]) -> None:
    overrides = {"pooling_type": pooling}
    args = EngineArgs(
        model=str(model), threads=1, cpu_precision="exact", hf_overrides=overrides, max_num_batched_tokens=10,
        max_num_seqs=4,
    )  # fmt: skip
    loaded = load_model(args)
    request = loaded.inputs.process_embedding(golden["input_ids"].tolist(), request_id="r")
    loaded.engine.add_request(request)
    outputs, num_steps = [], 0
    while not outputs:
        outputs, num_steps = loaded.engine.step(), num_steps + 1
        if num_steps == 2:
            loaded.engine.reset_prefix_cache(reset_running_requests=True)
    assert loaded.engine.scheduler.num_preemptions == 1
    assert num_steps == 6
    expected = golden[POOLED[pooling]] if pooling in POOLED else golden["hidden"][0] / golden["hidden"][0].norm()
    assert largest_error(outputs[0].embedding or [], expected) < 1e-5
    loaded.engine.close()
    loaded.close()


def counted(llm: LLM, name: str) -> float:
    family = next(family for family in llm.metrics() if family.name == name)
    return next(sample.value for sample in family.samples if sample.suffix != "_created")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_cached_prefixes_serve_the_last_token_only(pooling: str, model: Path, golden: dict[str, torch.Tensor]) -> None:
    with open_llm(model, pooling) as llm:
        prompt = golden["input_ids"].tolist()
        first, second = llm.embed(prompt)[0], llm.embed(prompt)[0]
        assert largest_error(first, golden[POOLED[pooling]]) < 1e-5
        assert largest_error(second, golden[POOLED[pooling]]) < 1e-5
        assert (counted(llm, "vllm:prefix_cache_hits") > 0) == (pooling == "last")


def test_the_library_names_the_right_method(model: Path) -> None:
    with open_llm(model, "last") as llm:
        for call in (lambda: llm.generate("x"), lambda: llm.stream("x"), lambda: llm.score("a", "b")):
            with pytest.raises(InvalidRequest, match=r"use LLM\.embed"):
                call()
        with pytest.raises(InvalidRequest, match="257 tokens"):
            llm.embed("z" * 257)
        assert len(llm.embed("z" * 256)[0]) == 32
        options = PromptOptions(truncate_prompt_tokens=3)
        assert llm.embed("abcdef", options=options) == llm.embed("def")
        with pytest.raises(InvalidRequest, match="dimensions: 8 asked for, this model was trained for 32"):
            llm.embed("x", dimensions=8)
    text_model = LLM(str(GOLDENS / "llama"), tokenizer=str(GOLDENS / "byte_tokenizer"), threads=1)
    with text_model as llm, pytest.raises(InvalidRequest, match="use generate or chat"):
        llm.embed("x")


def test_async_embeddings_and_their_cancelling(model: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM(EngineArgs(model=str(model), threads=1))
        try:
            outputs = await asyncio.gather(*(engine.embed("x" * n) for n in range(1, 30)))
            assert all(output.embedding and len(output.embedding) == 32 for output in outputs)
            assert [len(output.prompt_token_ids) for output in outputs] == list(range(1, 30))
            task = asyncio.ensure_future(engine.embed("y" * 200))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await engine.embed("x")).embedding == outputs[0].embedding
            with pytest.raises(InvalidRequest, match=r"use LLM\.embed"):
                await anext(engine.generate("x", SamplingParams()))
        finally:
            await engine.shutdown()

    asyncio.run(main())


def test_shorter_vectors(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16, 32]}))
    with LLM(str(model), threads=1) as llm:
        whole, short = llm.embed("hello")[0], llm.embed("hello", dimensions=8)[0]
        expected = torch.nn.functional.normalize(torch.tensor(whole[:8], dtype=torch.float64), dim=0)
        assert torch.allclose(torch.tensor(short, dtype=torch.float64), expected)
        for wrong in (7, 0, 33):
            with pytest.raises(InvalidRequest, match="dimensions"):
                llm.embed("hello", dimensions=wrong)
    assert shortened([0.0, 0.0, 1.0], 2) == [0.0, 0.0]


class Files:
    def __init__(self, path: Path, **config: Any) -> None:
        self.path, self.config = path, config


def test_where_the_pooling_comes_from(tmp_path: Path) -> None:
    assert embedding_form(Files(tmp_path), 4).pooling == "last"
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}))
    assert embedding_form(Files(tmp_path), 4).pooling == "mean"
    assert embedding_form(Files(tmp_path, pooling_type="cls"), 4).pooling == "cls"
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ModelLoadError, match="pooling_mode_max_tokens"):
        embedding_form(Files(tmp_path), 4)
    file.write_text("{")
    with pytest.raises(ModelLoadError, match="not readable"):
        embedding_form(Files(tmp_path), 4)


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_commands_that_generate_refuse_before_loading(
    command: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_weights(*args: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("vkit.loading.ResidentModel", no_weights)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    prompt = ["--prompt", "x"] if command == "complete" else []
    assert main([command, "--model", str(model), *prompt]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vkit: error: embedder makes embeddings and generates no text (use LLM.embed")


def test_bidirectional_attention_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(ModelLoadError, match="bidirectional"):
        LLM(str(model))


def test_names_with_a_prefix_and_a_head_are_taken(model: Path, golden: dict[str, torch.Tensor]) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file({**tensors, "lm_head.weight": torch.zeros(256, 32)}, model / "model.safetensors")
    with open_llm(model, "last") as llm:
        assert largest_error(llm.embed(golden["input_ids"].tolist())[0], golden["embedding"]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2Model", "Qwen3Model", "MistralModel"])
def test_relatives_equal_another_implementation(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, name.replace("Model", "Config"))(
        **sizes, num_key_value_heads=2, head_dim=8, vocab_size=256, sliding_window=None, max_position_embeddings=128
    )
    reference = getattr(transformers, name)(config).eval()
    reference.save_pretrained(tmp_path)
    shutil.copyfile(GOLDENS / "byte_tokenizer" / "tokenizer.json", tmp_path / "tokenizer.json")
    ids = [7, 3, 99, 200, 41]
    with torch.no_grad():
        hidden = reference(torch.tensor([ids])).last_hidden_state[0]
    for pooling, row in (("last", hidden[-1]), ("mean", hidden.mean(0))):
        with open_llm(tmp_path, pooling) as llm:
            assert largest_error(llm.embed(ids)[0], torch.nn.functional.normalize(row, dim=0)) < 1e-5
