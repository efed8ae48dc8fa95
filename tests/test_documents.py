"""Every code block of the two API documents runs as written: only the import is changed and the tensors are made."""

import re
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import cases
import pytest
import torch
from api_problem import CASES, buffers, same_bits, wrapper_arguments

import cudnn_grouped

FOLDER = Path(__file__).parent / "documents"
DSRELU_8 = replace(CASES["dsrelu_mxfp8"], d="bf16")
DSRELU_4 = replace(CASES["dsrelu_fp4"], sf="e8m0", vec=32)
GLU_8 = replace(CASES["dglu_mxfp8"], d="bf16")
GLU_4 = replace(CASES["dglu_fp4"], vec=32)


def blocks(document):
    """{heading: code} of a document."""
    text = (FOLDER / f"{document}.md").read_text()
    return dict(re.findall(r"^## (.+?)\n+```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def test_documents_have_ten_blocks():
    assert len(blocks("dsrelu")) == 4 and len(blocks("dglu")) == 6


def tensors(case):
    """The documents' names for the tensors of a case: a, b, ..., b_ptrs, N, and zeroed outputs."""
    case = replace(case, dbias=case.op == "dglu")
    dense, pointers = (wrapper_arguments(replace(case, weights=w)) for w in ("dense_k", "ptrs_k"))
    names = {key.removesuffix("_tensor"): value for key, value in {**pointers, **dense}.items()}
    k = case.k if case.ab == "bf16" else dense["sfa_tensor"].shape[4] * 4 * case.vec
    names |= {"N": case.n, "n": case.n, "n_dim": case.n, "k": min(k, case.k), "num_experts": case.experts}
    names |= {"norm_const": torch.ones(1), "d_col": None, "sfd_row": None, "sfd_col": None, **buffers(case)}
    names["kept alive"] = dense, pointers
    names["arguments"] = {**dense, "d_dtype": torch.bfloat16}
    return names


def expected(case, **options):
    """The operator's outputs."""
    outputs, _ = cases.call(cases.build(replace(case, dbias=case.op == "dglu", options={**case.options, **options})))
    return outputs


@pytest.fixture
def cuda_names(monkeypatch):
    """Stand-ins where there is no GPU: torch.cuda.current_stream() needs a driver, and cuda.bindings may be absent."""
    if not torch.cuda.is_available():
        stream = types.SimpleNamespace(cuda_stream=0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        driver = types.ModuleType("cuda.bindings.driver")
        driver.CUstream = type("CUstream", (int,), {})
        bindings = types.ModuleType("cuda.bindings")
        bindings.driver = driver
        for name, module in {"cuda": types.ModuleType("cuda"), "cuda.bindings": bindings}.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)


def run(document, heading, case, names=None):
    """Execute a block; returns its names afterwards."""
    code = blocks(document)[heading]
    code = code.replace("from cudnn import", "from cudnn_grouped import")
    code = code.replace("import cudnn\n", "import cudnn_grouped as cudnn\n")
    code = code.replace("(..., ", "(**arguments, ")  # the document's ellipsis stands for the arguments
    public = {name: getattr(cudnn_grouped, name) for name in cudnn_grouped.__all__}  # later blocks go on with imports
    names = {"torch": torch, "cudnn": cudnn_grouped, **public, **(names or {}), **tensors(case)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the value filter of BF16 dGeGLU
        exec(compile(code, f"{document}.md: {heading}", "exec"), names)
    return names


def compare(case, got, want):
    """Outputs by name; an absent one is None."""
    for name in cases.OUTPUTS:
        if name == "d_col" and not case.quantized:
            assert got[name] is None or got[name] is got["d_row"] or same_bits(got[name], got["d_row"])
        elif got.get(name) is not None:
            assert same_bits(got[name], want[name]), name


def result_names(result):
    return {key.removesuffix("_tensor"): value for key, value in zip(result.keys(), result, strict=True)}


@pytest.mark.parametrize("case", [DSRELU_8, DSRELU_4], ids=["mxfp8", "mxfp4"])
def test_dsrelu_wrapper(case):
    names = run("dsrelu", "High-level wrapper", case)
    compare(case, names, expected(case))
    assert names["dbias"] is None and names["sfd_row"] is None and names["amax"].shape == (case.experts, 1)


def test_dsrelu_discrete():
    case = CASES["dsrelu_fp4"]
    result = run("dsrelu", "Discrete-weight wrapper", case)["result"]
    compare(case, result_names(result), expected(case))


@pytest.mark.parametrize("case", [CASES["dsrelu_mxfp8"], DSRELU_4], ids=["mxfp8", "mxfp4"])
def test_dsrelu_class(case):
    compare(case, run("dsrelu", "Class API", case), {**expected(case), **class_amax(case)})


def class_amax(case):
    """The class gives amax with a quantised D too: the same as with a 16-bit one."""
    return {"amax": expected(replace(case, d="bf16"))["amax"]} if case.quantized else {}


def test_dsrelu_deterministic():
    case = DSRELU_8
    try:
        result = run("dsrelu", "Deterministic dprob", case)["result"]
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    compare(case, result_names(result), expected(case, deterministic=True))


def test_dglu_bf16_wrapper():
    case = CASES["dglu_bf16"]
    names = run("dglu", "BF16: high-level wrapper", case)
    dense = expected(case)
    assert same_bits(names["d_row"], dense["d_row"]) and same_bits(names["dbias"], dense["dbias"])
    assert all(names[name] is None for name in ("d_col", "amax", "sfd_row", "sfd_col"))
    discrete = expected(case, act_func="dgeglu", clamp_grad="value")
    assert same_bits(names["out"]["d_row_tensor"], discrete["d_row"])
    assert names["out"]["dprob_tensor"] is names["dprob"]  # both calls were accumulated onto it
    assert torch.equal(names["dprob"], dense["dprob"] + discrete["dprob"])


def test_dglu_bf16_class():
    case = CASES["dglu_bf16"]
    compare(case, run("dglu", "BF16: class API", case), expected(case))


@pytest.mark.parametrize("case", [GLU_8, GLU_4], ids=["mxfp8", "mxfp4"])
def test_dglu_dense_then_discrete(case, cuda_names):
    names = run("dglu", "Block-scaled: high-level wrapper, dense mode", case)
    compare(case, names, expected(case))
    assert names["amax"].shape == (case.experts, 2, 1) and names["dbias"].shape == (case.experts, case.columns, 1)
    discrete = CASES["dglu_fp4"]
    # The discrete block goes on with the stream of the dense one.
    names = run("dglu", "Block-scaled: high-level wrapper, discrete mode", discrete, {"stream": names["stream"]})
    compare(discrete, result_names(names["outputs"]), expected(discrete, act_func="dgeglu"))


def test_dglu_classes(cuda_names):
    case = CASES["dglu_fp4"]
    names = run("dglu", "Block-scaled: class API, dense mode", case)
    compare(case, names, expected(case))
    names = run("dglu", "Block-scaled: class API, discrete mode", case, {"stream": names["stream"]})
    got = {name: names[name] for name in ("d_row", "d_col", "dprob")}
    compare(case, got, expected(case, act_func="dgeglu", epilogue_op="relu"))
