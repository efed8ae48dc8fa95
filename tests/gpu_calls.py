"""Calls of every operator with all their tensors on the device: for tests of how the operators run."""

from dataclasses import dataclass, replace

import cases
import cases_forward as forward
import numpy as np
import torch
from cases import DTYPES, Case
from cases_forward import DactCase, WgradCase
from gpu_device import DEVICE, Moved
from torch.utils._pytree import tree_leaves

# An expert without rows, rows without an expert; the other offsets change both.
M, OFFSETS, OTHER_OFFSETS = 1024, (256, 256, 768), (512, 768, 768)
SMALL = {"m": M, "n": 192, "k": 96}
CASES = {
    "dsrelu": Case("dsrelu", **SMALL, d="e4m3", dbias=True, weights="ptrs_k"),
    "dsrelu_nvfp4": Case("dsrelu", **SMALL, ab="fp4", sf="e4m3", vec=16, dbias=True, weights="list_k"),
    "dsrelu_clamped": Case("dsrelu", **SMALL, ab="bf16", vec=16, options={"tanh_clamp_scale": 2.0}),
    "dglu": Case("dglu", **SMALL, d="e4m3", dbias=True, weights="list_k", discrete_col_sfd=True),
    "dglu_geglu": Case(
        "dglu", **SMALL, ab="bf16", vec=16, dbias=True, weights="ptrs_k", options={"act_func": "dgeglu"}
    ),
    "dglu_situ": Case("dglu", **SMALL, ab="fp4", dbias=True, options={"act_func": "dsituglu"}),
    "srelu": forward.Case("srelu", **SMALL, d="e4m3", weights="ptrs_k", bias="f32"),
    "glu": forward.Case("glu", **SMALL, d="e4m3", weights="list_n", bias="bf16"),
    "glu_bf16": forward.Case("glu", **SMALL, ab="bf16", vec=16, weights="ptrs_n", bias="f32"),
    "mm": forward.Case("mm", **SMALL, ab="bf16", vec=16),
    "dglu_dequantized": Case("dglu", **SMALL, d="e4m3", dbias=True, weights="list_k", dequantized=True),
    "glu_dequantized": forward.Case("glu", **SMALL, ab="fp4", weights="ptrs_k", dequantized=True, bias="f32"),
    "mm_dequantized": forward.Case("mm", **SMALL, d="e4m3", dequantized=True),
    "mm_nvfp4": forward.Case("mm", **SMALL, ab="fp4", sf="e4m3", vec=16, weights="ptrs_k", d="f32"),
    "wgrad": WgradCase(tokens=M, ab="e4m3", m=48, n=80),
    "wgrad_bf16": WgradCase(tokens=M, vec=16, m=48, n=80, a_major="rows", b_major="rows", d="f32"),
    "dact": DactCase(m=M, n=96),
}
OUT = [name for name in CASES if name != "dact"]  # have a form that writes into the caller's buffers


@dataclass
class Call:
    """An operator and its arguments on the device. outputs: the caller's buffers, none of the functional form."""

    operator: str
    arguments: dict
    outputs: dict
    guarded: cases.Guarded
    alive: list

    def __call__(self) -> list:
        """The outputs."""
        function = cases.operator(self.operator)
        if self.operator == "reduce_dbias":
            slots, offsets = self.arguments["slots"], self.arguments["padded_offsets"]
            dbias = slots.new_zeros(len(offsets), *slots.shape[1:])
            function(**self.arguments, dbias=dbias)
            return [dbias]
        result = function(**self.arguments, **self.outputs)
        return tree_leaves(self.outputs if self.outputs else result)

    def inputs(self) -> list:
        return [x for x in tree_leaves(self.arguments) if isinstance(x, torch.Tensor)]

    def fill(self, other: "Call") -> None:
        """The inputs of another call into this one's memory."""
        for mine, given in zip(self.inputs(), other.inputs(), strict=True):
            integers(mine).copy_(integers(given))


def integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.int32, torch.int64) else cases.raw(tensor)


def bits(outputs: list) -> list:
    return [integers(tensor).clone() for tensor in outputs]


