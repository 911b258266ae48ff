"""Low-rank adapters: the same numbers as weights with the adapter merged in, whatever shares the batch."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vkit import LLM, AsyncLLM, EngineArgs, PromptOptions, SamplingParams, UsageError
from vkit.errors import CheckpointError, InvalidRequest

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
PROMPTS = [list(b"the quick brown fox jumps over"), list(b"lazy dogs"), list(b"pack my box with five dozen")]
WHOLE = PromptOptions(max_logprobs=-1)


def copied(folder: Path, kind: str = "llama") -> Path:
    folder.mkdir(parents=True)
    for source in (GOLDENS / kind, GOLDENS / "byte_tokenizer"):
        for file in source.iterdir():
            if file.name in ("config.json", "model.safetensors", "tokenizer.json"):
                shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("base") / "llama")


def make_adapter(
    folder: Path, base: Path, names: list[str], *, rank: int = 3, seed: int = 0, alpha: float = 6.0, **config: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter's folder, and by weight name what it adds: alpha / rank · B A."""
    generator = torch.Generator().manual_seed(seed)
    stored, added = {}, {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not any(f".{module}".endswith(f".{wanted}") for wanted in names):
            continue
        is_table = module.endswith("embed_tokens")
        num_in, num_out = weight.shape if is_table else reversed(weight.shape)
        down = torch.randn(rank, num_in, generator=generator) * 0.3
        up = torch.randn(num_out, rank, generator=generator) * 0.3
        if is_table:
            stored[f"base_model.model.{module}.lora_embedding_A"] = down
            stored[f"base_model.model.{module}.lora_embedding_B"] = up
            added[name] = (up @ down).T * (alpha / rank)
            continue
        stored[f"base_model.model.{module}.lora_A.weight"] = down
        stored[f"base_model.model.{module}.lora_B.weight"] = up
        added[name] = up @ down * (alpha / rank)
    folder.mkdir(parents=True)
    save_file(stored, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": names, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder, added


def merged(folder: Path, base: Path, added: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    save_file(
        {name: tensor + added.get(name, torch.zeros(())) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def logprobs(llm: LLM, prompts: list[list[int]], loras: list[str | None]) -> list[torch.Tensor]:
    """Log-probabilities (T - 1, V) of each prompt, all prompts in one engine at a time."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    inputs = llm._inputs
    requests = [
        inputs.process(prompt, params.with_(output_kind="final_only"), request_id=f"r{i}", lora=lora, options=WHOLE)
        for i, (prompt, lora) in enumerate(zip(prompts, loras, strict=True))
    ]
    return [_rows(output.prompt_logprobs) for output in llm._run_all(requests)]


def _rows(positions: Any) -> torch.Tensor:
    rows = torch.full((len(positions) - 1, 256), float("nan"))
    for row, entries in zip(rows, positions[1:], strict=True):
        for entry in entries:
            row[entry.token_id] = entry.logprob
    assert not rows.isnan().any()
    return rows


def open_llm(model: Path, **keywords: Any) -> LLM:
    settings = {"threads": 1, "cpu_precision": "exact", "max_num_seqs": 8, "block_size": 16, "seed": 0}
    return LLM(str(model), **{**settings, **keywords})


ATTENTION = ["self_attn.q_proj", "self_attn.v_proj"]
EVERYTHING = [*ATTENTION, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]

EVERYWHERE = [*EVERYTHING, "embed_tokens", "lm_head"]


@pytest.mark.parametrize("budget", [8, 64])
def test_mixed_batches_equal_merged_weights(budget: int, base: Path, tmp_path: Path) -> None:
    one, added_one = make_adapter(tmp_path / "one", base, ATTENTION, seed=1)
    two, added_two = make_adapter(tmp_path / "two", base, EVERYWHERE, rank=5, seed=2)
    expected: dict[str | None, list[torch.Tensor]] = {}
    for name, added in ((None, {}), ("one", added_one), ("two", added_two)):
        with open_llm(merged(tmp_path / f"merged-{name}", base, added)) as llm:
            expected[name] = logprobs(llm, PROMPTS, [None] * 3)
    assert (expected["one"][0] - expected[None][0]).abs().max() > 0.1
    modules = {"one": str(one), "two": str(two)}
    keywords = {"max_num_batched_tokens": budget, "async_scheduling": budget == 8}
    with open_llm(base, enable_lora=True, lora_modules=modules, **keywords) as llm:
        names: list[str | None] = [None, "one", "two", "two", "one", None]
        for loras in (names, names[::-1]):
            prompts = [PROMPTS[i % 3] for i in range(6)]
            for i, rows in enumerate(logprobs(llm, prompts, loras)):
                assert (rows - expected[loras[i]][i % 3]).abs().max() < 2e-4


def test_generation_follows_the_adapter(base: Path, tmp_path: Path) -> None:
    path, added = make_adapter(tmp_path / "a", base, EVERYWHERE, seed=3)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with open_llm(merged(tmp_path / "merged", base, added)) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    with open_llm(base, enable_lora=True, lora_modules=[f"a={path}"]) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, lora="a")] == expected
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] != expected
        messages = [{"role": "user", "content": "hi"}]
        template = "{{ messages[0].content }}"
        whole = llm.chat(messages, params, chat_template=template, lora="a")[0].outputs[0].token_ids
        parts = [
            t
            for o in llm.chat_stream(messages, params, chat_template=template, lora="a")
            for t in o.outputs[0].token_ids
        ]
        assert whole == parts == llm.generate("hi", params, lora="a")[0].outputs[0].token_ids
        streamed = [t for output in llm.stream(PROMPTS[0], params, lora="a") for t in output.outputs[0].token_ids]
        assert streamed == expected[0]


def test_a_tied_head_and_its_table_have_adapters_apart(tmp_path: Path) -> None:
    """As PEFT has it: what changes the table leaves the head's product with it alone, and the other way round."""
    base = copied(tmp_path / "tied", "gemma3")  # whose rows are scaled after the look-up
    for number, names in enumerate((["embed_tokens"], ["lm_head"], [*ATTENTION, "embed_tokens", "lm_head"])):
        untied = copied(tmp_path / f"untied{number}", "gemma3")
        tensors = load_file(untied / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, untied / "model.safetensors")
        config = json.loads((untied / "config.json").read_text())
        (untied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        path, added = make_adapter(tmp_path / f"a{number}", untied, names, seed=6)
        with open_llm(merged(tmp_path / f"merged{number}", untied, added)) as llm:
            expected = logprobs(llm, PROMPTS, [None] * 3)
        with open_llm(base, enable_lora=True, lora_modules={"a": str(path)}) as llm:
            for rows, wanted in zip(logprobs(llm, PROMPTS, ["a"] * 3), expected, strict=True):
                assert (rows - wanted).abs().max() < 5e-4
    rewritten(path, ensure_weight_tying=True)
    with open_llm(base, enable_lora=True) as llm, pytest.raises(CheckpointError, match="ensure_weight_tying"):
        llm.load_lora("a", str(path))


def test_copies_of_the_base_must_be_its_own(base: Path, adaptable: LLM, tmp_path: Path) -> None:
    path, _ = make_adapter(tmp_path / "a", base, ["embed_tokens"])
    tensors = load_file(path / "adapter_model.safetensors")
    own = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    for scale, is_own in ((1.0, True), (1.02, False)):
        tensors[f"{EMBED}.base_layer.weight"] = (own * scale).bfloat16()
        save_file(tensors, path / "adapter_model.safetensors")
        if is_own:
            adaptable.load_lora("copy", str(path))
            adaptable.unload_lora("copy")
        else:
            with pytest.raises(CheckpointError, match="belongs to a changed base model"):
                adaptable.load_lora("copy", str(path))


def test_prefixes_are_not_shared_across_adapters(base: Path, tmp_path: Path) -> None:
    one, _ = make_adapter(tmp_path / "one", base, EVERYTHING, seed=1)
    other, _ = make_adapter(tmp_path / "other", base, EVERYTHING, seed=2)
    prompt = list(range(64))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with open_llm(base, enable_lora=True, lora_modules={"a": str(one)}) as llm:

        def run(lora: str | None) -> tuple[list[int], int]:
            (output,) = llm.generate(prompt, params, lora=lora)
            return output.outputs[0].token_ids, output.num_cached_tokens

        plain, cached = run(None)
        assert cached == 0
        adapted, cached = run("a")
        assert cached == 0
        assert run("a") == (adapted, 48)
        assert run(None) == (plain, 48)
        # The same name with other weights is another adapter.
        llm.unload_lora("a")
        llm.load_lora("a", str(other))
        changed, cached = run("a")
        assert cached == 0
        assert changed != adapted
        llm.unload_lora("a")
        llm.load_lora("a", str(one))
        assert run("a") == (adapted, 48)


def test_max_loras_limits_what_runs_together(base: Path, tmp_path: Path) -> None:
    modules = {name: str(make_adapter(tmp_path / name, base, ATTENTION, seed=i)[0]) for i, name in enumerate("abc")}
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    names = ["a", "b", "c", "a", None]
    with open_llm(base, enable_lora=True, lora_modules=modules, max_loras=1) as llm:
        engine = llm._loaded.engine
        seen: list[set[str]] = []
        schedule = engine.scheduler.schedule

        def watched(*args: int) -> Any:
            plan = schedule(*args)
            if plan is not None:
                seen.append({item.sequence.adapter.name for item in plan.scheduled if item.sequence.adapter})
            return plan

        engine.scheduler.schedule = watched  # type: ignore[method-assign]
        alone = [llm.generate(PROMPTS[0], params, lora=name)[0].outputs[0].token_ids for name in names]
        requests = [
            llm._inputs.process(PROMPTS[0], params.with_(output_kind="final_only"), request_id=f"{i}", lora=name)
            for i, name in enumerate(names)
        ]
        together = [output.outputs[0].token_ids for output in llm._run_all(requests)]
        assert together == alone
        assert max(map(len, seen)) == 1
        info = next(family for family in llm.metrics() if family.name == "vllm:lora_requests_info")
        assert info.samples[0].labels["max_lora"] == "1"


def test_running_requests_keep_an_unloaded_adapter(base: Path, tmp_path: Path) -> None:
    path, _ = make_adapter(tmp_path / "a", base, EVERYTHING, seed=3)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    async def main() -> None:
        engine = AsyncLLM(EngineArgs(model=str(base), threads=1, enable_lora=True))
        try:
            assert engine.loras == ()
            await engine.load_lora("a", str(path))
            assert engine.loras == ("a",)
            whole = [o async for o in engine.generate(PROMPTS[0], params, lora="a")][-1].outputs[0].token_ids
            stream = engine.generate(PROMPTS[0], params, lora="a")
            await anext(stream)
            await engine.unload_lora("a")
            assert [o async for o in stream][-1].outputs[0].token_ids == whole
            with pytest.raises(InvalidRequest, match="no adapter is called 'a'"):
                await anext(engine.generate(PROMPTS[0], params, lora="a"))
        finally:
            await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_survive_sleep(level: int, base: Path, tmp_path: Path) -> None:
    path, _ = make_adapter(tmp_path / "a", base, EVERYTHING, seed=3)
    with open_llm(base, enable_lora=True, lora_modules={"a": str(path)}) as llm:
        before = logprobs(llm, PROMPTS, ["a"] * 3)
        llm.sleep(level)
        llm.wake_up()
        for rows, expected in zip(logprobs(llm, PROMPTS, ["a"] * 3), before, strict=True):
            assert torch.equal(rows, expected)


def test_in_process_chat_chooses_by_model(base: Path, tmp_path: Path) -> None:
    path, _ = make_adapter(tmp_path / "a", base, EVERYTHING, seed=3)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    async def main() -> None:
        modules = {"a": str(path)}
        args = EngineArgs(model=str(base), threads=1, enable_lora=True, lora_modules=modules, chat_template=template)
        engine = AsyncLLM(args)
        try:
            request = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
            texts = [
                (await engine.chat({**request, "model": model}))["choices"][0]["message"]["content"]
                for model in ("llama", "a")
            ]
            assert texts[0] != texts[1]
            with pytest.raises(InvalidRequest, match="does not exist"):
                await engine.chat({**request, "model": "b"})
        finally:
            await engine.shutdown()

    asyncio.run(main())


def rewritten(folder: Path, **config: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


def test_scaling_rules(base: Path, tmp_path: Path) -> None:
    path, added = make_adapter(tmp_path / "a", base, ATTENTION, rank=4, alpha=6.0, seed=5)
    rewritten(path, use_rslora=True, alpha_pattern={"layers.1.self_attn.q_proj": 3.0})
    for name in added:
        factor = 0.5 if "layers.1.self_attn.q_proj" in name else 1.0
        added[name] = added[name] * factor * 2.0  # √4 in the place of 4
    with open_llm(merged(tmp_path / "merged", base, added)) as llm:
        expected = logprobs(llm, PROMPTS, [None] * 3)
    with open_llm(base, enable_lora=True, lora_modules={"a": str(path)}) as llm:
        for rows, wanted in zip(logprobs(llm, PROMPTS, ["a"] * 3), expected, strict=True):
            assert (rows - wanted).abs().max() < 2e-4


def test_embeddings_take_adapters(tmp_path: Path) -> None:
    base = copied(tmp_path / "embedder", "llama_embed")
    path, added = make_adapter(tmp_path / "a", base, ["q_proj", "down_proj"], seed=4)
    with open_llm(merged(tmp_path / "merged", base, added)) as llm:
        expected = torch.tensor(llm.embed(PROMPTS))
    with open_llm(base, enable_lora=True, lora_modules={"a": str(path)}) as llm:
        assert (torch.tensor(llm.embed(PROMPTS, lora="a")) - expected).abs().max() < 1e-5
        assert (torch.tensor(llm.embed(PROMPTS)) - expected).abs().max() > 1e-2


CONFIG_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "only LORA"),
    ({"use_dora": True}, "DoRA"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
    ({"lora_alpha": "x"}, "lora_alpha must be a number"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"r": 8}, "r is 8, but .*q_proj has rank 3"),
    ({"rank_pattern": {"layers.1.self_attn.v_proj": 4}}, "rank_pattern layers.1.self_attn.v_proj is 4, but"),
    ({"rank_pattern": [4]}, "rank_pattern must be an object"),
    ({"target_modules": ["q_proj", "o_proj"]}, "target_modules names 'o_proj'"),
    ({"target_modules": r".*mlp\..*"}, "matches no module"),
    ({"target_modules": "("}, "is no pattern"),
    ({"target_modules": 7}, "must be a list"),
]


@pytest.fixture(scope="module")
def adaptable(base: Path) -> Any:
    with open_llm(base, enable_lora=True) as llm:
        yield llm


@pytest.mark.parametrize(("config", "message"), CONFIG_REFUSALS)
def test_unsupported_kinds_are_refused(
    config: dict[str, Any], message: str, adaptable: LLM, base: Path, tmp_path: Path
) -> None:
    path, _ = make_adapter(tmp_path / "a", base, ATTENTION)
    rewritten(path, **config)
    with pytest.raises(CheckpointError, match=message):
        adaptable.load_lora("a", str(path))
    assert adaptable.loras == ()


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*self_attn\.[qv]_proj", "r": 9, "rank_pattern": {"[qv]_proj": 3}},
        {"target_modules": None, "r": None},
    ],
)
def test_configurations_that_the_tensors_keep(
    config: dict[str, Any], adaptable: LLM, base: Path, tmp_path: Path
) -> None:
    path, _ = make_adapter(tmp_path / "a", base, ATTENTION)
    rewritten(path, **config)
    adaptable.load_lora("kept", str(path))
    adaptable.unload_lora("kept")


EMBED = "base_model.model.model.embed_tokens"
Q = "base_model.model.model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, torch.Tensor]], Any]
TENSOR_REFUSALS: list[tuple[Change, str]] = [
    (lambda t: t.pop(f"{Q}.lora_A.weight"), "has no lora_A"),
    (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(3, 7)}), r"shape \(3, 7\), the model needs \(3, 64\)"),
    (lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(32, 9)}), "the model needs"),
    (lambda t: t.update({f"{Q}.lora_A.weight": torch.full((3, 64), float("inf"))}), "not finite"),
    (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(3, 64, dtype=torch.int32)}), "floating"),
    (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(3, 64)}), "lm_head has no lora_B"),
    (lambda t: t.update({f"{EMBED}.lora_A.weight": torch.ones(3, 64)}), "has lora_embedding_A and _B"),
    (lambda t: t.update({f"{Q}.lora_embedding_A": torch.ones(3, 64)}), "has lora_A and lora_B"),
    (lambda t: t.update({f"{EMBED}.lora_embedding_A": torch.ones(3, 256)}), "embed_tokens has no lora_B"),
    (
        lambda t: t.update({f"{EMBED}.lora_embedding_{x}": torch.ones(3, 3) for x in "AB"}),
        r"embedding_A has shape \(3, 3\), the model needs \(3, 256\)",
    ),
    (lambda t: t.update({f"{EMBED}.base_layer.weight": torch.ones(256, 64)}), "is not the model's own"),
    (lambda t: t.update({f"{EMBED}.base_layer.weight": torch.ones(260, 64)}), r"shape \(260, 64\), the model needs"),
    (lambda t: t.update({f"{EMBED}.weight": torch.ones(256, 64)}), "embed_tokens.weight is not part"),
    (lambda t: t.update({"base_model.model.head.lora_A.weight": torch.ones(3, 64)}), "no layer head that"),
    (lambda t: t.update({"base_model.model.model.norm.weight": torch.ones(32)}), "norm.weight is not part"),
    (lambda t: t.update({Q.replace("0", "9") + ".lora_A.weight": torch.ones(3, 64)}), "no layer model.layers.9"),
    (lambda t: t.clear(), "holds no tensors"),
]


