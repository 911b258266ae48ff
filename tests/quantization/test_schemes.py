"""Layouts by their formulas: packed in the test, read back exactly; and what declarations are refused for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from vkit.errors import ModelLoadError
from vkit.kernels import InputRounding, ScaledMatrix, scaled_linear
from vkit.kernels.reference.scaled_linear import round_inputs
from vkit.quantization import concat
from vkit.quantization.awq import AwqFormat
from vkit.quantization.compressed_tensors import CompressedTensorsScheme
from vkit.quantization.fp8 import Fp8Format
from vkit.quantization.gptq import GptqFormat
from vkit.quantization.integers import ByteIntegers, PackedIntegers
from vkit.quantization.mxfp import MxFormat
from vkit.quantization.nvfp4 import compressed_format, model_opt_format
from vkit.quantization.scheme import Declaration, LayerFormat, LayerHeader, StoredTensor
from vkit.quantization.schemes import SCHEMES

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def read(layer_format: LayerFormat, tensors: Mapping[str, torch.Tensor]) -> ScaledMatrix:
    """What the format makes of a layer's tensors; it must use them all."""
    stored = {suffix: StoredTensor(tuple(tensor.shape), tensor.dtype) for suffix, tensor in tensors.items()}
    header = LayerHeader("file", "layer", stored, tensors.__getitem__)
    shape = layer_format.check(header)
    assert sorted(header.taken) == sorted(tensors)
    return layer_format.build(tensors, shape)


