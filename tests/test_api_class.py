"""The classes: life cycle, what compilation fixes, sample forms, workspaces; outputs are compared with the wrappers'."""

import sys
from dataclasses import replace

import pytest
import torch
from api_problem import CASES, CLASSES, buffers, call_wrapper, class_arguments, same_bits, wrapper_arguments

import cudnn_grouped
from cudnn_grouped.api import operation as operation_module

ALL = sorted(CASES)
Dsrelu = cudnn_grouped.GroupedGemmDsreluSm100


def make(case, **options):
    """(operation, execute arguments, output buffers) of a case with dbias."""
    arguments = wrapper_arguments(replace(case, dbias=True))
    outputs = buffers(arguments.case)
    samples, execute = class_arguments(arguments, outputs)
    return CLASSES[case.op](**{**samples, **options}), execute, outputs


def expected_outputs(case):
    return call_wrapper(wrapper_arguments(replace(case, dbias=True)))


def assert_matches(outputs, expected):
    for name, output in outputs.items():
        other = expected[f"{name}_tensor"]
        if other is not None:  # the class gives amax with any D dtype
            assert same_bits(output, other), name


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("weights", ["dense_k", "list_k", "ptrs_k"])
def test_class_and_wrapper_agree(name, weights):
    case = replace(CASES[name], weights=weights)
    operation, execute, outputs = make(case)
    assert operation.check_support() is True
    assert operation.compile() is None and operation.compile() is None
    assert operation.execute(**execute) is None
    expected = expected_outputs(case)
    assert_matches(outputs, expected)
    if case.scaled and case.quantized:
        assert bool((outputs["amax"][0] > 0).all()) and bool((outputs["amax"][1] == -torch.inf).all())


@pytest.mark.parametrize("name", ALL)
def test_calling_compiles_on_first_use(name):
    operation, execute, outputs = make(CASES[name])
    operation(**execute)
    first = {key: value.clone() for key, value in outputs.items()}
    assert_matches(first, expected_outputs(CASES[name]))
    operation(**execute)  # accumulates
    assert same_bits(outputs["d_row"], first["d_row"])
    assert torch.equal(outputs["dprob"], first["dprob"] * 2)


def test_compiled_operation_lets_the_samples_go():
    arguments = wrapper_arguments(CASES["dsrelu_mxfp8"])
    samples, execute = class_arguments(arguments, buffers(arguments.case))
    sample_a = samples["sample_a"] = samples["sample_a"].clone()
    operation = CLASSES["dsrelu"](**samples)
    operation.compile()
    del samples
    assert sys.getrefcount(sample_a) == 2
    assert operation.check_support()
    operation.execute(**execute)


@pytest.mark.parametrize("name", ALL)
def test_execute_before_compile(name):
    operation, execute, _ = make(CASES[name])
    with pytest.raises(RuntimeError, match="compile"):
        operation.execute(**execute)
    operation.check_support()
    with pytest.raises(RuntimeError, match="compile"):
        operation.execute(**execute)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("weights", ["dense_k", "ptrs_k"])
def test_meta_samples(name, weights):
    case = replace(CASES[name], weights=weights)
    arguments = wrapper_arguments(replace(case, dbias=True))
    outputs = buffers(arguments.case)
    samples, execute = class_arguments(arguments, outputs)
    samples = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in samples.items()}
    operation = CLASSES[case.op](**samples)
    assert operation.check_support()
    operation(**execute)
    assert_matches(outputs, expected_outputs(case))


@pytest.mark.parametrize("name", ALL)
def test_rows_may_change(name):
    """Compiled for one M (0 included), run for another."""
    small = replace(CASES[name], offsets=(0, 0, 0), m=0, dbias=True)
    operation, execute, _ = make(small)
    operation(**execute)
    arguments = wrapper_arguments(replace(CASES[name], dbias=True))
    outputs = buffers(arguments.case)
    operation.execute(**class_arguments(arguments, outputs)[1])
    assert_matches(outputs, expected_outputs(CASES[name]))


