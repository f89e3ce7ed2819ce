"""Files that a user keeps are written beside and renamed, read from the sources."""

import ast
import re
from pathlib import Path

import spmd

ROOT = Path(spmd.__file__).parent
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}
REPLACING = {"replace_file", "replace_atomically"}
IN_PLACE = {  # by file and function, why no old contents are lost
    ("base/output_files.py", "open_output"): "its callers are looked at",
    ("distributed/secret.py", "user_secret"): "a new file, which is linked to its name",
    ("inference/exporter.py", "_finish"): "a new folder, which gets its name when it is complete",
    ("inference/weights.py", "__init__"): "a file of that folder",
    ("inference/weights.py", "_put"): "an entry of a file of that folder",
    ("launch/cli.py", "main"): "/dev/null",
    ("planner/compile.py", "_compile"): "a temporary folder",
    ("planner/compile_server.py", "_compile"): "a temporary folder",
    ("planner/compile_server.py", "_start"): "a log in a temporary folder",
    ("pretrained/safetensors_files.py", "write_file"): "a new folder",
    ("pretrained/write_weights.py", "_opened"): "a new folder",
    ("pretrained/write_weights.py", "_write_shards"): "a new folder",
    ("pretrained/write_weights.py", "finish"): "a new folder",
    ("run/history.py", "__init__"): "rows are appended",
    ("run/loggers.py", "__init__"): "records are appended",
    ("run/manifest.py", "write_manifest"): "the folder of a checkpoint that has no name yet",
    ("run/memory_folder.py", "create"): "a new file, which is renamed; the lock holds nothing",
    ("run/memory_folder.py", "remove_unused"): "the lock, which holds nothing",
    ("run/piece_file.py", "__enter__"): "a new file, which is renamed",
    ("run/time_account.py", "_write"): "a new file, which is renamed",
}


def called_name(call):
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def opens_for_writing(call):
    """Whether a call writes a file, or opens one for writing, by its path."""
    name = called_name(call)
    # a function of this name is the one of spmd/base/user_paths.py, which replaces the file
    is_method = isinstance(call.func, ast.Attribute)
    if name in ("open_output", "OutputFile") or (
        is_method and name in ("write_text", "write_bytes")
    ):
        return True
    if name != "open":
        return False
    words = [ast.unparse(each) for each in (*call.args, *(each.value for each in call.keywords))]
    flags = re.compile(r"os\.O_(WRONLY|RDWR|CREAT)|'[rwax]b?\+?b?'")
    return any(flags.search(word) and word.strip("'") not in ("r", "rb") for word in words)


def writes_in_place(node, function="", parts=frozenset()):
    """The function of each write to a path that no block of `replace_file` or `replace_atomically`
    gives.
    """
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.With):
        replacing = [
            ast.unparse(item.optional_vars)
            for item in node.items
            if isinstance(item.context_expr, ast.Call)
            and called_name(item.context_expr) in REPLACING
            and item.optional_vars
        ]
        parts = parts | {*replacing}
    if isinstance(node, ast.Call) and opens_for_writing(node):
        written = [ast.unparse(each) for each in node.args[:1]]
        if isinstance(node.func, ast.Attribute):
            written.append(ast.unparse(node.func.value))
        if not parts & {*written}:
            yield function
    for child in ast.iter_child_nodes(node):
        yield from writes_in_place(child, function, parts)


def test_a_write_in_place_is_noticed():
    lines = "def keep(path):\n    with {}:\n        {}.write_text('new')"
    for block, target, functions in (
        ("name_errors(path)", "path", ["keep"]),
        ("replace_file(path) as part", "path", ["keep"]),
        ("replace_file(path) as part", "part", []),
        ("replace_atomically(path) as part, part.open('wb') as file", "part", []),
        ("path.open('r+b') as file", "copy", ["keep", "keep"]),
        ("path.open('rb') as file", "copy", ["keep"]),
    ):
        assert [*writes_in_place(ast.parse(lines.format(block, target)))] == functions


def test_every_file_is_written_beside_and_renamed():
    """A write in place that fails, or is killed, leaves a part of a file, or an empty one."""
    in_place = {
        (name, function) for name, tree in TREES.items() for function in writes_in_place(tree)
    }
    assert in_place == set(IN_PLACE), "replace_file of spmd/base/user_paths.py"
