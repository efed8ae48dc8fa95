"""The fused backward of a mixture-of-experts layer on real text, checked against FP64 autograd.

A byte of text is a token: it is embedded with the two bytes before it, a small seeded router sends it to two of eight
experts, and each expert is a two-matrix MLP that predicts the next byte. The gradient of that prediction at the
layer's output, the second matrix and the saved pre-activation are the operands of the fused backward, in BF16, MXFP8
and NVFP4. Its D and dprob are compared with what autograd gives in FP64 for the same (dequantised) operands.
"""

import inspect
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from . import eager
from .api import grouped_gemm_dglu_wrapper_sm100, grouped_gemm_dsrelu_wrapper_sm100
from .eager import ACTIVATIONS, FORMATS, deinterleave
from .quantize import dequantize, quantize
from .scales import padded_offsets_from_counts, unpack_scales

TOKENS, EXPERTS, TOP = 1024, 8, 2
HIDDEN, WIDTH = 512, 512
ROUNDS = 5
U = 2.0**-24  # unit roundoff of FP32


class Layer(NamedTuple):
    """Rows sorted by expert and padded: upstream gradient, saved pre-activation, gate probability, second matrices."""

    dy: torch.Tensor  # (M, K)
    c: torch.Tensor  # (M, N or 2N)
    prob: torch.Tensor  # (M,)
    weights: torch.Tensor  # (L, N, K)
    padded_offsets: torch.Tensor


class Operands(NamedTuple):
    """What the fused call gets, and the values it stands for."""

    arguments: dict
    a: torch.Tensor  # (M, K) float64
    b: torch.Tensor  # (L, N, K) float64


def read_text():
    """Bytes of this repository's README, or of a module of the Python installation; where they come from."""
    readme = Path(__file__).resolve().parents[1] / "README.md"
    path = readme if readme.is_file() else Path(inspect.getsourcefile(inspect))
    text = path.read_bytes()
    if len(text) < TOKENS + 1:
        text = text * (TOKENS // max(len(text), 1) + 2)
    return text[: TOKENS + 1], path.name


def route(tokens, generator):
    """Embeddings (T, K), each token's experts (T, TOP) and their probabilities (T, TOP)."""
    embedding = torch.randn(256, HIDDEN, generator=generator)
    x = embedding[tokens] + 0.5 * embedding[tokens.roll(1)] + 0.25 * embedding[tokens.roll(2)]
    router = torch.randn(HIDDEN, EXPERTS, generator=generator) / HIDDEN**0.5
    prob, experts = (x @ router).softmax(dim=1).topk(TOP, dim=1)
    return x, experts, prob / prob.sum(dim=1, keepdim=True)


def make_layer(text, activation, generator):
    """Run the layer forward in FP32, take the next-byte loss, and keep what its backward needs."""
    tokens, targets = torch.tensor(list(text[:-1])), torch.tensor(list(text[1:]))
    x, experts, prob = route(tokens, generator)
    columns = WIDTH * (2 if activation.gated else 1)
    first = torch.randn(EXPERTS, HIDDEN, columns, generator=generator) * (2.0 / HIDDEN**0.5)
    second = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator) / WIDTH**0.5
    head = torch.randn(HIDDEN, 256, generator=generator) / HIDDEN**0.5

    counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
    offsets = padded_offsets_from_counts(counts)
    starts = offsets - (counts + 255) // 256 * 256
    order = experts.flatten().argsort(stable=True)
    expert = experts.flatten()[order]
    place = starts[expert] + torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert]
    token = order // TOP
    rows = int(offsets[-1])

    gates = torch.zeros(rows).index_copy(0, place, prob.flatten()[order])
    inputs = torch.zeros(rows, HIDDEN).index_copy(0, place, x[token])
    c = torch.cat([inputs[s:e] @ first[g] for g, s, e in eager.ranges(offsets)])
    hidden = activation.forward(*deinterleave(c)) if activation.gated else activation.forward(c)
    outputs = torch.cat([hidden[s:e] @ second[g] for g, s, e in eager.ranges(offsets)]) * gates[:, None]
    y = torch.zeros(len(tokens), HIDDEN).index_add(0, token, outputs[place]).requires_grad_()
    loss = torch.nn.functional.cross_entropy(y @ head, targets, reduction="sum")
    (dy,) = torch.autograd.grad(loss, y)
    return Layer(torch.zeros(rows, HIDDEN).index_copy(0, place, dy[token]), c, gates, second, offsets)


