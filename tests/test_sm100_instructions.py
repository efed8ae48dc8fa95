"""Single instructions of SM100 in the simulator against their definitions: tcgen05.mma in every kind and layout, and
what a kernel needs around it. What SM90 has too is in test_sm100_simulator.py."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import sm100_cases
from oracle_formats import BF16, E2M1, E4M3, E5M2, FP16, decode_scale
from sm100_cases import E2M3, E3M2, Step, read, run
from sm100_simulator import Simulator

pytestmark = sm100_cases.needs_nvcc


@pytest.fixture(scope="module")
def library():
    """One library a source, compiled when first asked for."""
    return sm100_cases.libraries()


# tcgen05.mma ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """number: of instructions.cu's enumeration. fields: a format's code in the instruction descriptor. scale: format
    of the scales and elements that one is for."""

    number: int
    fields: dict
    scale: tuple | None = None
    padded: bool = True  # 4- and 6-bit elements in units of 16 bytes for 16 elements
    f32: int = 0  # the field of the accumulator's format

    def bits(self, element) -> int:
        """Of an element in shared memory."""
        return 8 if self.padded and element.bits < 8 else element.bits


NARROW = {E4M3: 0, E5M2: 1, E2M3: 3, E3M2: 4, E2M1: 5}
KINDS = {
    "f16": Kind(0, {FP16: 0, BF16: 1}, f32=1),
    "f8f6f4": Kind(1, NARROW, f32=1),
    "mxf8f6f4": Kind(2, NARROW, ("e8m0", 32)),
    "mxf4": Kind(3, {E2M1: 1}, ("e8m0", 32), padded=False),
    "mxf4nvf4, 2X": Kind(4, {E2M1: 1}, ("e8m0", 32), padded=False),
    "mxf4nvf4, 4X": Kind(5, {E2M1: 1}, ("e4m3", 16), padded=False),
}


class Operand:
    """Random codes of every finite value, one image a CTA, and what the matrix means.

    halves: how many CTAs share the rows."""

    def __init__(self, rng, kind: Kind, element, rows: int, depth: int, span: int, mn_major: bool, halves: int):
        finite = np.flatnonzero(np.isfinite(element.table()))
        codes = rng.choice(finite, (rows, depth))
        if element in (FP16, BF16):  # products within FP32's range
            codes = element.encode(rng.standard_normal((rows, depth)))
        self.value = element.decode(codes)
        images = []
        for part in np.split(codes, halves):
            if mn_major:
                size = kind.bits(element) // 8
                data = np.ascontiguousarray(part.astype(f"<u{size}"))[..., None].view(np.uint8)
                image, self.descriptors = sm100_cases.mn_major(data, span)
            else:
                data = sm100_cases.packed(part, element.bits, kind.padded)
                image, self.descriptors = sm100_cases.k_major(data, span)
            images.append(image)
        self.image = np.concatenate(images)


class Scales:
    """Random scales of an operand: an image a CTA. split: each CTA has those of its rows, else both have all.
    power: of two, that those of UE8M0 are multiplied by."""

    def __init__(self, rng, kind: Kind, rows: int, depth: int, halves: int, split: bool, power: int = 0):
        scale_format, block = kind.scale
        low, high = (122 + power, 133 + power) if scale_format == "e8m0" else (1, 0x7F)
        codes = rng.integers(low, high, (rows, depth // block)).astype(np.uint8)
        self.factor = np.repeat(decode_scale(codes, scale_format), block, axis=1)
        parts = np.split(codes, halves) if split else [codes] * halves
        images, atoms = zip(*(sm100_cases.scale_image(part) for part in parts))
        self.image, self.atom_rows = np.concatenate(images), atoms[0]
        self.atoms = self.atom_rows * -(-codes.shape[1] // 4)


def multiply(
    library, kind_name, a_format, b_format, group=1, n=128, span=128, mn_major=(False, False), negate=False, power=0
):
    """Runs 128 bytes of K: got, expected, and what the sum of magnitudes is."""
    kind, rng = KINDS[kind_name], np.random.default_rng(n + span)
    m, depth = 128 * group, 128 * 8 // kind.bits(a_format)
    steps = 128 // sm100_cases.STEP_BYTES
    a = Operand(rng, kind, a_format, m, depth, span, mn_major[0], group)
    b = Operand(rng, kind, b_format, n, depth, span, mn_major[1], group)
    instruction = kind.f32 << 4 | kind.fields[a_format] << 7 | kind.fields[b_format] << 10
    instruction |= negate << 13 | mn_major[0] << 15 | mn_major[1] << 16 | n // 8 << 17 | m // 16 << 24
    value_a, value_b = a.value * (-1 if negate else 1), b.value
    table = [Step(x, y, instruction, 0, 0, i > 0) for i, (x, y) in enumerate(zip(a.descriptors, b.descriptors))]
    image_a = image_b = np.zeros(group * sm100_cases.SCALES, np.uint8)
    atoms = (0, 0)
    if kind.scale:
        scale_a = Scales(rng, kind, m, depth, group, True, power)
        scale_b = Scales(rng, kind, n, depth, group, False, -power)
        value_a, value_b = value_a * scale_a.factor, value_b * scale_b.factor
        image_a, image_b, atoms = scale_a.image, scale_b.image, (scale_a.atoms, scale_b.atoms)
        each = depth // kind.scale[1] // steps  # scales of a step
        for i, step in enumerate(table):
            place = i * each % 4  # byte of the scales' word
            step.instruction |= (kind.scale[0] == "e8m0") << 23 | place << 29 | place << 4
            step.scale_a = i * each // 4 * scale_a.atom_rows * 4
            step.scale_b = i * each // 4 * scale_b.atom_rows * 4
    simulator = Simulator(schedule="adversarial", seed=n, sms=4)
    out = simulator.array(np.full((m, n), np.nan, np.float32))
    operands = [simulator.array(x) for x in (a.image, b.image, image_a, image_b)]
    table = (Step * steps)(*table)
    run(simulator, library("instructions"), "run_tile", kind.number, group, *operands, out, *atoms, n, table, steps)
    return read(out), value_a @ value_b.T, np.abs(value_a) @ np.abs(value_b).T


def assert_multiplies(*arguments, **options):
    got, expected, magnitude = multiply(*arguments, **options)
    assert (np.abs(got - expected) <= magnitude * 2.0**-20).all()


MAJORS = list(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("span", sm100_cases.SWIZZLES)
@pytest.mark.parametrize("mn_major", MAJORS, ids=lambda mn: "-".join(("K", "MN")[x] for x in mn))
@pytest.mark.parametrize("kind, element", [("f16", BF16), ("f8f6f4", E4M3), ("mxf8f6f4", E5M2)])
def test_layouts(library, kind, element, mn_major, span, group):
    assert_multiplies(library, kind, element, element, group, 128 * group, span, mn_major)


@pytest.mark.parametrize("kind", ["f8f6f4", "mxf8f6f4"])
@pytest.mark.parametrize("a, b", [(E4M3, E5M2), (E5M2, E4M3), (E2M3, E3M2), (E3M2, E4M3), (E2M1, E4M3), (E4M3, E2M1)])
def test_formats(library, kind, a, b):
    assert_multiplies(library, kind, a, b)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("kind", ["mxf4", "mxf4nvf4, 2X", "mxf4nvf4, 4X"])
def test_fp4(library, kind, n, group):
    assert_multiplies(library, kind, E2M1, E2M1, group, n)


@pytest.mark.parametrize("group, n", [(1, 16), (1, 48), (1, 256), (2, 32), (2, 256)])
@pytest.mark.parametrize("kind, element", [("f16", FP16), ("mxf8f6f4", E4M3)])
def test_widths(library, kind, element, group, n):
    assert_multiplies(library, kind, element, element, group, n)


@pytest.mark.parametrize("power", [118, -118])
def test_scale_factors_far_apart(library, power):
    """A block's sum times one of them is out of FP32's range, times both it is not."""
    assert_multiplies(library, "mxf8f6f4", E4M3, E4M3, power=power)


@pytest.mark.parametrize("kind, element", [("f16", BF16), ("f8f6f4", E4M3)])
def test_negated(library, kind, element):
    assert_multiplies(library, kind, element, element, negate=True)


# Scalars ----------------------------------------------------------------------------------------------------------

NAN = 0x7FFFFFFF
SPECIAL = np.array([0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000], np.uint32)


def operands(count: int = 256) -> np.ndarray:
    """Three rows of words: special values of either sign, numbers of moderate size, random bits."""
    rng = np.random.default_rng(5)
    x = rng.integers(0, 2**32, (3, count), np.uint32)
    x[:, :64] = rng.choice(np.concatenate([SPECIAL, SPECIAL | 0x80000000]), (3, 64))
    moderate = rng.standard_normal((3, 128)) * np.exp2(rng.integers(-8, 8, (3, 128)))
    x[:, 64:192] = moderate.astype(np.float32).view(np.uint32)
    return x


def table(library, kernel: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    x = operands()
    simulator = Simulator(schedule="adversarial", seed=1, sms=4)
    out = simulator.array(np.zeros((rows, x.shape[1]), np.uint32))
    arrays = [simulator.array(row) for row in x]
    run(simulator, library("sm100_scalars"), f"run_{kernel}", *arrays, out, x.shape[1])
    return x, read(out)


def canonical(values: np.ndarray) -> np.ndarray:
    """Bits of floats, every NaN the one that arithmetic makes."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return np.where(np.isnan(values), np.uint32(NAN), bits)


