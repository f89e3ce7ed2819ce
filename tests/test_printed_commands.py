"""Shell commands in messages and pages: none writes to the file that it reads, which the shell
empties first; those that need no network and no GPU are run.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import spmd
from spmd.data.text_files import _check_no_array
from spmd.distributed.secret import FILE, user_secret
from spmd.errors import ClusterError, DataError, LayoutError, OptionError
from spmd.launch.script_fit import call_at_fit
from spmd.launch.slurm import SlurmJob, submit
from spmd.planner.target import load as load_target
from spmd.program_cache.folder import distrust

ROOT = Path(spmd.__file__).parent
PROGRAM = re.compile(
    r"(?<![\w/.-])(cat|chmod|cp|dd|iconv|jq|ln|mkdir|mv|python|rm|sed|sort|tee|truncate) "
    r"(?=-|\w*(path|folder|file|script)\b|o-w)"
)
PROGRAM_NAME = re.compile(PROGRAM.pattern.partition("(?=")[0])
RUN_BELOW = {  # by file, the programs that its messages name
    ("data/text_files.py", "jq"),
    ("distributed/secret.py", "rm"),
    ("launch/script_fit.py", "python"),
    ("launch/slurm.py", "mkdir"),
    ("program_cache/folder.py", "chmod"),
}
NOT_RUN = {  # by file and program, why
    ("launch/doctor_checks.py", "tee"): "it writes /etc/hosts, and appends",
}
ODD = "my run's $(data)"  # a name that a command must quote
REDIRECTED = re.compile(r"([^\n`|;&]*?\s)>>?\s*([^\s`|;&)]*\.[a-z]+\b)")
SUFFIXES = ("", ".jsonl", ".json", ".toml", ".csv", ".html", ".txt", ".md")


def filled_in(node, suffix):
    """A string of the sources, with names in place of what it is formatted with: `{path.stem}.csv`
    is `path` where that is a .csv.
    """
    text = ""
    for part in node.values if isinstance(node, ast.JoinedStr) else [node]:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        source = ast.unparse(part.value)
        base = re.sub(r"\W|stem|name|quote|shlex", "", source)
        text += base if source.endswith(".stem") else base + suffix
    return text


def overwritten(text):
    """Files that a command reads, and that its output replaces."""
    return [
        target
        for words, target in REDIRECTED.findall(text)
        if target.strip("\"'") in re.split(r"[\s\"']+", words)
    ]


def test_a_command_that_empties_its_input_is_noticed():
    assert overwritten("as  jq -c '.[]' a.jsonl > a.jsonl  writes them") and overwritten(
        'sort "a.txt" b.txt >a.txt'
    ) == ["a.txt"]
    node = ast.parse("f\"jq '.[]' {name.name} > {name.stem}.jsonl\"").body[0].value
    assert any(overwritten(filled_in(node, suffix)) for suffix in SUFFIXES)
    assert not overwritten("spmd layouts show fsdp > mine.toml")


@pytest.mark.parametrize(
    "file", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_no_message_prints_a_command_that_empties_its_input(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        # else it redirects nothing
        if any(isinstance(part, ast.Constant) and ">" in str(part.value) for part in parts):
            assert not any(overwritten(filled_in(node, suffix)) for suffix in SUFFIXES), (
                ast.unparse(node)
            )


def test_no_page_shows_a_command_that_empties_its_input():
    pages = [
        path for folder in ("docs", "examples") for path in (ROOT.parent / folder).rglob("*.md")
    ]
    assert pages
    for page in pages:
        assert not overwritten(page.read_text(encoding="utf-8")), page


def has_docstring(node):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return isinstance(node, documented) and ast.get_docstring(node) is not None


def test_every_program_in_a_message_is_run_below():
    named = set()
    for file in ROOT.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if not PROGRAM_NAME.search(source):
            continue
        tree = ast.parse(source)
        formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        parts = {part for node in formatted for part in node.values}
        parts |= {node.body[0].value for node in ast.walk(tree) if has_docstring(node)}
        plain = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts
        ]
        for node in (*formatted, *plain):
            name = file.relative_to(ROOT).as_posix()
            text = filled_in(node, "")
            named |= {(name, program[1]) for program in PROGRAM.finditer(text)}
    assert named == RUN_BELOW | set(NOT_RUN)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working folder with an odd name, beside a file that no command may touch."""
    folder = tmp_path / ODD
    folder.mkdir()
    (tmp_path / "my").write_text("mine")
    (folder / "my").write_text("mine")
    monkeypatch.chdir(folder)
    yield folder
    assert (tmp_path / "my").read_text() == (folder / "my").read_text() == "mine"


