"""Execute the notebooks, and keep what they show.

    python tools/notebooks.py [--text] [NAME ...]

Each script `notebooks/*.py` (or those whose names begin with a NAME) is executed in a process, one
after the other, and its cells and their outputs are written to the `.ipynb` beside it. Exit status
1 if a cell fails or takes longer than `CELL_SECONDS`. With `--text` nothing is executed: prose is
renewed where no code has changed.
"""

import argparse
import base64
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spmd.render import html

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
CELL_SECONDS = 900
NOTEBOOK_SECONDS = 1800
_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
# of the cell's style, what drawings use
_USED_STYLE = re.compile(r"^ *--.*$|^\.spmd-cell svg (text.*)$", re.MULTILINE)
# it depends on what has run before
_CACHE = re.compile(r"^compiling [^\n]* not in the cache, because .*\n", re.MULTILINE)
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
_TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/tmp\w+")
# matplotlib's date
_VOLATILE = re.compile(
    r"^ *<metadata>.*?</metadata>\n|^<\?xml.*?\?>\n|^<!DOCTYPE.*?>\n", re.DOTALL | re.MULTILINE
)


def without_noise(text: str) -> str:
    """Text without what differs between runs or machines: addresses of objects, temporary folders,
    the checkout's folder.

    >>> run = f"{tempfile.gettempdir()}/tmpab12/run"
    >>> without_noise(f"<Net at 0x7f0011223344> in {run}, {ROOT}/layouts/fsdp.toml")
    '<Net> in /tmp/run, layouts/fsdp.toml'
    """
    return _TEMPORARY.sub("/tmp", _ADDRESS.sub("", text)).replace(f"{ROOT}/", "")


def as_image(match: re.Match) -> str:
    """A drawing inside HTML as an image: Git hosts remove `<svg>` from what a notebook shows, and
    keep `<img>`.
    """
    svg = match[0]
    if "xmlns=" not in svg:
        svg = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    rules = [line[1] or f"svg {{ {line[0]} }}" for line in _USED_STYLE.finditer(html.STYLE)]
    svg = re.sub(
        r"<svg\b([^>]*>)", rf'<svg color="#808080"\1<style>{"".join(rules)}</style>', svg, count=1
    )
    return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}">'


def tidy(notebook):
    """The notebook as it is committed: outputs that belong together are one, and nothing in them
    depends on the machine.
    """
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {
            key: value
            for key, value in cell.metadata.items()
            if key in ("lines_to_next_cell", "tags")
        }
        outputs = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = _CACHE.sub("", output.text)
                if not output.text.strip():
                    continue
            if (
                output.output_type == "stream"
                and outputs
                and outputs[-1].output_type == "stream"
                and outputs[-1].name == output.name
            ):
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        for output in outputs:
            if output.output_type == "stream":
                output.text = without_noise(output.text)
                continue
            output.metadata = {}
            output.pop("transient", None)
            for kind, data in output.get("data", {}).items():
                if kind.startswith("text/"):
                    data = _SVG.sub(as_image, data) if kind == "text/html" else data
                    output.data[kind] = without_noise(data)
                elif kind == "image/svg+xml":
                    output.data[kind] = _VOLATILE.sub("", data)
            if len(output.get("data", {})) > 1 and re.match(
                r"'?<", output.data.get("text/plain", "")
            ):
                # "<Figure size 700x300 with 1 Axes>" beside the figure, or HTML once more
                del output.data["text/plain"]
        if "outputs" in cell:
            cell.outputs = outputs
    notebook.metadata = {
        key: value for key, value in notebook.metadata.items() if key in ("jupytext", "kernelspec")
    }
    notebook.metadata["jupytext"].pop("text_representation", None)
    return notebook


def execute(script: Path, target: Path) -> None:
    """Execute the cells of a script, here, and write them with their outputs."""
    import jupytext
    import nbclient
    import nbformat

    notebook = jupytext.read(script)
    svg = "--InlineBackend.figure_formats={'svg'}"
    nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        extra_arguments=[svg],
        resources={"metadata": {"path": FOLDER}},
    ).execute()
    nbformat.write(tidy(notebook), target)


def renew_text(script: Path, target: Path) -> None:
    """Write the cells of a script with the outputs that a notebook already has.

    Raises:
      ValueError: the code is not that of the notebook.
    """
    import jupytext
    import nbformat

    before, after = nbformat.read(target, 4), jupytext.read(script)
    old, new = (
        [cell for cell in notebook.cells if cell.cell_type == "code"]
        for notebook in (before, after)
    )
    if [cell.source.strip() for cell in old] != [cell.source.strip() for cell in new]:
        raise ValueError(f"{script.name}: the code has changed; execute it")
    for cell, executed in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    nbformat.write(tidy(after), target)


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--text", action="store_true", help="renew the prose only")
    # the process that executes one script
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        execute(options.here, options.here.with_suffix(".ipynb"))
        return 0
    scripts = [
        path
        for path in sorted(FOLDER.glob("*.py"))
        if not options.names or path.name.startswith(tuple(options.names))
    ]
    if options.text:
        for script in scripts:
            renew_text(script, script.with_suffix(".ipynb"))
        return 0
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    failed = []
    for number, script in enumerate(scripts, 1):
        print(f"[{number}/{len(scripts)}] {script.name} ", end="", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            environment |= {
                "JUPYTER_RUNTIME_DIR": f"{folder}/runtime",
                "IPYTHONDIR": f"{folder}/ipython",
                "SPMD_CACHE": f"{folder}/cache",
            }
            try:
                done = subprocess.run(
                    [sys.executable, __file__, "--here", str(script)],
                    env=environment,
                    stderr=subprocess.PIPE,
                    text=True,
                    timeout=NOTEBOOK_SECONDS,
                )
                problem = done.stderr if done.returncode else ""
            except subprocess.TimeoutExpired:
                problem = f"not done after {NOTEBOOK_SECONDS} s"
        print(
            f"{'FAILED' if problem else 'executed'}, {time.monotonic() - start:.0f} s", flush=True
        )
        if problem:
            print(problem, file=sys.stderr)
            failed.append(script.name)
    print(
        f"{len(scripts) - len(failed)} of {len(scripts)} notebooks executed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed or not scripts else 0


if __name__ == "__main__":
    sys.exit(main())