def odd(x, y) -> np.ndarray:
    """x + y of float64 rounded to odd: rounding that again, to float32, is as rounding the sum once."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    step = np.where(np.sign(error) == np.sign(total), 1, -1)
    return np.where(inexact, (bits + step).view(np.float64), total)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_pairs_of_floats(library):
    words, got = table(library, "pairs", 10)
    x, y, z = words.view(np.float32)
    expected = []
    for half in (0, 1):
        a, b, c = (x, y)[half], (y, z)[half], (z, x)[half]
        wide_a, wide_b, wide_c = (v.astype(np.float64) for v in (a, b, c))
        fused = odd(wide_a * wide_b, wide_c).astype(np.float32)
        expected.append([a + b, a - b, a * b, fused, flushed(flushed(a) + flushed(b))])
    expected = [canonical(expected[half][row]) for row in range(5) for half in (0, 1)]
    assert [np.flatnonzero(g != e).tolist() for g, e in zip(got, expected)] == [[]] * 10


def pair_of(element, high, low) -> np.ndarray:
    """Two floats as codes of a byte each, or of a nibble each."""
    codes = [element.encode(v).astype(np.uint32) for v in (high, low)]
    return codes[0] << (8 if element.bits > 4 else 4) | codes[1]


def halves_of(element, words, shift: int = 8) -> np.ndarray:
    """Two codes in the low bits of a word as FP16."""
    mask = (1 << element.bits) - 1
    parts = [element.decode(words >> s & mask).astype(np.float16) for s in (shift, 0)]
    bits = [np.where(np.isnan(p), np.uint16(0x7FFF), p.view(np.uint16)).astype(np.uint32) for p in parts]
    return bits[0] << 16 | bits[1]


def scale_of(values, up: bool) -> np.ndarray:
    """e8m0 of magnitudes, rounded up or down."""
    bits = np.abs(values).view(np.uint32).astype(np.int64)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    if up:  # 2^-127 is the subnormal 0x400000
        more = np.where(exponent == 0, fraction > 0x400000, fraction != 0)
        code = np.minimum(exponent + more, 254)
    else:
        code = np.minimum(exponent, 254)
    return np.where(np.isnan(values), 255, code).astype(np.uint32)


def extreme(values, axis: int, largest: bool, propagate: bool) -> np.ndarray:
    """-0 is less than +0. A NaN counts only where all are, or if it is to `propagate`."""
    bits = np.stack(values).view(np.int32) if isinstance(values, tuple) else values.view(np.int32)
    missing = np.isnan(bits.view(np.float32))
    keys = np.where(missing, (-1 if largest else 1) << 40, np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64))
    key = keys.max(axis) if largest else keys.min(axis)
    found = np.where(key < 0, key ^ 0x7FFFFFFF, key).astype(np.int32).view(np.float32)
    return np.where(missing.any(axis) if propagate else missing.all(axis), np.float32(np.nan), found)


def reduced(values, largest: bool, magnitude: bool, propagate: bool) -> np.ndarray:
    """A reduction over each warp's 32 values, which every thread gets."""
    warps = (np.abs(values) if magnitude else values).reshape(-1, 32)
    return np.repeat(extreme(warps, 1, largest, propagate), 32)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_conversions(library):
    words, got = table(library, "conversions", 19)
    x, y, z = words.view(np.float32)
    third = words[2]
    bf16_scale = [np.where(b == 255, 0x7FFF, np.where(b == 0, 0x40, b << 7)) for b in (third >> 8 & 255, third & 255)]
    expected = [
        pair_of(E4M3, x, y),
        pair_of(E5M2, x, y),
        pair_of(E2M3, x, y),
        pair_of(E3M2, x, y),
        pair_of(E2M1, x, y),
        scale_of(x, False) << 8 | scale_of(y, False),
        scale_of(x, True) << 8 | scale_of(y, True),
        bf16_scale[0] << 16 | bf16_scale[1],
        halves_of(E4M3, third),
        halves_of(E5M2, third),
        halves_of(E2M3, third),
        halves_of(E3M2, third),
        halves_of(E2M1, third, 4),
        canonical(extreme((x, y, z), 0, True, False)),
        canonical(extreme((x, y, z), 0, False, True)),
        canonical(reduced(x, True, False, False)),
        canonical(reduced(x, False, True, False)),
        canonical(reduced(x, True, True, True)),
        canonical(reduced(x, False, False, True)),
    ]
    assert [np.flatnonzero(g != e).tolist() for g, e in zip(got, expected)] == [[]] * 19


