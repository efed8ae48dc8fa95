"""Names, parameter order and defaults of the documented API; TupleDict; what importing does."""

import inspect
import subprocess
import sys

import pytest
import torch

import cudnn_grouped
from cudnn_grouped import TupleDict

DSRELU_WRAPPER = """
a_tensor=None b_tensor=None c_tensor=None sfa_tensor=None sfb_tensor=None padded_offsets=None alpha_tensor=None
prob_tensor=None dprob_tensor=None generate_dbias=False b_ptrs=None sfb_ptrs=None n=None b_dtype=None b_major='k'
norm_const_tensor=None acc_dtype=None d_dtype=None cd_major='n' mma_tiler_mn=(256,256) cluster_shape_mn=None sf_vec_size=16
vector_f32=False m_aligned=256 discrete_col_sfd=False use_dynamic_sched=False deterministic=None tanh_clamp_scale=None
current_stream=None
"""
DSRELU_CLASS = """
sample_a=None sample_b=None sample_c=None sample_d_row=None sample_d_col=None sample_sfa=None sample_sfb=None
sample_padded_offsets=None sample_alpha=None sample_prob=None sample_dprob=None sample_dbias=None sample_dprob_workspace=None
sample_dbias_workspace=None num_experts=None b_shape=None b_dtype=None sample_sfd_row=None sample_sfd_col=None sample_amax=None
sample_norm_const=None acc_dtype=None mma_tiler_mn=(256,256) cluster_shape_mn=None sf_vec_size=16 vector_f32=False m_aligned=256
discrete_col_sfd=False b_major='k' use_dynamic_sched=False deterministic=False tanh_clamp_scale=None
"""
DSRELU_EXECUTE = """
a_tensor c_tensor d_row_tensor d_col_tensor sfa_tensor padded_offsets alpha_tensor prob_tensor dprob_tensor b_tensor=None
sfb_tensor=None dbias_tensor=None dprob_workspace_tensor=None dbias_workspace_tensor=None b_ptrs=None sfb_ptrs=None
sfd_row_tensor=None sfd_col_tensor=None amax_tensor=None norm_const_tensor=None current_stream=None
"""
DGLU_WRAPPER = """
a_tensor=None c_tensor=None sfa_tensor=None padded_offsets=None alpha_tensor=None beta_tensor=None prob_tensor=None
dprob_tensor=None b_tensor=None sfb_tensor=None generate_dbias=False b_ptrs=None sfb_ptrs=None n=None b_dtype=None b_major='k'
norm_const_tensor=None acc_dtype=None d_dtype=None cd_major='n' mma_tiler_mn=(256,256) cluster_shape_mn=None sf_vec_size=16
vector_f32=False m_aligned=256 discrete_col_sfd=False act_func='dswiglu' linear_offset=None geglu_alpha=1.702 glu_clamp_max=7.0
glu_clamp_min=-7.0 situ_beta1=4.0 situ_beta2=25.0 epilogue_op=None use_dynamic_sched=False
use_single_group_runtime_offsets=False current_stream=None deterministic=None
"""
DGLU_CLASS = """
sample_a=None sample_c=None sample_d_row=None sample_d_col=None sample_sfa=None sample_padded_offsets=None sample_alpha=None
sample_beta=None sample_prob=None sample_dprob=None sample_b=None sample_sfb=None sample_dbias=None num_experts=None b_shape=None
b_dtype=None sample_sfd_row=None sample_sfd_col=None sample_amax=None sample_norm_const=None acc_dtype=None
mma_tiler_mn=(256,256) cluster_shape_mn=None sf_vec_size=16 vector_f32=False m_aligned=256 discrete_col_sfd=False
act_func='dswiglu' b_major='k' epilogue_op=None use_dynamic_sched=False use_single_group_runtime_offsets=False
linear_offset=None geglu_alpha=1.702 glu_clamp_max=7.0 glu_clamp_min=-7.0 situ_beta1=4.0 situ_beta2=25.0 deterministic=False
"""
DGLU_EXECUTE = """
a_tensor c_tensor d_row_tensor d_col_tensor sfa_tensor padded_offsets alpha_tensor beta_tensor prob_tensor dprob_tensor
b_tensor=None sfb_tensor=None dbias_tensor=None b_ptrs=None sfb_ptrs=None sfd_row_tensor=None sfd_col_tensor=None
amax_tensor=None norm_const_tensor=None current_stream=None
"""


