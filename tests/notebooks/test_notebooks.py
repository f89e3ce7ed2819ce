"""The notebooks: the same as their scripts, executed without an error, and they run and show what
they say.
"""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)

# A process of its own: what Jupyter warns of is not ours to fail on, and its event loop ends with
# it.
RUN = """
import json, sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
for cell in notebook.cells:
    for line, instead in json.loads(sys.argv[3]).items():
        cell.source = cell.source.replace(line, instead)
notebook.cells.append(nbformat.v4.new_code_cell("import notebook_values; notebook_values.check(%r, globals())" % sys.argv[4]))
notebook.cells.append(nbformat.v4.new_code_cell("import os; print(os.getpid())"))
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[2] + "/done.ipynb")
"""  # noqa: E501


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a notebook has put out, all cells together: text, kinds of media, and what was set in
    Markdown and HTML.
    """

    text: str
    kinds: list[str]
    markdown: str
    html: str

    @classmethod
    def of(cls, outputs):
        kinds = [kind for out in outputs for kind in out.get("data", {})]

        def part(kind):
            return "".join("".join(out.get("data", {}).get(kind, "")) for out in outputs)

        return cls(
            "".join("".join(out.get("text", "")) for out in outputs) + part("text/plain"),
            kinds,
            part("text/markdown"),
            part("text/html"),
        )


def cells(notebook):
    return [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]


@by_notebook
def test_pair_agrees(path):
    import jupytext

    script = path.with_suffix(".py")
    assert cells(jupytext.read(path)) == cells(jupytext.read(script)), (
        f"fix: tools/notebooks.py {path.stem}"
    )


@by_notebook
def test_committed_copy_is_executed(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), (
        f"fix: tools/notebooks.py {path.stem}"
    )
    assert len(code) <= 10  # one story
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert re.search("image/(png|svg)", json.dumps(outputs))


@by_notebook
def test_committed_copy_is_tidy(path):
    import nbformat

    specification = importlib.util.spec_from_file_location(
        "tools_notebooks", ROOT / "tools" / "notebooks.py"
    )
    tool = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tool)
    text = path.read_text(encoding="utf-8")
    assert nbformat.writes(tool.tidy(nbformat.reads(text, 4))) == text.rstrip("\n")
    assert str(ROOT) not in text and "/home/" not in text and "site-packages" not in text


def test_notebooks_are_small():
    assert sum(path.stat().st_size for path in (ROOT / "notebooks").iterdir()) < 3_000_000


def quickstart(shown):
    # two curves of the result, two bars' of the loss, two arrays
    assert shown.html.count("<svg") == 6
    labels = re.findall(r'text-anchor="middle">([^<]*)</text>', shown.html)
    # who holds the kernel; and an axis of each curve
    assert [label for label in labels if label != "step"] == ["0-7", *"01234567"]
    assert labels.count("step") == 4
    # mesh and table
    assert (
        re.search(r"<td>data 3</td><td[^>]*>6</td><td[^>]*>7</td>", shown.html)
        and ">bytes/device</th>" in shown.html
    )
    # beside the bars; the curves below them have a point for each evaluation
    assert shown.text.count("eval_accuracy") == 2
    assert shown.html.count("<circle") >= 2 * 5
    assert shown.text.count("samples/s") == 2  # the bar is one output that is redrawn
    assert "test accuracy 0.9" in shown.text


def parameter_server(shown):
    # two plots, and the drawing of the servers' timeline
    assert shown.kinds.count("image/png") == 2 and "<svg" in shown.html
    rows = re.findall(
        r"^(\w[\w, /]*?) +(0\.\d{3}) +([\d.]+) +([\d.]+|never)$", shown.text, re.MULTILINE
    )
    names = [
        "synchronous",
        "2 spares",
        "asynchronous",
        "asynchronous, scaled",
        "DiLoCo, every 10",
        "asynchronous, rate / 8",
    ]
    assert [name for name, *_ in rows] == names


def plan_before_you_rent(shown):
    """From a plan that does not fit, by fixes that are planned, to a layout file that trains."""
    assert "ESTIMATE by XLA:CPU" in shown.html or "compiled by XLA:GPU" in shown.html
    # the plan's three drawings, the search's front, an array, the curves
    assert shown.html.count("<svg") >= 6
    assert "DOES NOT FIT" in shown.text
    fixes = re.findall(r"^\[remat\] save = .*: (does not fit|fits), ", shown.text, re.MULTILINE)
    assert len(fixes) >= 1 and fixes[-1] == "fits"
    steps = [
        float(step)
        for step in re.findall(r"^\d+ +\w+ on .* ([\d.]+) ms +\d\.\d\d ", shown.text, re.MULTILINE)
    ]
    assert len(steps) > 1 and steps == sorted(steps)
    assert "# Found by spmd.search for 1x4xsmall" in shown.text and "[mesh]" in shown.text


def table(markdown):
    """Name and cells of each row of the Markdown table."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in markdown.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows[2:]}


