"""The README's Python blocks run as they stand, one after the other."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README block {number}", "exec"), names)
    assert names["d_row"].shape == (names["M"], 2 * names["N"], 1)
    assert names["outputs"][2].shape == (names["M"], 1, 1)
    assert bool(names["op"].check_support())
