"""Malformed calls of quantize, dequantize and reduce_dbias: RuntimeError "<argument>: expected X, got Y"."""

import pytest
import torch
from cases import DTYPES, operator

F32, F64, BF16, I32, U8 = torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8
E4M3, E8M0, FP4 = (DTYPES[n] for n in ("e4m3", "e8m0", "fp4"))


def quantize(**changes):
    given = {"x": torch.randn(64, 96), "dtype": E4M3, "sf_dtype": E8M0, "sf_vec_size": 32, **changes}
    operator("quantize")(*[given.pop(n) for n in ("x", "dtype", "sf_dtype", "sf_vec_size")], **given)


def dequantize(**changes):
    data, scales = operator("quantize")(torch.randn(64, 96), E4M3, E8M0, 32)
    given = {"data": data, "scales": scales, "sf_vec_size": 32, **changes}
    operator("dequantize")(*[given.pop(n) for n in ("data", "scales", "sf_vec_size")], **given)


OFFSETS = torch.tensor([256, 512], dtype=I32)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("x", {"x": torch.randn(64, 96, dtype=F64)}),
        ("x", {"x": torch.randn(64)}),
        ("x", {"x": torch.randn(1, 1, 64, 96)}),
        ("x", {"x": torch.randn(96, 64).T}),
        ("x", {"x": torch.randn(64, 192)[:, :96]}),
        ("x", {"x": torch.randn(64, 96, 3)}),  # the batch is outermost in memory
        ("x", {"x": torch.randn(64, 95), "dtype": FP4}),
        ("dtype", {"dtype": F32}),
        ("dtype", {"dtype": E8M0}),
        ("sf_dtype", {"sf_dtype": E4M3}),
        ("sf_dtype", {"sf_dtype": F32}),
        ("sf_vec_size", {"sf_vec_size": 16}),
        ("sf_vec_size", {"sf_vec_size": 0}),
        ("sf_vec_size", {"dtype": FP4, "sf_dtype": E4M3, "sf_vec_size": 32}),
        ("axis", {"axis": "both"}),
        ("norm_const", {"norm_const": torch.ones(2)}),
        ("norm_const", {"norm_const": torch.ones(1, dtype=F64)}),
        ("norm_const", {"norm_const": torch.tensor([0.0])}),
        ("norm_const", {"norm_const": torch.tensor([-1.0])}),
        ("norm_const", {"norm_const": torch.tensor([float("nan")])}),
        ("padded_offsets", {"padded_offsets": OFFSETS}),
        ("padded_offsets", {"padded_offsets": OFFSETS.long(), "axis": "col", "x": torch.randn(512, 96)}),
        ("padded_offsets", {"padded_offsets": OFFSETS[None], "axis": "col", "x": torch.randn(512, 96)}),
        ("padded_offsets[1]", {"padded_offsets": OFFSETS, "axis": "col", "x": torch.randn(256, 96)}),
        ("padded_offsets[0]", {"padded_offsets": OFFSETS - 32, "axis": "col", "x": torch.randn(512, 96)}),
        ("x", {"padded_offsets": OFFSETS, "axis": "col", "x": torch.randn(500, 96)}),
    ],
)
def test_quantize_errors(argument, changes):
    with pytest.raises(RuntimeError) as error:
        quantize(**changes)
    assert str(error.value).startswith(f"{argument}: expected "), error.value


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("data", {"data": torch.randn(64, 96)}),
        ("data", {"data": torch.zeros(96, 64, dtype=U8).view(E4M3).T}),
        ("scales", {"scales": torch.zeros(512, dtype=U8)}),
        ("scales", {"scales": torch.zeros(511, dtype=U8).view(E8M0)}),
        ("scales", {"scales": torch.zeros(64, 3, dtype=U8).view(E8M0)}),
        ("scales", {"scales": torch.zeros(512, dtype=U8).view(E4M3)}),
        ("sf_vec_size", {"sf_vec_size": 16}),
        ("dtype", {"dtype": F64}),
        ("axis", {"axis": "rows"}),
        ("norm_const", {"norm_const": torch.ones(2)}),
    ],
)
def test_dequantize_errors(argument, changes):
    with pytest.raises(RuntimeError) as error:
        dequantize(**changes)
    assert str(error.value).startswith(f"{argument}: expected "), error.value


@pytest.mark.parametrize(
    ("argument", "slots", "offsets", "dbias"),
    [
        ("slots", (4, 32), [256, 512], (2, 32, 1)),
        ("dbias", (4, 32, 1), [256, 512], (2, 48, 1)),
        ("dbias", (4, 32, 1), [256, 512], (3, 32, 1)),
        ("padded_offsets[1]", (2, 32, 1), [256, 512], (2, 32, 1)),
        ("padded_offsets[0]", (4, 32, 1), [128, 512], (2, 32, 1)),
    ],
)
def test_reduce_dbias_errors(argument, slots, offsets, dbias):
    tensors = (torch.zeros(slots, dtype=BF16), torch.tensor(offsets, dtype=I32), torch.zeros(dbias, dtype=BF16))
    with pytest.raises(RuntimeError) as error:
        operator("reduce_dbias")(*tensors)
    assert str(error.value).startswith(f"{argument}: expected "), error.value