def layouts(shown):
    """What is held and sent, against what the model's size says; and one loss."""
    rows, numbers = table(shown.markdown), 64 * 256 + 256 + 256 * 64 + 64 + 64 * 10 + 10
    params, moments, sent = (
        {name: int(row[at].replace(",", "")) for name, row in rows.items()} for at in range(3)
    )
    assert params["data_parallel"] == params["zero1"] == 4 * numbers
    assert moments["data_parallel"] == 2 * 4 * numbers + 4  # and the count of steps
    assert (
        params["fsdp"] == 4 * ((numbers - 10) // 8 + 10)
        and moments["zero1"] == moments["fsdp"] == 2 * params["fsdp"] + 4
    )
    assert params["tensor_parallel"] == 4 * (numbers - (2 * 64 * 256) // 2)
    exchanged = 2 * 7 * 4 * numbers // 8
    assert exchanged <= sent["data_parallel"] < exchanged + 64  # and the metrics
    assert (
        len({row[3] for row in rows.values()}) == 1
        and max(float(row[4]) for row in rows.values()) < 1e-5
    )
    assert float(rows["data_parallel"][3]) < 0.5  # it has learnt: at first it is log 10
    assert (
        shown.kinds.count("image/png") == 1
        and f"{sent['fsdp']:,} bytes sent by each device per step" in shown.text
    )


def model_parallel(shown):
    """Ticks and idle shares, as the formula has them; and one loss."""
    idle = re.findall(
        r"^(\w+) +(\d+) ticks +([\d.]+)% idle, by the formula ([\d.]+)%", shown.text, re.MULTILINE
    )
    assert [(name, int(ticks)) for name, ticks, *_ in idle] == [
        ("gpipe", 22),
        ("1f1b", 22),
        ("circular", 38),
    ]
    assert (
        [float(share) for *_, share, _ in idle]
        == [float(share) for *_, share in idle]
        == [27.3, 27.3, 15.8]
    )
    assert (
        len(
            re.findall(
                r"^\w+: LayerStack of 8 layers: .* \d+ ticks, (?:27.3|15.8)% idle\.",
                shown.text,
                re.MULTILINE,
            )
        )
        == 3
    )
    differences = [
        float(number) for number in re.findall(r"differ by at most ([\d.]+e-\d+)", shown.text)
    ]
    assert len(differences) == 4 and max(differences) < 1e-4
    start, end = map(float, re.search(r"from ([\d.]+) to ([\d.]+)\.", shown.text).groups())
    assert end < 0.5 * start


def on_the_wire(shown):
    """Bytes by the codecs' arithmetic, and losses in the order that the text says."""
    rows = table(shown.markdown)
    sent, error, last = (
        [float(row[at].replace(",", "")) for row in rows.values()] for at in (0, 2, 3)
    )
    exact, rounded, bytes_, top, lost, power = range(6)
    assert (
        list(rows)[1:3] == ["bfloat16", "int8"]
        and sent[exact] == 2 * 7 * 4 * (64 * 256 + 256 + 256 * 10 + 10) // 8
    )
    assert 0.5 <= sent[rounded] / sent[exact] < 0.501 and 0.25 < sent[bytes_] / sent[exact] < 0.26
    assert sent[top] == sent[lost] < 0.05 * sent[exact] and sent[power] < 0.1 * sent[exact]
    assert error[exact] == 0 < error[rounded] < 2**-7 < error[bytes_] < 0.1 < min(error[3:])
    assert (
        max(last[rounded], last[bytes_]) < 1.02 * last[exact]
        and last[top] < 1.2 * last[exact] < 2 * last[exact] < last[lost]
    )
    assert shown.kinds.count("image/png") == 1 and "int8: 3 (75.0 KiB)" in shown.text


def sweep_and_ensemble(shown):
    """Both tables, three curves, and a vote that is better than its members."""
    assert shown.html.count("<table>") == 2 and shown.html.count("<tr>") == 2 * 17
    assert (
        shown.html.count("dropped at step 5<") == 12
        and shown.html.count("dropped at step 20<") == 3
    )
    # loss and accuracy of three; all scores
    assert shown.html.count("<svg") == 6 and shown.kinds.count("image/png") == 1
    assert (
        "[(16, 5), (4, 20), (1, 80)]" in shown.text
        and "16 networks, 2 compiled programs, 8 devices" in shown.text
    )
    scores = [
        [float(loss), float(right)]
        for loss, right in re.findall(
            r"^(?:ensemble|trial \d+) +([\d.]+) +([\d.]+)", shown.text, re.M
        )
    ]
    (together, *alone), accuracies = zip(*scores, strict=True)
    assert len(alone) == 3 and together < min(alone) and min(accuracies) > 0.9


def from_distributed_tensorflow(shown):
    rows = {
        name: list(map(float, numbers.split()))
        for name, numbers in re.findall(
            r"^(synchronous|two spares|asynchronous) +([\d. ]+)$", shown.text, re.M
        )
    }
    seconds, accuracy, dropped, staleness = zip(*rows.values(), strict=True)
    assert len(rows) == 3 and seconds[0] > seconds[1] > seconds[2] and min(accuracy) > 0.8
    assert dropped == (0, 2 * 24 * 4, 0) and staleness[:2] == (0, 0) and staleness[2] > 3
    assert (
        "equal to a run that was not stopped: True" in shown.text and shown.html.count("<svg") == 2
    )
    together, *alone = [
        float(loss) for loss in re.findall(r"^(?:ensemble|trial \d+) +([\d.]+)", shown.text, re.M)
    ]
    assert len(alone) == 3 and together < max(alone)
    assert "the same class for 100.0% of 261 digits" in shown.text


def finetune(shown):
    """Samples that become answers, and a folder that is read again."""
    samples = re.findall(r"^step (\d+): What does the cow say\? -> (.*)$", shown.text, re.MULTILINE)
    assert [int(step) for step, _ in samples] == [0, 20, 40, 60, 80, 100]
    assert samples[0][1] != "moo" == samples[-1][1]
    assert re.findall(r"^ +(\w+): (\w+)$", shown.text, re.MULTILINE)[-8:][0] == ("cow", "moo")
    assert "48 wide, 2 layers, 123.5 KiB read" in shown.text and shown.html.count("<svg") >= 1


def bits_per_character(shown):
    """Bits by name; where a name is shown twice, the last."""
    rows = re.findall(r"^(\S[^:\n]*?) +([\d.]+) bits per character$", shown.text, re.MULTILINE)
    return {name: float(bits) for name, bits in rows}


def character_model(shown):
    """The wavefront's ticks, two equal losses, and a table with the best first."""
    pattern = r"Four devices take (\d+) ticks for (\d+) chunks of time\. .* takes (\d+)\."
    ticks, chunks, alone = map(int, re.search(pattern, shown.text).groups())
    assert ticks == chunks + 3 and alone == 4 * chunks
    assert f"{chunks} chunks of time: {2 * ticks} ticks" in shown.text
    # the curves; the wavefront is an SVG
    assert shown.kinds.count("image/png") == 1 and "<svg" in shown.html
    differences = re.findall(r"^largest difference in +\d+ steps: (\S+)$", shown.text, re.M)
    assert len(differences) == 4 and float(differences[-1]) < 1e-4
    bits = list(bits_per_character(shown).items())[-9:]
    assert len(dict(bits)) == 9 and 'The "with" statement' in shown.text


def test_committed_character_model_is_below_all_counts():
    """Its text says so; the tests run fewer steps."""
    path = ROOT / "notebooks" / "09_character_model.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    bits = bits_per_character(Shown.of(outputs))
    counts = [value for name, value in bits.items() if name.startswith("counts, order ")]
    assert len(counts) == 6
    assert max(bits["one device, plain Flax"], bits["four devices, spmd"]) < min(counts)


SHOWS = {
    "00_quickstart": quickstart,
    "01_layouts": layouts,
    "02_model_parallel": model_parallel,
    "03_gradients_on_the_wire": on_the_wire,
    "04_parameter_server": parameter_server,
    "05_plan_before_you_rent": plan_before_you_rent,
    "06_sweep_and_ensemble": sweep_and_ensemble,
    "07_from_distributed_tensorflow": from_distributed_tensorflow,
    "08_finetune_an_open_model": finetune,
    "09_character_model": character_model,
}


QUICK = ("00_quickstart",)  # the others compile many programs, or long ones
# lines that the tests replace: the plans of a small model, for a GPU with so little memory that it
# does not fit either; a shorter training
SMALLER = {
    "05_plan_before_you_rent": {
        "= 32_000, 1024, 24, 16, 1024, 64": "= 256, 64, 4, 4, 64, 32",
        'target = "4xl4"': "import notebook_values; target = notebook_values.small_target(folder)",
        '"data_parallel", "zero1", "fsdp", "pipeline"': '"data_parallel", "fsdp"',
        "compiles=16": "compiles=4",
    },
    "09_character_model": {"STEPS = 128, 16, 300": "STEPS = 128, 16, 40"},
}


@pytest.mark.system
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem not in QUICK), id=path.name)
        for path in NOTEBOOKS
    ],
)
def test_runs(path, tmp_path):
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    variables = environment(
        JUPYTER_RUNTIME_DIR=tmp_path / "runtime", IPYTHONDIR=tmp_path / "ipython", PYTHONPATH=paths
    )
    replaced = SMALLER.get(path.stem, {})
    assert all(
        path.with_suffix(".py").read_text(encoding="utf-8").count(line) == 1 for line in replaced
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(tmp_path), json.dumps(replaced), path.stem],
        env=variables,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    outputs = [
        out
        for cell in json.loads((tmp_path / "done.ipynb").read_text(encoding="utf-8"))["cells"]
        for out in cell.get("outputs", [])
    ]
    SHOWS[path.stem](Shown.of(outputs[:-1]))
    kernel = int("".join(outputs[-1]["text"]))
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)