FIXED = [
    ("dsrelu_mxfp8", {"k": 96}, "a_tensor"),
    ("dsrelu_mxfp8", {"n": 64}, "b_tensor"),
    ("dsrelu_list", {"n": 64}, "b_tensor"),
    ("dsrelu_ptrs", {"n": 64}, "c_tensor"),
    ("dsrelu_ptrs", {"offsets": (256, 768), "m": 1024}, "padded_offsets"),
    ("dsrelu_mxfp8", {"ab": "e5m2"}, "a_tensor"),
    ("dsrelu_mxfp8", {"d": "e5m2"}, "d_row_tensor"),
    ("dsrelu_mxfp8", {"c": "f32"}, "c_tensor"),
    ("dsrelu_mxfp8", {"weights": "list_k"}, "b_tensor"),
    ("dsrelu_mxfp8", {"weights": "dense_n"}, "b_tensor"),
    ("dglu_bf16", {"c": "fp16"}, "c_tensor"),
    ("dglu_bf16", {"d": "f32"}, "d_row_tensor"),
]


@pytest.mark.parametrize("name, change, argument", FIXED)
def test_what_compilation_fixed_is_checked(name, change, argument):
    case = replace(CASES["dsrelu_mxfp8"], weights=f"{name[7:]}_k") if name not in CASES else CASES[name]
    operation, execute, outputs = make(case)
    operation(**execute)
    before = {key: value.clone() for key, value in outputs.items()}
    other = wrapper_arguments(replace(case, dbias=True, **change))
    with pytest.raises(ValueError, match=f"^{argument}: .*compiled"):
        operation.execute(**class_arguments(other, buffers(other.case))[1])
    assert all(same_bits(outputs[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", ALL)
def test_execute_validates_again(name):
    operation, execute, outputs = make(CASES[name])
    operation.compile()
    with pytest.raises(ValueError, match="^prob_tensor: "):
        operation.execute(**{**execute, "prob_tensor": execute["prob_tensor"].double()})
    with pytest.raises(ValueError, match="^padded_offsets"):
        operation.execute(**{**execute, "padded_offsets": torch.tensor([128, 256, 768], dtype=torch.int32)})
    with pytest.raises(ValueError, match="^d_row_tensor: "):
        operation.execute(**{**execute, "d_row_tensor": execute["d_row_tensor"][:256]})
    operation.execute(**execute)
    assert_matches(outputs, expected_outputs(CASES[name]))


def test_optional_tensors_are_fixed_by_the_samples():
    case = CASES["dglu_bf16"]
    arguments = wrapper_arguments(case)
    outputs = buffers(case)
    samples, execute = class_arguments(arguments, outputs)
    operation = CLASSES["dglu"](**samples)
    operation(**execute)
    dbias = torch.zeros(case.experts, case.columns, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="^dbias_tensor: .*sample_dbias"):
        operation.execute(**execute, dbias_tensor=dbias)
    with_dbias = CLASSES["dglu"](**samples, sample_dbias=dbias)
    with_dbias.compile()
    with pytest.raises(ValueError, match="^dbias_tensor: .*sample_dbias"):
        with_dbias.execute(**execute)
    with pytest.raises(ValueError, match="^b_ptrs: "):
        operation.execute(**execute, b_ptrs=torch.zeros(case.experts, dtype=torch.int64))
    with pytest.raises(ValueError, match="^b_tensor: "):
        operation.execute(**{**execute, "b_tensor": None})
    discrete, execute, _ = make(replace(case, weights="ptrs_k"))
    discrete.compile()
    with pytest.raises(ValueError, match="^b_tensor: "):
        discrete.execute(**execute, b_tensor=arguments["b_tensor"])
    with pytest.raises(ValueError, match="^b_ptrs: "):
        discrete.execute(**{**execute, "b_ptrs": None})


def workspaces(case, tile=(256, 256), cluster=None):
    shape = Dsrelu.dprob_workspace_shape(case.rows, case.n, tile, cluster)
    return {
        "dprob_workspace": torch.zeros(shape),
        "dbias_workspace": torch.zeros(Dsrelu.dbias_workspace_shape(case.rows, case.n, tile), dtype=torch.bfloat16),
    }


def deterministic_operation(case, **options):
    """(operation, execute arguments, output buffers, workspaces)."""
    spaces = workspaces(case, options.get("mma_tiler_mn", (256, 256)), options.get("cluster_shape_mn"))
    samples = {f"sample_{name}": space for name, space in spaces.items()}
    operation, execute, outputs = make(case, deterministic=True, **samples, **options)
    execute |= {f"{name}_tensor": space for name, space in spaces.items()}
    return operation, execute, outputs, spaces


@pytest.mark.parametrize("tile, cluster", [((256, 256), None), ((128, 128), (2, 4)), ((256, 128), (2, 2))])
@pytest.mark.parametrize("name", ["dsrelu_mxfp8", "dsrelu_fp4"])
def test_workspaces_of_the_deterministic_mode(name, tile, cluster):
    case = replace(CASES[name], n=608)
    operation, execute, outputs, spaces = deterministic_operation(case, mma_tiler_mn=tile, cluster_shape_mn=cluster)
    operation(**execute)
    assert not outputs["dprob"].any() and not outputs["dbias"].any()
    dprob = Dsrelu.reduce_dprob_workspace(spaces["dprob_workspace"])
    dbias = Dsrelu.reduce_dbias_workspace(spaces["dbias_workspace"], execute["padded_offsets"], mma_tiler_mn=tile)
    assert dprob.shape == (case.rows, 1, 1) and dbias.shape == (case.experts, case.n, 1)
    assert dbias.dtype == torch.bfloat16 and dprob.dtype == torch.float32
    assert Dsrelu.reduce_dprob_workspace(spaces["dprob_workspace"], outputs["dprob"]) is outputs["dprob"]
    into = Dsrelu.reduce_dbias_workspace(spaces["dbias_workspace"], execute["padded_offsets"], outputs["dbias"])
    assert into is outputs["dbias"]
    assert same_bits(outputs["dprob"], dprob) and same_bits(outputs["dbias"], dbias)
    expected = expected_outputs(case)
    scale = float(expected["dprob_tensor"].abs().max())
    torch.testing.assert_close(dprob, expected["dprob_tensor"], rtol=0, atol=case.n * 2**-24 * scale * 8)
    # A slot holds 128 rows rounded to bfloat16, so the sum is within 2^-8 of the sum of magnitudes.
    slots = spaces["dbias_workspace"].float().abs().sum(dim=0)
    error = (dbias.float() - expected["dbias_tensor"].float()).abs().sum(dim=0)
    assert bool((error <= 2**-7 * slots + 1e-30).all())


def test_workspace_shapes():
    """grid_n = ceil(n / (TILE_N * cluster_n)) * cluster_n; dbias slots are blocks of 128 rows for either TILE_M."""
    assert Dsrelu.dprob_workspace_shape(1024, 2048) == (1024, 8, 1)
    assert Dsrelu.dprob_workspace_shape(1024, 257) == (1024, 2, 1)
    assert Dsrelu.dprob_workspace_shape(1024, 768, (256, 256), (2, 2)) == (1024, 4, 1)
    assert Dsrelu.dprob_workspace_shape(1024, 768, (128, 128), (1, 4)) == (1024, 8, 1)
    assert Dsrelu.dbias_workspace_shape(65536, 2048) == (512, 2048, 1)
    assert Dsrelu.dbias_workspace_shape(256, 64, (128, 256)) == (2, 64, 1)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda ws, ends: Dsrelu.reduce_dprob_workspace(None), "ws"),
        (lambda ws, ends: Dsrelu.reduce_dprob_workspace(torch.zeros(256, 2, 1), 0.0), "dprob"),
        (lambda ws, ends: Dsrelu.reduce_dbias_workspace(ws.float(), ends), "ws"),
        (lambda ws, ends: Dsrelu.reduce_dbias_workspace(ws, None), "padded_offsets"),
        (lambda ws, ends: Dsrelu.reduce_dbias_workspace(ws, ends.long()), "padded_offsets"),
        (lambda ws, ends: Dsrelu.reduce_dbias_workspace(ws, ends, torch.zeros(2, 96, 1)), "dbias"),
        (lambda ws, ends: Dsrelu.dprob_workspace_shape(256, 96, 256), "mma_tiler_mn"),
    ],
)
def test_reducers_name_the_argument(call, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        call(torch.zeros(4, 96, 1, dtype=torch.bfloat16), torch.tensor([256, 512], dtype=torch.int32))


def test_workspaces_go_with_deterministic():
    case = CASES["dsrelu_mxfp8"]
    spaces = {f"sample_{name}": space for name, space in workspaces(case).items()}
    dprob_only = {"sample_dprob_workspace": spaces["sample_dprob_workspace"]}
    for options, argument in [
        ({"deterministic": True}, "sample_dprob_workspace"),
        ({"deterministic": True, **dprob_only}, "sample_dbias_workspace"),
        (spaces, "sample_dprob_workspace"),
        ({"deterministic": True, "sample_dbias": None, **spaces}, "sample_dbias_workspace"),
        (
            {"deterministic": True, **spaces, "sample_dprob_workspace": torch.zeros(1024, 2, 1)},
            "sample_dprob_workspace",
        ),
        ({"deterministic": True, **spaces, "sample_dbias_workspace": torch.zeros(8, 96, 1)}, "sample_dbias_workspace"),
    ]:
        with pytest.raises(ValueError, match=f"^{argument}: "):
            make(case, **options)[0].check_support()


@pytest.mark.parametrize("name", ["dsrelu_fp4", "dsrelu_mxfp8"])
def test_deterministic_runs_are_bit_equal(name):
    case = replace(CASES[name], n=608)
    operation, execute, _, spaces = deterministic_operation(case)
    seen = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 1, 2):
            torch.set_num_threads(count)
            for space in spaces.values():
                space.zero_()
            operation(**execute)
            dbias = Dsrelu.reduce_dbias_workspace(spaces["dbias_workspace"], execute["padded_offsets"])
            seen.append((Dsrelu.reduce_dprob_workspace(spaces["dprob_workspace"]), dbias))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(a, b) for run in seen[1:] for a, b in zip(run, seen[0], strict=True))


