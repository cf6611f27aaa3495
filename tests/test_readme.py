"""The README's examples."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readmes_lines_run():
    operators, networks = (
        block.split("```")[0] for block in (ROOT / "README.md").read_text().split("```python\n")[1:]
    )
    names = {}
    exec(operators, names)
    assert names["y"].shape == names["x"].shape
    assert names["layer"].kernel_generator.weight.grad.any()
    exec(networks, names)
    assert len(names["model"].feature_info) == 5
