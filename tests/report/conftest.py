import pytest
from matplotlib.figure import Figure


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """Return the list of the pictures that are saved, which take long to draw, without files."""
    figures: list[Figure] = []
    monkeypatch.setattr("dkcls.report.plots.save", lambda figure, picture: figures.append(figure))
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *arguments, **options: figures.append(figure)
    )
    return figures
