"""examples/jax_moe.py learns and repeats itself; the blocks of the JAX page run as they stand."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from jax_values import jax, jnp, to_jax
from test_readme import run_blocks

from cudnn_grouped.nn.permute import plan

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "jax_moe.py"
TINY = "--steps 8 --batch 128 --context 4 --width 16 --ffn 32 --experts 3".split()


@pytest.fixture(scope="module")
def example():
    specification = importlib.util.spec_from_file_location("jax_moe", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_learns_and_repeats_itself(example, capsys):
    losses = example.main([*TINY, "--recipe", "mxfp8"])
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert example.main([*TINY, "--recipe", "mxfp8"]) == losses
    assert "bits per byte" in capsys.readouterr().out.splitlines()[-1]


def test_refuses_a_short_text(example, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"abc")
    with pytest.raises(ValueError, match="^text: expected more than 4 bytes, got 3$"):
        example.main([*TINY, "--text", str(text)])


def test_plan_is_that_of_permute(example):
    """Rows, padding and offsets as in cudnn_grouped.nn.permute."""
    experts = torch.randint(0, 5, (700, 2), generator=torch.Generator().manual_seed(0))
    want = plan(experts, 6)
    row_of, token_of_row, ends = jax.jit(example.plan, static_argnums=1)(to_jax(experts.int()), 6)
    assert np.array_equal(row_of, want.row_of) and np.array_equal(ends, want.padded_offsets)
    assert np.array_equal(token_of_row, want.copy_of_row // 2)
    assert ends.dtype == jnp.int32


def test_jax_page():
    names = run_blocks("docs/jax.md", 3)
    assert names["d_row"].dtype == jnp.float8_e4m3fn and names["d_row"].shape == (names["M"], names["N"])
    assert names["dw1"].shape == names["w1"].shape and bool(jnp.abs(names["dw2"]).max() > 0)