def make_operands(layer, format, activation):
    """Quantise the gradient and the weights; alpha undoes the FP4 tensor scales (the gated operators square it)."""
    arguments = {
        "c_tensor": layer.c.to(torch.bfloat16)[..., None],
        "padded_offsets": layer.padded_offsets,
        "prob_tensor": layer.prob.view(-1, 1, 1),
    }
    scale = 1.0
    if format.block is None:
        a, b = layer.dy.to(torch.bfloat16), layer.weights.to(torch.bfloat16)
        arguments |= {"a_tensor": a[..., None], "b_tensor": b.permute(1, 2, 0)}
        a, b = a.double(), b.double()
    else:
        norms = [torch.ones(1), torch.ones(1)]
        if format.tensor_scale:
            norms = [(448.0 * 6.0 / x.abs().max()).view(1) for x in (layer.dy, layer.weights)]
            scale = 1.0 / float(norms[0] * norms[1])
        a, sfa = quantize(layer.dy[..., None], format.block, norm_const=norms[0])
        b, sfb = quantize(layer.weights.permute(1, 2, 0), format.block, norm_const=norms[1])
        arguments |= {"a_tensor": a, "sfa_tensor": sfa, "b_tensor": b, "sfb_tensor": sfb}
        arguments["sf_vec_size"] = format.sf_vec_size
        # Without norm_const, as the GEMM reads them; alpha then divides.
        a = dequantize(a, sfa, format.block)[..., 0].double()
        b = dequantize(b, sfb, format.block).double().permute(2, 0, 1)
    if format.d_dtype == torch.float8_e4m3fn:
        arguments["norm_const_tensor"] = torch.ones(1)
    alpha = scale**0.5 if activation.gated else scale
    arguments |= {"alpha_tensor": torch.full((EXPERTS,), alpha), "d_dtype": format.d_dtype}
    if activation.gated:
        arguments |= {"beta_tensor": torch.ones(EXPERTS), "act_func": activation.name, "clamp_grad": "mask"}
    else:
        arguments["c_role"] = "preactivation"
    return Operands(arguments, a, b)


def fused(arguments):
    """The documented call."""
    if "act_func" in arguments:
        arguments = {"sfa_tensor": None, "dprob_tensor": None, **arguments}
        return grouped_gemm_dglu_wrapper_sm100(**arguments)
    return grouped_gemm_dsrelu_wrapper_sm100(**arguments)


def autograd(operands, activation, offsets):
    """D and dprob in FP64 by plain autograd of the layer's second half: y = (prob * act(C)) @ B, loss = <y, A>."""
    arguments = operands.arguments
    alpha = arguments["alpha_tensor"][0].double()
    c = arguments["c_tensor"][..., 0].double().requires_grad_()
    prob = arguments["prob_tensor"].double().view(-1, 1).requires_grad_()
    hidden = activation.forward(*deinterleave(c)) if activation.gated else activation.forward(c)
    y = torch.cat([(prob * hidden)[s:e] @ operands.b[g] for g, s, e in eager.ranges(offsets)])
    loss = (y * operands.a).sum() * (alpha * alpha if activation.gated else alpha)
    return torch.autograd.grad(loss, (c, prob))


def bounds(operands, activation, format, offsets, d):
    """Largest errors of D and dprob that the formats allow: c * u * sum|terms| for FP32, plus the rounding of D.

    c counts the roundings on the way: K products and sums of the GEMM, at most 64 in the epilogue, N sums in dprob.
    """
    arguments = operands.arguments
    c = arguments["c_tensor"][..., 0].double()
    alpha = arguments["alpha_tensor"][0].double()
    products = torch.cat([operands.a[s:e].abs() @ operands.b[g].abs().T for g, s, e in eager.ranges(offsets)])
    products *= alpha * alpha if activation.gated else alpha.abs()
    slopes, value = activation.magnitudes(*deinterleave(c)) if activation.gated else activation.magnitudes(c)
    prob = arguments["prob_tensor"].double().view(-1, 1)
    terms = [products * prob.abs() * slope for slope in slopes]
    terms = eager.interleave(*terms) if activation.gated else terms[0]
    k, n = operands.a.shape[1], products.shape[1]
    arithmetic = (k + 64) * U * terms
    dprob = (k + n + 64) * U * (products * value).sum(dim=1, keepdim=True)
    if format.d_dtype != torch.float8_e4m3fn:
        return [arithmetic + (d.abs() + arithmetic) * 2.0**-8], dprob  # half an ulp of bfloat16
    return [arithmetic + rounding for rounding in _e4m3_rounding(d.abs() + arithmetic)], dprob