@pytest.mark.parametrize(("change", "message"), TENSOR_REFUSALS)
def test_wrong_tensors_are_refused(change: Change, message: str, adaptable: LLM, base: Path, tmp_path: Path) -> None:
    path, _ = make_adapter(tmp_path / "a", base, ATTENTION)
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        adaptable.load_lora("a", str(path))


def test_wrong_files_and_names_are_refused(adaptable: LLM, base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config.json: No such file"):
        adaptable.load_lora("a", str(tmp_path / "nowhere"))
    path, _ = make_adapter(tmp_path / "a", base, ATTENTION)
    adaptable.load_lora("a", str(path))
    with pytest.raises(InvalidRequest, match="loaded already"):
        adaptable.load_lora("a", str(path))
    adaptable.unload_lora("a")
    with pytest.raises(InvalidRequest, match="no adapter"):
        adaptable.unload_lora("a")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        adaptable.load_lora("a", str(path))
    (path / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match="not readable"):
        adaptable.load_lora("a", str(path))
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        adaptable.load_lora("a", str(path))


def test_settings_that_cannot_be(base: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"lora_modules": ["a=b"]}, "--lora-modules: needs --enable-lora"),
        ({"max_loras": 2}, "--max-loras: needs --enable-lora"),
        ({"enable_lora": True, "max_loras": 0}, "--max-loras"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "expected NAME=PATH"),
        ({"enable_lora": True, "lora_modules": ["a=b", "a=c"]}, "given twice"),
    ]
    for keywords, message in cases:
        with pytest.raises(UsageError, match=message):
            EngineArgs(model=str(base), **keywords)
    with open_llm(base) as llm, pytest.raises(InvalidRequest, match="without adapters"):
        llm.generate("x", lora="a")
    with pytest.raises(UsageError, match="name of the model itself"):
        open_llm(base, enable_lora=True, lora_modules={"llama": "x"})


