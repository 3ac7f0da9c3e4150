"""Every notebook runs through, in this process: what the tests have compiled is not compiled again.

Notebooks make themselves small where `PYTEST_CURRENT_TEST` is set, as pytest does. `make test-all`
runs them whole, too.
"""

import json
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

pytestmark = pytest.mark.long

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


class Shell(InteractiveShell):
    """What runs cells, with their magics and displays, without a kernel's process."""

    def enable_gui(self, gui=None):
        """There are no windows: pictures are drawn inline."""


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_through(path, is_whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if is_whole:
        monkeypatch.delenv("PYTEST_CURRENT_TEST")
    shell = Shell(config=Config({"HistoryManager": {"enabled": False}}))
    with warnings.catch_warnings(action="default"), plt.rc_context():
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                shell.run_cell("".join(cell["source"])).raise_error()
    plt.close("all")
    shell.reset(new_session=False)
