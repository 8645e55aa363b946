"""docs/notebooks: each runs from its first cell to its last, in a new kernel; what it shows is asserted in its cells.

They are stored without outputs: a curve that nobody has made again soon shows what the code no longer does. On a quiet
machine of two cores the first takes some seconds; the others, which train or start engines, take more than a minute and
run with FULL=1, in the order in which they are read, since the third and the fifth look at the run of the second.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 600
"""Limit of a cell: the longest trains, after it has made a policy and started an engine."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.full] if n else []) for n, path in enumerate(NOTEBOOKS)],
)
def test_it_runs_to_its_end(path: Path, place: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(place)}})
    client.execute(env={**os.environ, "IPYTHONDIR": str(place), "JUPYTER_RUNTIME_DIR": str(place)})
    assert any(cell.get("outputs") for cell in notebook.cells)


def test_they_are_stored_without_outputs_and_their_links_lead_somewhere() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5"]
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            assert not cell.get("outputs") and cell.get("execution_count") is None, (path.name, cell.source)
            links = re.findall(r"\]\((?!\w+:)([^)\s]+)\)", cell.source) if cell.cell_type == "markdown" else []
            assert all((FOLDER / link).is_file() for link in links), (path.name, links)