def run_printed(command, cwd):
    """The output of a command, run as it is pasted into a shell."""
    env = os.environ | {"PYTHONPATH": str(ROOT.parent), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["sh", "-c", command], cwd=cwd, capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_run_jq_that_writes_an_array_by_line(place):
    array = place / f"{ODD}.jsonl"
    content = b'[{"text": "one"},\n {"text": "two, and"}]'
    array.write_bytes(content)
    with pytest.raises(DataError, match="is a JSON array") as raised:
        _check_no_array(str(array))
    run_printed(re.fullmatch(r"one .*, as  (.*)  writes them\.", raised.value.fix)[1], place)
    assert array.read_bytes() == content
    (written,) = {path.name for path in place.iterdir()} - {"my", array.name}
    _check_no_array(str(place / written))
    assert (place / written).read_text() == '{"text":"one"}\n{"text":"two, and"}\n'


@pytest.mark.parametrize("kind", ["link", "public", "short"])
def test_run_rm_of_a_secret(kind, place):
    """What a link leads to stays."""
    secret = place / FILE
    first = user_secret(place)
    original = place / "kept"
    if kind == "link":
        secret.rename(original)
        secret.symlink_to(original)
    elif kind == "public":
        secret.chmod(0o644)
    else:
        secret.write_bytes(first[:5])
    with pytest.raises(ClusterError) as raised:
        user_secret(place)
    run_printed(re.fullmatch(r"(rm .*); a new one is created\.", raised.value.fix)[1], place)
    assert user_secret(place) not in (None, first)
    assert kind != "link" or original.read_bytes() == first


def test_run_mkdir_for_the_output_of_a_job(place):
    script = place / "train.py"
    script.write_text("import spmd")
    job = SlurmJob(output="logs/a/%j.log")
    with pytest.raises(OptionError, match="there is no folder") as raised:
        submit([str(script)], job)
    run_printed(raised.value.fix, place)
    assert (place / "logs" / "a").is_dir()
    assert {path.name for path in place.iterdir()} == {"my", "logs", "train.py"}


def test_run_chmod_of_a_cache_that_others_can_write(place):
    cache = place / "programs"
    cache.mkdir()
    (cache / "a program").write_bytes(b"compiled")
    cache.chmod(0o777)
    command = re.search(r"\((chmod .*) changes that\)", distrust(cache))[1]
    run_printed(f"{command} {shlex.quote(str(cache))}", place)
    assert not distrust(cache)
    assert (cache / "a program").read_bytes() == b"compiled"


def test_run_python_that_shows_where_a_script_fails(place, monkeypatch):
    script = place / f"{ODD}.py"
    content = "import sys\nprint(sys.argv)\nif len(sys.argv) > 0:\n    raise ZeroDivisionError\n"
    script.write_text(content)
    with pytest.raises(OptionError, match="before it called") as raised:
        call_at_fit(str(script), [], lambda fit, options: None)
    command = raised.value.fix.removesuffix(" shows where.").replace("python", sys.executable, 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert "line 4" in done.stderr and "ZeroDivisionError" in done.stderr
    assert script.read_text() == content


@pytest.mark.system
def test_run_commands_of_spmd_that_show_what_is_right(place):
    """A layout that cannot be read; a layout to copy; a target that is not known."""
    layout = place / "mine.toml"
    layout.write_text("[[params")
    with pytest.raises(LayoutError) as raised:
        spmd.Layout.load(layout)
    command = re.search(r"`(spmd [^`]*)` prints a layout that is right", str(raised.value))[1]
    shown = run_printed(f"{shlex.quote(sys.executable)} -m {command}", place)
    assert layout.read_text() == "[[params"
    layout.write_text(shown)
    assert spmd.Layout.load(layout).to_toml() == spmd.Layout.load("data_parallel").to_toml()
    with pytest.raises(OptionError) as raised:
        load_target("no.toml")
    command = re.search(r"`(spmd [^`]*)` lists", str(raised.value))[1]
    assert "h100" in run_printed(f"{shlex.quote(sys.executable)} -m {command}", place)