def spelled(function):
    """Positional parameters as in the lists above; keyword-only ones are this package's own and come after."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "") for p in parameters]
    return [text for text in shown if text != "self"]


@pytest.mark.parametrize(
    "function, expected",
    [
        (cudnn_grouped.grouped_gemm_dsrelu_wrapper_sm100, DSRELU_WRAPPER),
        (cudnn_grouped.GroupedGemmDsreluSm100.__init__, DSRELU_CLASS),
        (cudnn_grouped.GroupedGemmDsreluSm100.execute, DSRELU_EXECUTE),
        (cudnn_grouped.grouped_gemm_dglu_wrapper_sm100, DGLU_WRAPPER),
        (cudnn_grouped.GroupedGemmDgluSm100.__init__, DGLU_CLASS),
        (cudnn_grouped.GroupedGemmDgluSm100.execute, DGLU_EXECUTE),
        (cudnn_grouped.GroupedGemmDsreluSm100.reduce_dprob_workspace, "ws dprob=None current_stream=None"),
        (
            cudnn_grouped.GroupedGemmDsreluSm100.reduce_dbias_workspace,
            "ws padded_offsets dbias=None mma_tiler_mn=(256,256) current_stream=None",
        ),
    ],
)
def test_signature(function, expected):
    assert spelled(function) == expected.split()


def test_tuple_dict():
    result = TupleDict({"x": 1, "y": None, "z": 3})
    x, y, z = result
    assert (x, y, z) == (1, None, 3) == tuple(result)
    assert result["y"] is None and result[0] == 1 and result[2] == 3 and len(result) == 3
    assert list(result.keys()) == ["x", "y", "z"] and dict(result) == {"x": 1, "y": None, "z": 3} == {**result}
    assert list(reversed(result)) == [3, None, 1] and "x" in result and 1 not in result
    for position in (3, -1, 100):
        with pytest.raises(IndexError):
            result[position]
    with pytest.raises(KeyError):
        result["w"]
    with pytest.raises(TypeError):
        hash(result)


def test_public_names():
    for name in cudnn_grouped.__all__:
        assert hasattr(cudnn_grouped, name)
    assert dict(inspect.getmembers(cudnn_grouped))  # every name that dir() lists is there
    with pytest.raises(AttributeError):
        cudnn_grouped.no_such_name  # noqa: B018


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_import_leaves_jax_alone():
    # A module that would fail stands in for jax.
    code = "import sys; sys.modules['jax'] = None; import cudnn_grouped; print('imported')"
    assert run_python(code).stdout.strip() == "imported"


def test_jax_names_say_what_is_missing():
    code = (
        "import sys; sys.modules['jax'] = None; import cudnn_grouped\n"
        "try: cudnn_grouped.grouped_gemm_dglu_jax_sm100\n"
        "except ImportError as error: print(error)"
    )
    assert "cudnn_grouped[jax]" in run_python(code).stdout


def test_missing_library_says_how_to_build():
    code = (
        "import pathlib\n"
        "exists = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda self, **k: False if self.name == 'libcudnn_grouped_torch.so' else exists(self, **k)\n"
        "try: import cudnn_grouped\n"
        "except ImportError as error: print(error)"
    )
    text = run_python(code).stdout
    assert "libcudnn_grouped_torch.so" in text and "make venv" in text


@pytest.mark.parametrize("op", ["dsrelu", "dglu"])
def test_operators_are_defined(op):
    assert hasattr(torch.ops.cudnn_grouped, op) and hasattr(torch.ops.cudnn_grouped, f"{op}_out")