def stream(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as one number each, low bits first, cut into 32-bit words: int32 (rows, words)."""
    num_words = -(-values.shape[1] * bits // 32)
    rows = []
    for row in values.tolist():
        number = sum(value << (bits * place) for place, value in enumerate(row))
        rows.append([(number >> (32 * word)) & 0xFFFFFFFF for word in range(num_words)])
    return torch.tensor([[word - (word >> 31 << 32) for word in row] for row in rows], dtype=torch.int32)


def awq_words(values: torch.Tensor) -> torch.Tensor:
    """(n, out) codes as AWQ keeps them: nibble i of a word is its column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return stream(values.unflatten(1, (-1, 8))[..., order].flatten(1), 4)


def test_hand_packed_words() -> None:
    assert awq_words(torch.arange(8).unsqueeze(0)).item() == 0x75316420
    assert stream(torch.arange(8).unsqueeze(0), 4).item() == 0x76543210
    one = torch.ones(1, 8, dtype=torch.float16)
    tensors = {"qweight": torch.tensor([[0x75316420]], dtype=torch.int32), "scales": one}
    tensors["qzeros"] = torch.zeros(1, 1, dtype=torch.int32)
    assert read(AwqFormat(-1), tensors).dequantize().flatten().tolist() == list(range(8))
    tensors = {"qweight": torch.tensor([[0x76543210]], dtype=torch.int32), "scales": one[:, :1]}
    tensors["qzeros"] = torch.tensor([[7]], dtype=torch.int32)
    assert read(GptqFormat(4, -1, False, 1), tensors).dequantize().flatten().tolist() == list(range(-8, 0))


@pytest.mark.parametrize("group_size", [8, -1])
def test_awq(group_size: int) -> None:
    rows, columns = 48, 24
    groups = columns // (group_size if group_size > 0 else columns)
    codes, zeros = torch.randint(0, 16, (columns, rows)), torch.randint(0, 16, (groups, rows))
    scales = torch.rand(groups, rows).half()
    weight = read(AwqFormat(group_size), {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales})
    spread = columns // groups
    expected = (codes - zeros.repeat_interleave(spread, 0)) * scales.float().repeat_interleave(spread, 0)
    assert torch.equal(weight.dequantize(), expected.T)
    order = torch.randperm(rows)[:13]
    assert torch.equal(weight.rows(order).dequantize(), expected.T[order])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_gptq(bits: int, offset: int, is_shuffled: bool) -> None:
    rows, columns, group = 32, 96, 32
    codes, stored = torch.randint(0, 1 << bits, (rows, columns)), torch.randint(0, 1 << bits, (3, rows))
    scales = torch.rand(3, rows).half()
    index = torch.arange(columns) // group
    if is_shuffled:
        index = index[torch.randperm(columns)]
    tensors = {"qweight": stream(codes, bits).T.contiguous(), "qzeros": stream(stored, bits), "scales": scales}
    if is_shuffled:
        tensors["g_idx"] = index.int()
    weight = read(GptqFormat(bits, group, is_shuffled, offset), tensors)
    zeros = (stored + offset) % (1 << bits)
    expected = (codes.T - zeros[index]) * scales.float()[index]
    assert torch.equal(weight.dequantize(), expected.T)
    order = torch.randperm(rows)
    assert torch.equal(weight.rows(order).dequantize(), expected.T[order])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("group_size", [20, None])
def test_packed_integers(bits: int, is_symmetric: bool, group_size: int | None) -> None:
    """Widths that fill no whole word, in both directions."""
    rows, columns = 37, 60
    groups = columns // (group_size or columns)
    low = -(1 << (bits - 1))
    codes, zeros = torch.randint(low, -low, (rows, columns)), torch.randint(low, -low, (rows, groups))
    scales = torch.rand(rows, groups).bfloat16()
    tensors = {
        "weight_packed": stream(codes - low, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = stream((zeros - low).T, bits).T.contiguous()
    weight = read(PackedIntegers(bits, group_size, is_symmetric, False, None), tensors)
    shift = torch.zeros(rows, columns) if is_symmetric else zeros.repeat_interleave(columns // groups, 1)
    expected = (codes - shift) * scales.float().repeat_interleave(columns // groups, 1)
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("scale_shape", [(), (1,), (40, 1), (40, 4)])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_byte_integers(scale_shape: tuple[int, ...], is_symmetric: bool) -> None:
    rows, columns = 40, 24
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    tensors = {"weight": codes, "weight_scale": torch.rand(scale_shape)}
    strategy = {0: "tensor", 1: "tensor", 2: "channel" if scale_shape[-1:] == (1,) else "group"}[len(scale_shape)]
    zeros = torch.zeros(scale_shape, dtype=torch.int8)
    if not is_symmetric:
        tensors["weight_zero_point"] = zeros = torch.randint(-128, 128, scale_shape, dtype=torch.int8)
    weight = read(ByteIntegers(strategy, 6 if strategy == "group" else None, is_symmetric, None), tensors)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(6, 1) if strategy == "group" else values

    expected = (codes.float() - spread(zeros.float())) * spread(tensors["weight_scale"])
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("shape", [(), (1,), (150, 1), (150,)])
def test_fp8_of_one_scale_or_one_a_row(shape: tuple[int, ...]) -> None:
    codes, scale = torch.randn(150, 20).to(torch.float8_e4m3fn), torch.rand(shape)
    strategy: Any = "channel" if shape[:1] == (150,) else "tensor"
    weight = read(Fp8Format(strategy, None), {"weight": codes, "weight_scale": scale})
    expected = codes.float() * (scale.reshape(-1, 1) if strategy == "channel" else scale)
    assert torch.equal(weight.dequantize(), expected)
    order = torch.randperm(150)[:7]
    assert torch.equal(weight.rows(order).dequantize(), expected[order])


@pytest.mark.parametrize("extra", [False, True])
def test_fp8_blocks_with_partial_edges(extra: bool) -> None:
    rows, columns = 300, 200
    codes, scales = torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(3, 2)
    stored = scales.reshape(3, 1, 2, 1) if extra else scales
    weight = read(Fp8Format("block", None), {"weight": codes, "weight_scale": stored})
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    expected = codes.float() * spread
    assert torch.equal(weight.dequantize(), expected)
    order = torch.tensor([299, 0, 127, 128])
    assert torch.equal(weight.rows(order).dequantize(), expected[order])


def fp4(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes and the values of their nibbles, the low one first."""
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    values = torch.empty(rows, columns)
    values[:, ::2], values[:, 1::2] = E2M1[(packed % 16).long()], E2M1[(packed // 16).long()]
    return packed, values


def test_nvfp4_of_both_writers() -> None:
    packed, values = fp4(24, 64)
    blocks, factor = torch.rand(24, 4).to(torch.float8_e4m3fn), torch.tensor(0.25)
    expected = values * blocks.float().repeat_interleave(16, 1) * factor
    tensors = {"weight": packed, "weight_scale": blocks, "weight_scale_2": factor}
    assert torch.equal(read(model_opt_format(None), tensors).dequantize(), expected)
    tensors = {"weight_packed": packed, "weight_scale": blocks, "weight_global_scale": (1 / factor).reshape(1)}
    assert torch.equal(read(compressed_format(None), tensors).dequantize(), expected)


def test_scale_before_the_product() -> None:
    """NVFP4_AWQ."""
    packed, values = fp4(24, 32)
    blocks, scale = torch.rand(24, 2).to(torch.float8_e4m3fn), torch.rand(32).half()
    tensors = {"weight": packed, "weight_scale": blocks, "weight_scale_2": torch.tensor(0.5), "pre_quant_scale": scale}
    weight = read(model_opt_format(None, has_pre_scale=True), tensors)
    x, bias = torch.randn(2, 3, 32), torch.randn(24)
    dense = values * blocks.float().repeat_interleave(16, 1) * 0.5
    torch.testing.assert_close(scaled_linear(x, weight, bias), (x * scale) @ dense.T + bias)


def test_mx_formats() -> None:
    packed, values = fp4(24, 64)
    exponents = torch.randint(100, 140, (24, 2), dtype=torch.uint8)
    exponents[0, 0], exponents[1, 0] = 0, 254
    scales = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    weight = read(MxFormat(True), {"weight_packed": packed, "weight_scale": exponents})
    assert torch.equal(weight.dequantize().double(), (values * scales).float().double())
    codes = torch.randn(24, 64).to(torch.float8_e4m3fn)
    weight = read(MxFormat(False), {"weight": codes, "weight_scale": exponents})
    assert torch.equal(weight.dequantize().double(), (codes.double() * scales).float().double())


def test_parts_with_scales_of_their_own_stay_side_by_side() -> None:
    codes = [torch.randn(rows, 16).to(torch.float8_e4m3fn) for rows in (8, 4, 4)]
    scales = [torch.tensor(value) for value in (0.5, 2.0, 3.0)]
    format_ = Fp8Format("tensor", None)
    parts = [read(format_, {"weight": w, "weight_scale": s}) for w, s in zip(codes, scales, strict=True)]
    method = concat(parts)
    dense = torch.cat([w.float() * s for w, s in zip(codes, scales, strict=True)])
    x, bias = torch.randn(3, 16), torch.randn(16)
    torch.testing.assert_close(method.apply(x, bias), x @ dense.T + bias)
    assert (method.in_features, method.out_features) == (16, 16)
    assert method.nbytes == 16 * 16 + 3 * 4


def test_large_weights_are_multiplied_in_tiles() -> None:
    rows, columns = 700, 4096
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scale = torch.rand(rows, 1) / 100
    weight = read(ByteIntegers("channel", None, True, None), {"weight": codes, "weight_scale": scale})
    x = torch.randn(2, columns)
    torch.testing.assert_close(scaled_linear(x, weight), x @ (codes * scale).T, atol=1e-2, rtol=1e-4)


# Activations


def test_e2m1_ties_go_to_even_codes() -> None:
    halves = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.0]
    )
    right = torch.tensor([0, 1.0, 1, 2, 2, 4, 4, 6, 0, -1, -1, -2, -2, -4, -4, 0])
    rounding = InputRounding("e2m1", "static", scale=torch.tensor(1.0))
    assert torch.equal(round_inputs(halves.unsqueeze(0), rounding), right.unsqueeze(0))
    assert torch.equal(round_inputs(torch.zeros(1, 16), rounding), torch.zeros(1, 16))


def test_int8() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0]])
    assert round_inputs(x, InputRounding("int8", "token")).tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    fixed = InputRounding("int8", "static", scale=torch.tensor(0.5), zero=torch.tensor(10))
    assert round_inputs(torch.tensor([[100.0, -100.0, 1.0]]), fixed).tolist() == [[58.5, -69.0, 1.0]]
    shifted = round_inputs(torch.tensor([[0.0, 255.0, 7.4]]), InputRounding("int8", "token", is_symmetric=False))
    assert shifted.tolist() == [[0.0, 255.0, 7.0]]


def test_fp8() -> None:
    x = torch.randn(3, 200) * 50
    grouped = round_inputs(x, InputRounding("e4m3", "group", 128))
    for columns in (slice(0, 128), slice(128, 200)):
        assert torch.equal(grouped[:, columns], round_inputs(x[:, columns], InputRounding("e4m3", "token")))
    scale = x.abs().max() / 448
    expected = (x / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(round_inputs(x, InputRounding("e4m3", "tensor")), expected)
    fixed = InputRounding("e4m3", "static", scale=torch.tensor(0.5))
    assert round_inputs(torch.tensor([[1e6, -1e6]]), fixed).tolist() == [[224.0, -224.0]]


# Declarations

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS}


def compressed(group: Mapping[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    groups = {"group_0": GROUP if group is None else group}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **keys}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quant_method": "awq", "bits": 8}, r"bits 8 is not supported \(supported: 4\)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point false is not supported"),
        ({"quant_method": "gptq", "bits": 5}, r"bits 5 is not supported \(supported: 2, 3, 4, 8\)"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "group_size must be an integer, got 'all'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "is not a regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"bits": 9}}}, "bits 9 is not supported"),
        ({"quant_method": "fp8", "activation_scheme": "magic"}, "activation_scheme 'magic' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive sizes"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "'static' with weight_block_size is not supported",
        ),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers must be a list of names"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "quant_algo 'INT4_AWQ' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32 is not supported"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not supported"),
        (compressed(transform_config={"config_groups": {}}), "transform_config is not supported"),
        (compressed(format="marlin-24"), "format 'marlin-24' is not supported"),
        (compressed(config_groups={}), "config_groups is missing or empty"),
        (compressed(quantization_status="frozen"), "quantization_status 'frozen' is not supported"),
        (compressed({**GROUP, "targets": ["Embedding"]}), "group_0: target 'Embedding' is not supported"),
        (compressed({**GROUP, "targets": ["re:("]}), "is not a regular expression"),
        (compressed({**GROUP, "output_activations": {"num_bits": 8}}), "output_activations are not supported"),
        (compressed({**GROUP, "weights": {**WEIGHTS, "strategy": "tensor"}}), "strategy 'tensor' is not supported"),
        (compressed({**GROUP, "weights": {**WEIGHTS, "num_bits": 16}}), "num_bits 16 is not supported"),
        (compressed({**GROUP, "input_activations": {"num_bits": 4}}), "input_activations: num_bits 4 is not supported"),
        (compressed(format="float-quantized"), "type 'int' does not fit format float-quantized"),
        (compressed(format="nvfp4-pack-quantized"), "weights: type 'int' is not supported"),
        (compressed(format="mixed-precision"), "format None is not supported"),
    ],
)
def test_declarations_that_have_no_loader(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        SCHEMES[keys["quant_method"]](Declaration("config.json", keys))
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_groups_that_do_not_divide_the_inputs() -> None:
    tensors = {"qweight": torch.zeros(8, 4, dtype=torch.int32)}
    with pytest.raises(ModelLoadError, match="layer: group size 24 does not divide 64 inputs"):
        read(GptqFormat(4, 24, False, 1), tensors)


def test_groups_are_tried_in_order_and_the_ignore_list_first() -> None:
    eight = {"targets": [r"re:.*\.mlp\.down_proj$"], "weights": {**WEIGHTS, "num_bits": 8}}
    exact = {"targets": ["model.layers.3.self_attn.q_proj"], "weights": {**WEIGHTS, "num_bits": 2}}
    keys = compressed(config_groups={"b": eight, "a": exact, "c": GROUP}, ignore=["lm_head", r"re:layers\.0\."])
    scheme = CompressedTensorsScheme(Declaration("config.json", keys))

    def bits(layer: str) -> int | None:
        found = scheme.format_of(layer)
        return found.bits if isinstance(found, PackedIntegers) else None

    assert bits("model.layers.1.mlp.down_proj") == 8
    assert bits("model.layers.1.mlp.up_proj") == 4
    assert bits("model.layers.3.self_attn.q_proj") == 2
    assert bits("model.language_model.layers.3.self_attn.q_proj") == 2
    assert bits("model.layers.0.mlp.down_proj") is None
    assert bits("lm_head") is None
    assert bits("model.embed_tokens") is None


def test_exceptions_of_the_other_schemes() -> None:
    def scheme(**keys: Any) -> Any:
        return SCHEMES[keys["quant_method"]](Declaration("config.json", keys))

    gptq = scheme(quant_method="gptq", bits=4, dynamic={r"-:.*\.0\.": {}, r"+:.*down": {"bits": 8, "group_size": 64}})
    assert gptq.format_of("model.layers.0.mlp.down_proj") is None
    assert gptq.format_of("model.layers.1.mlp.down_proj") == GptqFormat(8, 64, False, 1)
    assert gptq.format_of("model.layers.1.mlp.up_proj") == GptqFormat(4, 128, False, 1)
    assert gptq.format_of("lm_head") is None
    assert scheme(quant_method="gptq", bits=4, lm_head=True).format_of("lm_head") == GptqFormat(4, 128, False, 1)

    fp8 = scheme(quant_method="fp8", ignored_layers=["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"])
    assert fp8.format_of("model.layers.0.self_attn.q_proj") is None
    assert fp8.format_of("model.layers.0.self_attn.q_proj_b") is not None
    assert fp8.format_of("model.layers.1.mlp.gate_up_proj") is not None, "a part of it is quantised"
    both = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    assert scheme(quant_method="fp8", ignored_layers=both).format_of("model.layers.1.mlp.gate_up_proj") is None

    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    layers["model.layers.0.mlp.down_proj"] = {"quant_algo": "FP8"}
    mixed = scheme(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert mixed.format_of("model.language_model.layers.0.mlp.up_proj").name == "nvfp4"
    assert mixed.format_of("model.layers.0.mlp.down_proj").name == "fp8"
    assert mixed.format_of("model.layers.1.mlp.down_proj") is None
    globs = scheme(quant_method="modelopt", quantization={"quant_algo": "FP8", "exclude_modules": ["*.mlp.gate"]})
    assert globs.format_of("model.layers.0.mlp.gate") is None
    assert globs.format_of("model.layers.0.mlp.gate_proj") is not None
