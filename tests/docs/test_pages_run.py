"""Examples on the pages run: Python page by page, layouts and host files, cheap commands; and every
option exists.
"""

import argparse
import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import types

import cloudpickle
import jax
import pytest
from docpages import PAGES, ROOT, blocks, blocks_of, is_shown, printing, prose, with_outputs

from spmd.launch import cli
from spmd.launch.hostfile import read_hosts
from spmd.layout.layout_files import load
from spmd.layout.toml_reader import loads
from spmd.planner.compile import COMPILERS
from spmd.pretrained.name_map import NameMap
from spmd.wire.codec import CODECS
from spmd.wire.reduction_registry import REDUCTIONS

pytestmark = pytest.mark.system

ALL = [block for page in PAGES for block in blocks(page)]
PYTHON = [
    block
    for block in ALL
    if block.language == "python" and not block.note.startswith(("tensorflow", "no-run"))
]
# commands that are quick with any arguments; and those that only print: --dry-run, --kubernetes
RUN = ("layouts", "targets")
MARKS = ("", "hidden", "tensorflow")


@pytest.fixture
def registries():
    """Pages that add a codec or a reduction of their own leave none behind."""
    kept = [(table, dict(table)) for table in (CODECS, REDUCTIONS)]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)


@pytest.mark.parametrize("page", list(dict.fromkeys(block.page for block in PYTHON)))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, registries, request):
    """And prints what the page shows in the block after it, if the page shows outputs.
    `--regenerate-goldens` writes them.
    """
    monkeypatch.chdir(tmp_path)
    # outputs are those without the extra gpu-compiler
    monkeypatch.setitem(COMPILERS, "cuda", ("not_installed", *COMPILERS["cuda"][1:]))
    name = "page_" + re.sub(r"\W", "_", page)
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    cloudpickle.register_pickle_by_value(module)  # as in a notebook
    outputs = {}
    for block in PYTHON:
        if block.page == page:
            with printing(functools.partial(outputs.setdefault, block.line)):
                exec(
                    compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec"),
                    vars(module),
                )
    assert jax.device_count() == 8
    compare_outputs(page, outputs, write=request.config.getoption("--regenerate-goldens"))


def compare_outputs(page, outputs, *, write):
    """What blocks have printed, by their lines, with what the page shows."""
    pairs = [pair for pair in itertools.pairwise(blocks(page)) if pair[1].language == "output"]
    shown = {before.line: after for before, after in pairs if before.language == "python"}
    if not shown:
        return
    of_page = [block for block in PYTHON if block.page == page and outputs[block.line].strip()]
    # hidden ones may show one
    printed = {
        block.line: outputs[block.line]
        for block in of_page
        if block.note == "" or block.line in shown
    }
    if write:
        PAGES[page].write_text(
            with_outputs(PAGES[page].read_text(encoding="utf-8"), printed), encoding="utf-8"
        )
        return
    assert sorted(shown) == sorted(printed), (
        f"{page}: lines of blocks that show an output, and of those that print"
    )
    for line, output in printed.items():
        assert is_shown(output, shown[line].text), f"{shown[line]}: the block prints\n{output}"


def test_outputs_are_compared_and_written():
    assert (
        is_shown("a 1.5 s\nb \n", "a ... s\nb")
        and not is_shown("a\nb", "a")
        and not is_shown("a", "a\nb")
    )
    page = "```python\nprint(1)\n```\n\n```output\n2\n\n3\n```\nText.\n\n```python\nprint(2)\n```\n"
    written = with_outputs(page, {2: "1\n", 13: "2\n"})
    assert (
        written
        == "```python\nprint(1)\n```\n\n```output\n1\n```\nText.\n\n```python\nprint(2)\n```\n\n"
        "```output\n2\n```\n"
    )
    assert with_outputs(written, {2: "1\n", 10: "2\n"}) == written