def test_dglu_is_deterministic_without_workspaces():
    operation, execute, outputs = make(CASES["dglu_fp4"], deterministic=True)
    operation(**execute)
    first = outputs["dprob"].clone()
    outputs["dprob"].zero_()
    operation(**execute)
    assert same_bits(first, outputs["dprob"])


@pytest.mark.parametrize("k", [32, 64])
def test_b_shape_takes_the_logical_or_the_packed_k_of_fp4(k):
    operation, execute, outputs = make(replace(CASES["dglu_fp4"], weights="ptrs_k"), b_shape=(96, k))
    operation(**execute)
    assert_matches(outputs, expected_outputs(CASES["dglu_fp4"]))


def test_rejected_samples_leave_the_operation_usable():
    case = CASES["dsrelu_mxfp8"]
    operation, execute, outputs = make(case)
    bad = CLASSES["dsrelu"](**{**class_arguments(wrapper_arguments(case), outputs)[0], "sf_vec_size": 16})
    with pytest.raises(ValueError, match="^sf_vec_size: "):
        bad.check_support()
    with pytest.raises(ValueError, match="^sf_vec_size: "):
        bad.compile()
    operation(**execute)
    assert_matches(outputs, expected_outputs(case))


def test_a_device_without_an_engine_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"^device: expected .*cpu.*, got cuda:0 with compute capability 7\.5"):
        operation_module._check_engine(torch.device("cuda", 0))


def test_check_support_asks_for_an_engine(monkeypatch):
    asked = []
    monkeypatch.setattr(operation_module, "_check_engine", asked.append)
    make(CASES["dsrelu_mxfp8"])[0].check_support()
    assert asked == [torch.device("cpu")]
