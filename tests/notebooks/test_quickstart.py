"""The notebook: the same as its script, kept without outputs, and it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

# A process of its own: what Jupyter warns of is not ours to fail on, and its event loop ends with it.
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
notebook.cells.append(nbformat.v4.new_code_cell("import os; print(os.getpid())"))
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[2] + "/done.ipynb")
"""


def cells(notebook):
    return [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_pair_agrees(path):
    import jupytext

    script = path.with_suffix(".py")
    assert cells(jupytext.read(path)) == cells(jupytext.read(script)), f"cure: jupytext --sync {path.name}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_stripped(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert set(cell["metadata"]) <= {"lines_to_next_cell"}  # jupytext's note of blank lines in the script
    assert set(notebook["metadata"]) == {"jupytext", "kernelspec"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs(path, tmp_path):
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    outputs = [
        out for cell in json.loads((tmp_path / "done.ipynb").read_text(encoding="utf-8"))["cells"] for out in cell.get("outputs", [])
    ]
    kinds = [kind for out in outputs for kind in out.get("data", {})]
    text = "".join("".join(out.get("text", "")) + "".join(out.get("data", {}).get("text/plain", "")) for out in outputs)
    assert "image/png" in kinds  # the curve
    assert text.count("Arrayviz") == 2  # the shardings
    assert text.count("eval_accuracy") == 14  # six evaluations and the last picture of the bar, for both layouts
    assert text.count("samples/s") == 2  # the bar is one output that is redrawn
    assert "test accuracy 0.9" in text
    kernel = int("".join(outputs[-1]["text"]))
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)
