"""The suite fails when the product is broken, and passes on the kernels of older instruction sets. See mutants.py."""

import platform
import shutil

import mutants
import pytest


@pytest.fixture(scope="module")
def shop():
    if not shutil.which(mutants.CXX):
        pytest.skip("no C++ compiler")
    with mutants.workshop() as shop:
        yield shop


@pytest.mark.slow
def test_unpatched_copy_passes(shop):
    assert shop.passes(*mutants.everything(mutants.MUTANTS))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(shop, mutant):
    assert shop.is_caught(mutant)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86-64 instruction sets")
@pytest.mark.parametrize("name", mutants.VARIANTS)
def test_other_instruction_sets(name):
    with mutants.workshop(mutants.VARIANTS[name]) as shop:
        assert shop.passes(mutants.OPERATORS + ("test_quantize.py", "test_determinism.py"), "not product")


def test_patches_apply():
    """Every patch finds its text once: a mutant that no longer applies is an error, not a pass."""
    for mutant in mutants.MUTANTS:
        text = (mutants.ROOT / mutant.file).read_text()
        assert mutants.replaced(text, mutant.old, mutant.new) != text