def _e4m3_rounding(magnitude):
    """Half an ulp of e4m3 data under a scale of at most twice amax/448: 2^-4 of the value, 2^-10 of the scale."""
    rows, columns = magnitude.shape
    by_row = magnitude.view(rows, columns // 32, 32).amax(dim=2).repeat_interleave(32, dim=1)
    by_column = magnitude.view(rows // 32, 32, columns).amax(dim=1).repeat_interleave(32, dim=0)
    return [torch.maximum(magnitude * 2.0**-4, amax * (2 / 448) * 2.0**-10) for amax in (by_row, by_column)]


def values_of(result, format):
    """The values of D, once, or by rows and by columns where it is quantised both ways."""
    d_row, d_col = result["d_row_tensor"][..., 0], result["d_col_tensor"]
    if format.d_dtype != torch.float8_e4m3fn:
        return [d_row.double()]
    rows, columns = d_row.shape
    scales = unpack_scales(result["sfd_row_tensor"], (rows, columns // 32)).double()
    by_row = d_row.double() * scales.repeat_interleave(32, dim=1)
    scales = unpack_scales(result["sfd_col_tensor"], (rows // 32, columns), axis="col").double()
    return [by_row, d_col[..., 0].double() * scales.repeat_interleave(32, dim=0)]


def median_times(*functions):
    """Median seconds of each, interleaved, after one call to warm up."""
    for function in functions:
        function()
    times = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, seconds in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def measure(text, activation, format):
    """One row of the table: errors against FP64 autograd, their share of the bound, and times."""
    layer = make_layer(text, activation, torch.Generator().manual_seed(0))
    operands = make_operands(layer, format, activation)
    d, dprob = autograd(operands, activation, layer.padded_offsets)
    d_bounds, dprob_bound = bounds(operands, activation, format, layer.padded_offsets, d)
    result = fused(operands.arguments)
    d_errors = [(value - d).abs() for value in values_of(result, format)]
    dprob_error = (result["dprob_tensor"].double().view(-1, 1) - dprob).abs()
    shares = [_share(error, bound) for error, bound in zip(d_errors, d_bounds, strict=True)]
    shares.append(_share(dprob_error, dprob_bound))
    seconds = median_times(
        lambda: fused(operands.arguments),
        lambda: eager.backward(operands.arguments, activation, format),
    )
    return {
        "operator": activation.name,
        "operands": format.name,
        "d": str(format.d_dtype).removeprefix("torch."),
        "d_error": max(float(error.norm() / d.norm()) for error in d_errors),
        "dprob_error": float(dprob_error.norm() / dprob.norm()),
        "share_of_bound": max(shares),
        "fused_ms": seconds[0] * 1e3,
        "eager_ms": seconds[1] * 1e3,
    }


def _share(error, bound):
    """The largest error / bound; NaN counts as infinite, and 0 / 0 as 0."""
    share = torch.where(error == 0, 0.0, error / bound)
    return float(share.nan_to_num(nan=torch.inf).max())


def run(as_json=False):
    """Print the table; returns 1 if an error exceeds its bound, otherwise 0."""
    text, source = read_text()
    if not as_json:
        print_head(source)
    rows = []
    for activation in ACTIVATIONS:
        for format in FORMATS:
            rows.append(measure(text, activation, format))
            if not as_json:
                print_row(rows[-1])
    failed = [row for row in rows if row["share_of_bound"] > 1]
    if as_json:
        print(json.dumps({"source": source, "rows": rows}, indent=2))
    elif failed:
        print(f"\n{len(failed)} of {len(rows)} rows exceed the bound")
    else:
        print(f"\nall {len(rows)} rows are within the bound")
    return 1 if failed else 0


def print_head(source):
    print(f"{TOKENS} bytes of {source}, {EXPERTS} experts, top {TOP}, K = {HIDDEN}, N = {WIDTH}")
    print(f"errors: relative to FP64 autograd of the same operands (2-norm), {torch.get_num_threads()} threads")
    print("bound: the largest error of an element as a part of what the formats allow it\n")
    names = ("D error", "dprob error", "bound", "fused", "eager", "speed-up")
    print(f"{'operator':9} {'A, B':6} {'D':14}", *(f"{name:>11}" for name in names))


def print_row(row):
    times = [f"{row[name]:8.1f} ms" for name in ("fused_ms", "eager_ms")]
    numbers = [f"{row['d_error']:11.1e}", f"{row['dprob_error']:11.1e}", f"{row['share_of_bound']:11.2f}", *times]
    speed_up = f"{row['eager_ms'] / row['fused_ms']:10.1f}x"
    print(f"{row['operator']:9} {row['operands']:6} {row['d']:14}", *numbers, speed_up, flush=True)
