"""The product's own CUDA code in the simulator: csrc/cuda compiled for SM100 gives the CPU engine's bits; tanh of both GPU
engines."""

import gpu_device
import numpy as np
import oracle
import pytest
import sm100_cases
import torch
from sm100_simulator import SimulationError, Simulator

import cudnn_grouped

pytestmark = sm100_cases.needs_nvcc

# As csrc/core/tensor.h counts them.
DTYPES = {
    torch.float32: 1,
    torch.bfloat16: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.float8_e8m0fnu: 6,
    torch.float4_e2m1fn_x2: 7,
}


@pytest.fixture(scope="module")
def library():
    return sm100_cases.shipped_quantiser()


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("schedule", ["immediate", "adversarial"])
@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize(("format", "block"), [("mxfp8", 32), ("mxfp8_e5m2", 32), ("nvfp4", 16), ("mxfp4", 32)])
def test_quantise_and_back(library, format, block, axis, schedule):
    generator = torch.Generator().manual_seed(5)
    rows, columns = 512, 160
    x = torch.randn(rows, columns, generator=generator).to(torch.bfloat16)
    x[3, 7], x[64, 5], x[130] = float("nan"), float("inf"), 0
    norm = torch.tensor([0.75])
    offsets = torch.tensor([256, 256, 512], dtype=torch.int32)
    experts = {"padded_offsets": offsets} if axis == "col" else {}
    data, scales = cudnn_grouped.quantize(x, format, axis=axis, norm_const=norm, **experts)
    back = cudnn_grouped.dequantize(data, scales, format, axis=axis, norm_const=norm, dtype=torch.bfloat16, **experts)

    simulator = Simulator(schedule, seed=2)
    atoms = torch.as_strided(scales, (scales.numel(),), (1,), 0)
    device = {
        "x": simulator.array(raw(x)),
        "data": simulator.array(np.full(raw(data).size, 0xEE, np.uint8)),
        "scales": simulator.array(np.full(atoms.numel(), 0xEE, np.uint8)),
        "norm": simulator.array(norm.numpy()),
        "offsets": simulator.array(offsets.numpy()) if experts else None,
        "back": simulator.array(np.full(raw(back).size, 0xEE, np.uint8)),
    }
    common = [rows, columns, int(axis == "col"), DTYPES[x.dtype], DTYPES[data.dtype], DTYPES[scales.dtype], block]
    tail = [device["data"], device["scales"], device["norm"], device["offsets"], 3 if experts else 0]
    assert simulator.call(library, "run_quantize", *common, device["x"], *tail) == 0
    assert np.array_equal(device["data"].numpy(), raw(data).ravel())
    assert np.array_equal(device["scales"].numpy(), raw(atoms))
    assert simulator.call(library, "run_dequantize", *common, device["back"], *tail) == 0
    assert np.array_equal(device["back"].numpy(), raw(back).ravel())


def test_a_buffer_too_short_is_found(library):
    simulator = Simulator()
    x, data = simulator.zeros(128 * 128, np.float32), simulator.zeros(128 * 128 - 16, np.uint8)
    scales = simulator.zeros(512, np.uint8)
    codes = [DTYPES[d] for d in (torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu)]
    with pytest.raises(SimulationError) as error:
        simulator.call(library, "run_quantize", 128, 128, 0, *codes, 32, x, data, scales, None, None, 0)
    assert error.value.category == "out_of_bounds"


# tanh ----------------------------------------------------------------------------------------------------------------

# What is left of gpu_device's units where ex2 and rcp are correctly rounded, as in the simulator: 15 and 6 are seen.
VALUE_UNITS, SLOPE_UNITS = 18, 9


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("bound", "factor"),
    [(2.0**-126, 1.0), (1e-3, -1.7), (1e-3, 2.0**-100), (1.0, 1e38), (4.0, 1.0), (25.0, 1e-3), (2.0**126, 1.7)],
)
def test_tanh_of_every_size(bound, factor, pairs):
    """From subnormals to infinity, and within the bound. The polynomial's part ends where z is 0.43."""
    rng = np.random.default_rng(0)
    near = bound / abs(factor) * np.concatenate([np.exp2(rng.uniform(-16, 7, 1024)), rng.uniform(0.3, 0.7, 512)])
    x = np.concatenate([np.exp2(rng.uniform(-149, 128, 504)), near, [0, 0, 2.0**-149, 2.0**-126, np.inf, 1, 2, 4]])
    with np.errstate(over="ignore"):
        x = (x * rng.choice([-1, 1], x.size)).astype(np.float32)
    bound, factor = np.float32(bound), np.float32(factor)
    simulator = Simulator(sms=1)
    out = [simulator.array(np.zeros_like(x)) for _ in range(2)]
    given = [simulator.array(v) for v in (np.full(1, bound), np.full(1, factor), x)]
    sm100_cases.run(simulator, sm100_cases.shipped_tanh(), "run_tanh", *given, *out, x.size, int(pairs))
    value, slope = (sm100_cases.read(array).astype(np.float64) for array in out)
    with np.errstate(over="ignore"):
        product = x.astype(np.float64) * factor if pairs else (x * factor).astype(np.float64)
        z = product / bound
        e = np.exp(-2 * np.abs(z))
    want, slope_want = float(bound) * np.tanh(z), 4 * e / (1 + e) ** 2
    argument = gpu_device.TANH_ARGUMENT_UNITS * np.minimum(np.abs(z), 200)
    tiny = 2.0**-148  # the product, and the value: a rounding of a subnormal each
    assert (np.abs(value) <= bound).all()
    assert (np.signbit(value) == np.signbit(want)).all()
    of_value = VALUE_UNITS * np.abs(want) + argument * slope_want * bound
    assert (np.abs(value - want) <= of_value * oracle.U + tiny).all()
    assert (np.abs(slope - slope_want) <= (SLOPE_UNITS + 2 * argument) * slope_want * oracle.U + oracle.TINY).all()
