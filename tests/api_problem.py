"""Arguments of the documented wrappers and classes, made from the operators' cases."""

import cases
import torch

import cudnn_grouped

WRAPPERS = {
    "dsrelu": cudnn_grouped.grouped_gemm_dsrelu_wrapper_sm100,
    "dglu": cudnn_grouped.grouped_gemm_dglu_wrapper_sm100,
}
CLASSES = {"dsrelu": cudnn_grouped.GroupedGemmDsreluSm100, "dglu": cudnn_grouped.GroupedGemmDgluSm100}
RESULT_NAMES = tuple(f"{name}_tensor" for name in cases.OUTPUTS)
BARE = ("padded_offsets", "b_ptrs", "sfb_ptrs")
TENSORS = ("a", "b", "c", "sfa", "sfb", "padded_offsets", "alpha", "beta", "prob", "norm_const", "b_ptrs", "sfb_ptrs")

# A case of each operand contract and weight mode, by a short name.
SMALL = {"n": 96, "k": 64, "offsets": (256, 256, 768), "m": 1024}
CASES = {
    "dsrelu_mxfp8": cases.Case(**SMALL, d="e4m3"),
    "dsrelu_fp4": cases.Case(**SMALL, ab="fp4", sf="e4m3", vec=16),
    "dglu_bf16": cases.Case(**SMALL, op="dglu", ab="bf16", vec=16),
    "dglu_mxfp8": cases.Case(**SMALL, op="dglu", d="e4m3"),
    "dglu_fp4": cases.Case(**SMALL, op="dglu", ab="uint8", sf="e8m0", vec=16),
}


class Arguments(dict):
    """Wrapper arguments; the built case and the tensors behind its pointers stay alive with it."""

    def __init__(self, values, built):
        super().__init__(values)
        self.built = built
        self.case = built.case

    def __or__(self, other):
        return Arguments({**self, **other}, self.built)

    def without(self, *names):
        return Arguments({name: value for name, value in self.items() if name not in names}, self.built)


def wrapper_arguments(case):
    built = cases.build(case)
    names = ["a", "b", "c", "padded_offsets", "alpha", *(["beta"] if case.op == "dglu" else []), "prob"]
    given = {**dict(zip(names, built.positional, strict=True)), **built.keywords}
    for name in ("b", "sfb"):
        if case.weights.startswith("dense") and name in given:
            (given[name],) = given[name]
        elif not given.get(name):
            given.pop(name, None)
    values = {f"{n}_tensor" if n in TENSORS and n not in BARE else n: value for n, value in given.items()}
    if case.op == "dglu":
        values = {"sfa_tensor": None, "dprob_tensor": None, **values}
    return Arguments(values | {"d_dtype": cases.DTYPES[case.d], "generate_dbias": case.dbias}, built)


def call_wrapper(arguments):
    return WRAPPERS[arguments.case.op](**arguments)


def buffers(case):
    """Caller-owned outputs for the class, ready to be accumulated onto; keys without suffix."""
    made = {}
    for name, tensor in cases.output_buffers(case, cases.Guarded()).items():
        fill = {"amax": -torch.inf, "dprob": 0, "dbias": 0}.get(name)
        made[name] = tensor if fill is None else tensor.fill_(fill)
    return made


def class_arguments(arguments, outputs):
    """(constructor arguments, execute arguments) for the wrapper arguments and output buffers."""
    case = arguments.case
    options = {k: v for k, v in arguments.items() if k.removesuffix("_tensor") not in TENSORS}
    for name in ("d_dtype", "generate_dbias", "dprob_tensor"):
        options.pop(name, None)
    tensors = {k: v for k, v in arguments.items() if k.removesuffix("_tensor") in TENSORS}
    execute = tensors | {f"{name}_tensor": value for name, value in outputs.items()}
    execute.setdefault("d_col_tensor", None)
    samples = {f"sample_{k.removesuffix('_tensor')}": v for k, v in execute.items() if k not in ("b_ptrs", "sfb_ptrs")}
    if "n" in options:
        packed = 2 if case.ab in cases.FP4 else 1
        shape = (options.pop("n"), arguments["a_tensor"].shape[1] * packed)
        options |= {"num_experts": case.experts, "b_shape": shape}
    return samples | options, Arguments(execute, arguments.built)


def same_bits(x, y):
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(raw(x), raw(y))


def raw(tensor):
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)