def same(outputs: list, want: list) -> bool:
    """The same bits."""
    return all(torch.equal(a, b) for a, b in zip(bits(outputs), bits(want), strict=True))


def make(name: str, offsets=OFFSETS, seed: int = 0, out: bool = False, device=DEVICE) -> Call:
    """The call of a name in CASES or OTHERS."""
    if name in CASES:
        return make_case(replace(CASES[name], offsets=offsets, seed=seed), out, device)
    operator, arguments = OTHERS[name](offsets, np.random.default_rng(seed))
    return Call(operator, Moved(device).tree(arguments), {}, cases.Guarded(device), [])


def make_case(case, out: bool = False, device=DEVICE) -> Call:
    operator, arguments, results, pointed = described(case)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    moved, guarded = Moved(device, pointed), cases.Guarded(device)
    arguments, alive = moved.tree(arguments), [moved, pointed]
    if out:
        return Call(f"{operator}_out", arguments, buffers(case, guarded), guarded, alive)
    return Call(operator, {**arguments, **results}, {}, guarded, alive)


def described(case):
    """(operator, arguments on the CPU, what the functional form asks for besides, tensors behind pointers)."""
    if isinstance(case, WgradCase):
        return "wgrad", forward.build_wgrad(case).arguments, {"d_dtype": DTYPES[case.d]}, []
    if isinstance(case, DactCase):
        results = {"d_dtype": DTYPES[case.d], "generate_dbias": case.dbias}
        return "dact", forward.build_dact(case).arguments, results, []
    results = {"d_dtype": DTYPES[case.d]}
    if isinstance(case, forward.Case):
        built = forward.build(case)
        results |= {"c_dtype": DTYPES[case.c], "generate_c": case.generate_c}
        return case.op, built.arguments, results, built.alive
    built = cases.build(case)
    names = ["a", "b", "c", "padded_offsets", "alpha", *(["beta"] if case.op == "dglu" else []), "prob"]
    arguments = {**dict(zip(names, built.positional, strict=True)), **built.keywords}
    return case.op, arguments, {**results, "generate_dbias": case.dbias}, built.alive


def buffers(case, guarded: cases.Guarded) -> dict:
    """Poisoned, what is accumulated onto zero."""
    if isinstance(case, WgradCase):
        return {"out": forward.wgrad_buffers(case, guarded)}
    outputs = (forward if isinstance(case, forward.Case) else cases).output_buffers(case, guarded)
    for name in ("dprob", "dbias", "amax"):
        if name in outputs:
            outputs[name].zero_()
    return outputs


def matrix(rng, *shape) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def quantize(dtype: str, sf: str, vec: int, axis: str, per_expert: bool = False):
    def call(offsets, rng):
        arguments = {"x": matrix(rng, M, 160), "dtype": DTYPES[dtype], "sf_dtype": DTYPES[sf], "sf_vec_size": vec}
        arguments |= {"axis": axis, "norm_const": torch.tensor([3.0])}
        if per_expert:
            arguments["padded_offsets"] = torch.tensor(offsets, dtype=torch.int32)
        return "quantize", arguments

    return call


def dequantize(offsets, rng):
    data, scales = cases.operator("quantize")(matrix(rng, M, 160), DTYPES["e4m3"], DTYPES["e8m0"], 32)
    return "dequantize", {"data": data, "scales": scales, "sf_vec_size": 32}


def reduce_dbias(offsets, rng):
    slots = matrix(rng, M // 128, 160, 1).to(torch.bfloat16)
    return "reduce_dbias", {"slots": slots, "padded_offsets": torch.tensor(offsets, dtype=torch.int32)}


OTHERS = {
    "quantize_rows": quantize("e4m3", "e8m0", 32, "row"),
    "quantize_columns": quantize("e5m2", "e8m0", 32, "col", per_expert=True),
    "quantize_nvfp4": quantize("fp4", "e4m3", 16, "row"),
    "quantize_nvfp4_columns": quantize("fp4", "e4m3", 16, "col"),
    "dequantize": dequantize,
    "reduce_dbias": reduce_dbias,
}
NAMES = [*CASES, *OTHERS]
