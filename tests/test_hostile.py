"""Calls that once crashed, hung, leaked, or were silently wrong."""

import os
from pathlib import Path

import pytest
import torch

import cudnn_grouped as cg
import cudnn_grouped.nn

OPS = torch.ops.cudnn_grouped
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def operands(n=64):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(512, 64, generator=generator).bfloat16()
    b = torch.randn(2, n, 64, generator=generator).bfloat16().permute(1, 2, 0)
    return a, b, torch.tensor([256, 512], dtype=torch.int32)


def test_writes_are_seen_by_autograd():
    a, b, offsets = operands()
    out, other = (
        torch.ones(512, 64, dtype=torch.bfloat16),
        torch.ones(512, 64, dtype=torch.bfloat16, requires_grad=True),
    )
    product = (other * out).sum()
    version = out._version
    OPS.mm_out(a, [b], offsets, d=out)
    assert out._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_leaf_is_not_written_into():
    a, b, offsets = operands()
    leaf = torch.zeros(512, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="d: expected a tensor that needs no gradient"):
        OPS.mm_out(a, [b], offsets, d=leaf)
    assert not leaf.any()
    with torch.no_grad():
        OPS.mm_out(a, [b], offsets, d=leaf)
    assert leaf.any()


@pytest.mark.parametrize("last", [0, 2])
def test_reduce_dbias_looks_at_every_dimension(last):
    slots, offsets = torch.ones(2, 8, last, dtype=torch.bfloat16), torch.tensor([256], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="slots: expected shape"):
        OPS.reduce_dbias(slots, offsets, torch.zeros(1, 8, 1, dtype=torch.bfloat16))


def test_meta_among_real():
    a, b, offsets = operands()
    meta = torch.ones(512, device="meta")
    with pytest.raises(RuntimeError, match="prob: expected a tensor on cpu"):
        OPS.mm_out(a, [b], offsets, None, meta, d=torch.zeros(512, 64, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="norm_const: expected a tensor on cpu"):
        OPS.quantize(a, E4M3, E8M0, 32, norm_const=meta[:1])


def test_freed_memory():
    a, b, offsets = operands()
    a.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="a: expected a tensor with memory"):
        OPS.mm(a, [b], offsets)


@pytest.mark.parametrize("shape", [(1,) * 64, (1,) * 6 + (0,)])
def test_norm_const_of_any_rank(shape):
    with pytest.raises(RuntimeError, match="norm_const: expected shape"):
        OPS.quantize(torch.ones(32, 32), E4M3, E8M0, 32, norm_const=torch.ones(shape))


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_norm_const_is_a_positive_number(value):
    with pytest.raises(ValueError, match="norm_const: expected a finite number above 0"):
        cg.quantize(torch.ones(32, 32), norm_const=torch.tensor([value]))


@pytest.mark.parametrize(
    "options",
    [
        {"act_func": "situglu", "situ_beta2": 1e300},
        {"act_func": "situglu", "situ_beta1": 1e-50},
        {"act_func": "geglu", "geglu_alpha": 1e300},
        {"act_func": "geglu", "linear_offset": 1e300},
    ],
    ids=str,
)
def test_options_are_float32_numbers(options):
    a, b, offsets = operands()
    with pytest.raises(RuntimeError, match=f"{list(options)[1]}: expected a finite number"):
        OPS.glu(a, [b], offsets, **options)


@pytest.mark.parametrize("operator", ["srelu", "glu"])
def test_gradient_through_c_alone(operator):
    a, b, offsets = operands()
    a.requires_grad_()
    getattr(OPS, operator)(a, [b], offsets)[0].sum().backward()  # the gradient of a sum is one element, expanded
    expected = torch.cat([b[..., g].float().sum(0).expand(256, 64) for g in range(2)])
    assert torch.equal(a.grad, expected.bfloat16())


def test_gradients_that_do_not_exist_are_refused():
    a, b, offsets = operands()
    with pytest.raises(RuntimeError, match="alpha: expected a tensor that needs no gradient"):
        OPS.mm(a.requires_grad_(), [b], offsets, torch.ones(2, requires_grad=True))
    a, b, offsets = operands(n=12)
    with pytest.raises(RuntimeError, match="b: expected N a multiple of 8 for gradients"):
        OPS.mm(a.requires_grad_(), [b], offsets, d_dtype=torch.float32)


def test_flushed_subnormals_do_not_matter():
    a, b, offsets = operands()
    alpha = torch.full((2,), 1e-38)
    expected = OPS.mm(a, [b], offsets, alpha, d_dtype=torch.float32)[1]
    assert (expected.abs() < 2.0**-126).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        result = OPS.mm(a, [b], offsets, alpha, d_dtype=torch.float32)[1]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(result.view(torch.int32), expected.view(torch.int32))


def test_nothing_to_quantize_takes_no_time():
    data, scales = cg.quantize(torch.empty(2**40, 0), axis="col")
    assert data.numel() == scales.numel() == 0


def test_offsets_of_no_expert():
    with pytest.raises(ValueError, match="padded_offsets: expected 1 to 1024 experts"):
        cg.quantize(torch.ones(256, 32), axis="col", padded_offsets=torch.zeros(0, dtype=torch.int32))


@pytest.mark.parametrize("counts", [[2**31], [2**31 - 1, 1], [1.5], [True], [[1]]])
def test_counts_that_are_none(counts):
    with pytest.raises(ValueError, match="token_counts: expected"):
        cg.padded_offsets_from_counts(counts)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_a_bad_token_spoils_itself_alone(recipe, value):
    torch.manual_seed(0)
    mlp = cg.nn.GroupedMLP(2, 64, 64, recipe=recipe)
    offsets, prob, x = torch.tensor([256, 512], dtype=torch.int32), torch.ones(512), torch.randn(512, 64)
    assert mlp(x, offsets, prob).isfinite().all()
    x[3] = value
    result = mlp(x, offsets, prob)
    assert result[torch.arange(512) != 3].isfinite().all()
    assert not torch.equal(result[3], result[4])


def test_a_saved_c_takes_no_bias():
    a, b, offsets = operands()
    arguments = (a, [b], a.clone(), offsets, torch.ones(2), torch.ones(512))
    bias = torch.ones(2, 64)
    with pytest.raises(RuntimeError, match="bias: expected None with c_role"):
        OPS.dsrelu(*arguments, bias=bias, c_role="preactivation")
    assert not torch.equal(OPS.dsrelu(*arguments, bias=bias)[0], OPS.dsrelu(*arguments)[0])


def test_calls_keep_no_memory():
    """A string argument once kept its copy: 50,000 calls of two strings then kept 5 MB."""
    a, b, _ = operands()
    c, ones, none = torch.zeros(0, 64, dtype=torch.bfloat16), torch.ones(2), torch.zeros(2, dtype=torch.int32)

    def resident_after(calls):
        for _ in range(calls):
            OPS.dsrelu(a[:0], [b], c, none, ones, torch.ones(0))
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_after(1000)
    assert resident_after(50000) - before < 1 << 20
