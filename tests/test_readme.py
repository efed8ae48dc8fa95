"""The Python blocks of the README and the training page run as they stand."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_blocks(page, count):
    """Names left by the page's Python blocks, run one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert len(blocks) == count
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page} block {number}", "exec"), names)
    return names


def test_training_page():
    layer = run_blocks("docs/training.md", 1)["layer"]
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_readme():
    names = run_blocks("README.md", 4)
    assert names["d_row"].shape == (names["M"], 2 * names["N"], 1)
    assert names["outputs"][2].shape == (names["M"], 1, 1)
    assert bool(names["op"].check_support())
    assert names["x"].grad.shape == names["x"].shape