# Another implementation


def hf_model(weights: dict[str, torch.Tensor], base: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("inv_freq" in name or "lm_head" in name for name in missing)
    return model.eval()


def peft_adapter(folder: Path, model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(9)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=10, **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    return adapted.eval()


def reference_rows(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "rank_pattern": {"embed_tokens": 6}},
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"down_proj": 7},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 20},
        },
    ],
)
def test_peft_agrees(settings: dict[str, Any], base: Path, tmp_path: Path) -> None:
    adapted = peft_adapter(tmp_path / "a", hf_model(load_file(base / "model.safetensors"), base), **settings)
    with open_llm(base, enable_lora=True, lora_modules={"a": str(tmp_path / "a")}) as llm:
        for prompt, rows in zip(PROMPTS, logprobs(llm, PROMPTS, ["a"] * 3), strict=True):
            assert (rows - reference_rows(adapted, prompt)).abs().max() < 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("targets", [["embed_tokens"], ["embed_tokens", "lm_head", "v_proj"]])
def test_peft_agrees_over_tied_tables(kind: str, targets: list[str], tmp_path: Path) -> None:
    base = copied(tmp_path / "base", kind)
    adapted = peft_adapter(
        tmp_path / "a", hf_model(load_file(base / "model.safetensors"), base), target_modules=targets
    )
    assert any("base_layer" in name for name in load_file(tmp_path / "a" / "adapter_model.safetensors"))
    with open_llm(base, enable_lora=True, lora_modules={"a": str(tmp_path / "a")}) as llm:
        for prompt, rows in zip(PROMPTS, logprobs(llm, PROMPTS, ["a"] * 3), strict=True):
            assert (rows - reference_rows(adapted, prompt)).abs().max() < 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", ["embed_tokens", "lm_head", "o_proj"]])
def test_peft_agrees_over_packed_weights(targets: str | list[str], base: Path, tmp_path: Path) -> None:
    from vkit.loaders import open_checkpoint

    packed = open_checkpoint(GOLDENS / "llama" / "model-q8_0.gguf")
    weights = {}
    for name in packed.tensor_names():
        weight = packed.load(name)
        weights[name] = weight.clone() if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
    adapted = peft_adapter(tmp_path / "a", hf_model(weights, base), target_modules=targets)
    with open_llm(
        GOLDENS / "llama" / "model-q8_0.gguf",
        enable_lora=True,
        lora_modules={"a": str(tmp_path / "a")},
        tokenizer=str(GOLDENS / "byte_tokenizer"),
    ) as llm:
        for prompt, rows in zip(PROMPTS, logprobs(llm, PROMPTS, ["a"] * 3), strict=True):
            assert (rows - reference_rows(adapted, prompt)).abs().max() < 5e-4