def first_program(page):
    """What a reader pastes: the first Python block of a page, with no hidden block before it."""
    block = next(block for block in PYTHON if block.page == page)
    assert block.note == "", f"{block}: hidden code comes before the first program"
    return block.text


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_program_of_a_page_learns_and_triggers_no_note(
    page, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("first_program")
    with caplog.at_level("INFO", "spmd"):
        exec(compile(first_program(page), page, "exec"), vars(module))
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("spmd")]
    losses = module.result.history["loss"]
    quarter = len(losses) // 4
    assert quarter and sum(losses[-quarter:]) < 0.7 * sum(losses[:quarter]), losses


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_program_of_a_page_runs_in_an_empty_folder(page, tmp_path):
    (tmp_path / "program.py").write_text(first_program(page), encoding="utf-8")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XLA_", "JAX_", "SPMD_"))
    }
    environment = {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and "loss" in run.stdout, run.stdout + run.stderr
    assert "note:" not in run.stderr and "warning" not in run.stderr.lower(), run.stderr


def test_a_block_that_is_not_run_says_why():
    noted = [block for block in ALL if block.language == "python"]
    wrong = [
        str(block)
        for block in noted
        if block.note not in MARKS and not re.fullmatch(r"no-run: \w.{8,}", block.note)
    ]
    assert not wrong, (
        f"python blocks whose fence says neither nothing nor `no-run: REASON`: {wrong}"
    )
    assert len(PYTHON) > 40 and any(block.note == "tensorflow" for block in noted)


def test_python_is_in_fences():
    """Indented blocks are not run, so they must not be Python; and every fence names its
    language.
    """
    code = re.compile(r"^(import |from \w+ import |def |class |@)|^\w+ = |^for .*:$", re.MULTILINE)
    unfenced = [str(block) for block in ALL if block.language == "" and block.note != "indented"]
    unfenced += [
        str(block) for block in ALL if block.note == "indented" and code.search(block.text)
    ]
    assert not unfenced


def test_blocks_are_found():
    text = (
        "a\n```python no-run: needs a cluster\nx = 1\n\n```\n\n    spmd layouts\n\n<!-- python\ny "
        "= 2\n-->\n~~~toml\n[mesh]\n~~~\n"
    )
    blocks = [(block.line, block.language, block.note, block.text) for block in blocks_of(text)]
    assert blocks == [
        (3, "python", "no-run: needs a cluster", "x = 1"),
        (7, "", "indented", "spmd layouts"),
        (10, "python", "hidden", "y = 2"),
        (13, "toml", "", "[mesh]"),
    ]


def test_right_follows_left():
    """Each TensorFlow idiom is followed by a block that runs, before the next idiom."""
    page = blocks("docs/from_distributed_tensorflow.md")
    kinds = [
        "left" if block.note == "tensorflow" else "right"
        for block in page
        if block.note != "hidden"
    ]
    assert kinds.count("left") >= 28
    assert not [pair for pair in itertools.pairwise([*kinds, "left"]) if pair == ("left", "left")]


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "toml"], ids=str)
def test_toml_can_be_read(block, tmp_path):
    path = tmp_path / "shown.toml"
    path.write_text(block.text)
    if "[jobs]" in block.text:
        assert read_hosts(path)
    elif "[[tensors]]" in block.text:
        assert NameMap.load(path).tensors
    else:
        assert load(path) != loads(""), "a layout that says something"


def commands():
    """Every line of a block that begins with `spmd`, without its comment, and what the page shows
    below the block's last line.
    """
    for block, after in itertools.pairwise([*ALL, None]):
        if block.language in ("", "sh"):
            lines = block.text.replace("\\\n", "").splitlines()
            for number, line in enumerate(lines):
                if line.strip().startswith("spmd "):
                    shown = (
                        after.text
                        if after and after.language == "output" and number == len(lines) - 1
                        else ""
                    )
                    yield pytest.param(
                        shlex.split(line, comments=True)[1:],
                        shown,
                        id=f"{block.page}:{block.line + number}",
                    )


@pytest.mark.parametrize(("words", "shown"), list(commands()))
def test_commands_are_right(words, shown, tmp_path, monkeypatch, capsys):
    """All are parsed; those that only print are run."""
    words = words[: words.index(">")] if ">" in words else words
    spmd_words = words[: words.index("--")] if "--" in words else words
    cli._parser().parse_args(spmd_words)
    if any(word in spmd_words for word in ("--dry-run", "--kubernetes")) or (
        spmd_words[0] in RUN and "--model" not in spmd_words
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").touch()
        assert cli.main(words) == 0
        printed = capsys.readouterr().out
        assert is_shown(printed, shown) if shown else printed, printed
    else:
        assert not shown, "the output of a command that is not run"


def parsers(parser):
    """A parser and all below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def test_options_in_the_text_exist():
    known = {
        option for parser in parsers(cli._parser()) for option in parser._option_string_actions
    }
    scripts = [
        path
        for folder in ("examples", "benchmarks", "tests/distributed", "tests/faults")
        for path in (ROOT / folder).rglob("*.py")
    ]
    texts = "".join(path.read_text(encoding="utf-8") for path in scripts)
    unknown = []
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", code):
                foreign = code.startswith(
                    (
                        "salloc",
                        "scancel",
                        "srun ",
                        "#SBATCH",
                        "--signal=",
                        "tensorboard",
                        "docker run",
                    )
                )
                if option not in known and f'"{option}"' not in texts and not foreign:
                    unknown.append(f"{page}: {option} in `{code}`")
    assert not unknown
    assert {"--stall", "--max-restarts"} <= known and "--no-such-option" not in known


def test_the_command_line_says_what_it_can(capsys):
    for words in (
        ["plan", "--help"],
        ["launch", "--help"],
        ["search", "--help"],
        ["finetune", "--help"],
        ["generate", "--help"],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0 and f"spmd {words[0]}" in capsys.readouterr().out
    assert os.environ["SPMD_CACHE"]
