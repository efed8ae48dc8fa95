"""``python -m cudnn_grouped``, and the generated page of the documentation."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import cudnn_grouped
from cudnn_grouped import __main__, demo, eager, library

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_info(capsys):
    assert __main__.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == cudnn_grouped.__version__ and report["torch"] == torch.__version__
    assert "cpu" in [engine["name"] for engine in report["engines"]]
    assert report["devices"][0] == {"device": "cpu", "name": "CPU", "capability": None, "engine": "cpu"}
    assert __main__.main(["info"]) == 0
    text = capsys.readouterr().out
    assert report["version"] in text and report["cuda_library"] in text and "JAX handlers' library: " in text


@pytest.mark.parametrize("built", [False, True])
def test_info_on_the_jax_library(monkeypatch, tmp_path, built):
    monkeypatch.setattr(library, "JAX_LIBRARY", tmp_path / "libcudnn_grouped_jax.so")
    if built:
        library.JAX_LIBRARY.touch()
    assert __main__.info()["jax_library"] == ("built" if built else "not built")


def test_support_page_is_current():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (DOCS / "support.md").read_text() == generate.support_table(), "run python docs/generate.py"


def test_cuda_library_is_optional(monkeypatch, tmp_path):
    """Absent, or present and broken: a line of text, no exception."""
    monkeypatch.setattr(library, "_cuda_library", None)
    monkeypatch.setattr(library, "CUDA_LIBRARY", tmp_path / "absent.so")
    assert library.load_cuda() is False and library.cuda_status() == "not built"
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    monkeypatch.setattr(library, "CUDA_LIBRARY", broken)
    monkeypatch.setattr(library, "_device_count", lambda: 0)
    assert library.cuda_status() == "built, no CUDA device visible"
    monkeypatch.setattr(library, "_device_count", lambda: 1)
    monkeypatch.setattr(library, "_cuda_failure", None)
    assert library.cuda_status().startswith("failed to load: ")


@pytest.mark.parametrize("activation", eager.ACTIVATIONS, ids=lambda a: a.name)
def test_demo_formulas(activation):
    """The eager composition's slopes are the derivatives of the forward value, within the stated magnitudes."""
    generator = torch.Generator().manual_seed(0)
    count = 2 if activation.gated else 1
    inputs = [(torch.randn(4096, dtype=torch.float64, generator=generator) * 5).requires_grad_() for _ in range(count)]
    gradients = torch.autograd.grad(activation.forward(*inputs).sum(), inputs)
    plain = [x.detach() for x in inputs]
    slopes, value = activation.derivative(*plain)
    limits, value_limit = activation.magnitudes(*plain)
    torch.testing.assert_close(value, activation.forward(*plain))
    assert bool((value.abs() <= value_limit * (1 + 1e-12)).all())
    for gradient, slope, limit in zip(gradients, slopes, limits, strict=True):
        torch.testing.assert_close(slope, gradient)
        assert bool((slope.abs() <= limit * (1 + 1e-12)).all())


@pytest.fixture
def small_demo(monkeypatch):
    for name, value in {"TOKENS": 128, "HIDDEN": 64, "WIDTH": 64, "ROUNDS": 1}.items():
        monkeypatch.setattr(demo, name, value)


def test_demo_is_within_its_bounds(small_demo, capsys):
    assert __main__.main(["demo", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 12 and all(0 < row["share_of_bound"] <= 1 for row in rows)


def test_demo_fails_on_a_wrong_result(small_demo, monkeypatch, capsys):
    """Twice alpha, and one NaN, in what the operator returns."""
    monkeypatch.setattr(demo, "ACTIVATIONS", eager.ACTIVATIONS[:1])
    right = demo.fused
    monkeypatch.setattr(
        demo, "fused", lambda arguments: right({**arguments, "alpha_tensor": arguments["alpha_tensor"] * 2})
    )
    assert __main__.main(["demo"]) == 1 and "exceed" in capsys.readouterr().out

    def with_nan(arguments):
        result = right(arguments)
        result["dprob_tensor"][0] = torch.nan
        return result

    monkeypatch.setattr(demo, "fused", with_nan)
    assert __main__.main(["demo"]) == 1