# Around them ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["immediate", 0, 1])
def simulator(request):
    if request.param == "immediate":
        return Simulator(schedule="immediate", sms=4)
    return Simulator(schedule="adversarial", seed=request.param, sms=4)


@pytest.fixture
def call(library, simulator):
    return lambda function, *arguments: run(simulator, library("sm100_features"), function, *arguments)


def test_tensor_memory(simulator, call):
    """The shapes of half a warp's rows are the layouts that CUTLASS's copy atoms have."""
    x = np.random.default_rng(6).integers(0, 2**32, (4, 32, 16), np.uint32)
    out = simulator.array(np.zeros((4, 32, 28), np.uint32))
    call("run_tensor_memory", simulator.array(x), out)
    got, lane = read(out), np.arange(32)
    upper, lower = x[:, :16], x[:, 16:]
    assert np.array_equal(got[..., :16], x)
    for j in range(2):
        assert np.array_equal(got[..., 16 + j], upper[:, lane // 4 + lane % 2 * 8, 3 + j * 2 + lane // 2 % 2])
        assert np.array_equal(got[..., 18 + j], lower[:, lane // 4 + j * 8, 4 + lane % 4])
    for j in range(4):
        assert np.array_equal(got[..., 20 + j], lower[:, lane // 4 + j // 2 * 8, 8 + lane % 4 * 2 + j % 2])
    stored = np.zeros((4, 32, 4), np.uint32)
    for j in range(4):
        stored[:, lane // 4 + j * 8, lane % 4] = x[..., j]
    assert np.array_equal(got[..., 24:], stored)


def test_register_reallocation(simulator, call):
    x = np.arange(256, dtype=np.uint32) * 7 + 3
    out = simulator.array(np.zeros_like(x))
    call("run_registers", simulator.array(x), out)
    assert np.array_equal(read(out), np.where(np.arange(256) < 128, x + 1, x - 1))


def test_cluster_launch_control(simulator, call):
    """Every piece is done once, whoever does it."""
    visits = simulator.array(np.zeros(23, np.uint32))
    call("run_pieces", visits, 23)
    assert read(visits).tolist() == [1] * 23


def test_dependent_launch(simulator, call):
    buffer = simulator.array(np.zeros(128, np.uint32))
    call("run_dependent", buffer)
    assert np.array_equal(read(buffer), np.concatenate([np.arange(64) * 3, np.arange(64) * 3 + 1]))


def test_edited_tensor_map(simulator, call):
    rows = [8, 3, 5]
    rng = np.random.default_rng(7)
    tables = [rng.integers(0, 2**32, (m, 40), np.uint32) for m in rows]
    arrays = [simulator.array(table) for table in tables]
    addresses = simulator.array(np.array([array.pointer for array in arrays], np.uint64))
    slots = simulator.array(np.zeros((3, 128), np.uint8))
    out = simulator.array(np.zeros((3, 8, 32), np.uint32))
    call("run_edited", slots, addresses, simulator.array(np.array(rows, np.uint32)), out, 3)
    expected = np.zeros((3, 8, 32), np.uint32)
    for i, (m, table) in enumerate(zip(rows, tables)):
        expected[i, :m] = table[:, :32]
    assert np.array_equal(read(out), expected)
