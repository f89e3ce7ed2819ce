"""The rules of docs/packages.md, read from the sources: who imports whom, and who may do what."""

import ast
import dataclasses
import functools
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spmd
from spmd.layout import schema
from spmd.layout.compiler import XLA_NAMES
from tests.processes import environment

ROOT = Path(spmd.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def tree_of(name):
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


@functools.cache
def nodes_of(name):
    return list(ast.walk(tree_of(name)))


# they only give rooms below a public name
ROOMS = {"callbacks.py", "loggers.py", "losses.py", "metrics.py", "optimizers.py", "ray.py"}
LEVELS = [
    {"errors.py", "base"},
    {"jaxpr", "render"},
    {"wire", "program_cache"},
    {"mesh.py", "models", "layout"},
    {"nn", "sync"},
    {"train", "data", "distributed"},
    {"planner", "run"},
    {"api.py", "resume.py", "trainer.py", "sweeps", "inference", "pretrained", *ROOMS},
    {"launch", "viz"},
    {"__init__.py", "__main__.py"},
]
# Within a level, imports stay inside one folder; these are the steps sideways that the design
# names.
SIDEWAYS = {
    ("base", "errors.py"),
    ("errors.py", "base"),  # old names of errors
    ("layout", "mesh.py"),  # a layout is checked against axis sizes
    ("train", "data"),  # a program is made for a batch, which is checked first
    ("api.py", "resume.py"),
    ("resume.py", "trainer.py"),
    ("api.py", "trainer.py"),  # `fit` is a face over the trainer
    ("sweeps", "api.py"),  # what comes of a trial is what `fit` would have given
    ("sweeps", "trainer.py"),
    ("sweeps", "inference"),
    ("inference", "trainer.py"),
    ("api.py", "inference"),  # a result can be exported
    ("callbacks.py", "inference"),  # one that lets a model write
    ("__main__.py", "__init__.py"),
}

COLLECTIVES = {
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "all_gather",
    "psum_scatter",
    "all_to_all",
    "ppermute",
    "pshuffle",
    "axis_index",
    "axis_size",
    "ragged_all_to_all",
}


def part(name):
    """The folder of the package, or the file at its top, that `name` belongs to."""
    return name.split("/")[0]


def level(name):
    """Which level a file is on."""
    levels = [number for number, parts in enumerate(LEVELS) if part(name) in parts]
    assert len(levels) == 1, (
        f"{name} is on no level: put its folder on one in LEVELS and in docs/packages.md"
    )
    return levels[0]


def file_of(module):
    """The file of a module of ours, or None for a name inside one."""
    stem = module.removeprefix("spmd").lstrip(".").replace(".", "/")
    for name in (f"{stem}.py", f"{stem}/__init__.py" if stem else "__init__.py"):
        if name in FILES:
            return name
    return None


def nodes(tree, *, functions=True):
    """Every node that runs, in functions too; what stands under `if TYPE_CHECKING` is for editors
    only.
    """
    for child in ast.iter_child_nodes(tree):
        if (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        ):
            continue
        yield child
        if functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from nodes(child, functions=functions)


def module_of(name):
    """The module that is in a file."""
    return "spmd." + name.removesuffix(".py").replace("/", ".") if name != "__init__.py" else "spmd"


@functools.cache
def imports(name, *, functions=True):
    """(line, module) of every import of the library in a file; `from package import module` counts
    as the module.
    """
    return list(_read_imports(name, functions))


def _read_imports(name, functions):
    for node in nodes(tree_of(name), functions=functions):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name)
                for alias in node.names
                if alias.name.split(".")[0] == "spmd"
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import; write it from spmd on"
            if (node.module or "").split(".")[0] == "spmd":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield node.lineno, inner if file_of(inner) else node.module


def test_every_file_is_on_a_level():
    assert {level(name) for name in FILES} >= set(range(len(LEVELS)))


def test_imports_go_down():
    wrong = []
    for name in FILES:
        for line, module in imports(name):
            target = file_of(module)
            assert target, f"{name}:{line}: there is no {module}"
            step = (part(name), part(target))
            down = level(target) < level(name)
            inside = step[0] == step[1]
            sideways = step in SIDEWAYS
            if not (down or inside or sideways):
                wrong.append(
                    f"{name}:{line} imports {module}: from level {level(name)} to level "
                    f"{level(target)}"
                )
    assert not wrong, "\n".join(wrong)


def test_the_rule_would_notice():
    """An import upwards, and one sideways, are found: the test above can fail."""
    assert (
        level("errors.py")
        < level("wire/collectives.py")
        < level("layout/check.py")
        < level("sync/gradient_sync.py")
        < level("train/step.py")
        < level("run/loop.py")
        < level("api.py")
    )
    assert ("data", "train") not in SIDEWAYS
    assert ("render", "jaxpr") not in SIDEWAYS
    assert ("mesh.py", "layout/check.py") not in SIDEWAYS


# What JAX and Flax do not document: attributes, and names of classes compared as text.
PRIVATE = re.compile(
    r"\b(func_filename|debug_info|with_unknown_names|name_stack|source_info\.traceback)\b"
    r"|\b_cache_size\(|\btracers\b|\b__name__ [!=]= \"[A-Z]"
)


def test_nothing_private_of_jax():
    files = [name for name, path in FILES.items() if "jax._src" in path.read_text(encoding="utf-8")]
    assert files == ["distributed/coordination.py", "planner/gpu_kernels.py"], (
        f"jax._src in {files}; the coordination service and the lowering of cuDNN's attention have "
        "no other face, and are used there only"
    )


def test_what_is_private_in_fact_is_used_in_one_file():
    uses = {}
    for name, path in FILES.items():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if PRIVATE.search(line):
                uses.setdefault(name, []).append(f"{name}:{number} {line.strip()}")
    assert "base/xla.py" in uses  # the rule would notice
    del uses["base/xla.py"]
    assert not uses, f"what JAX and Flax do not document, outside base/xla.py: {uses}"


# the params in which equations keep programs, and the names of equations that do
PROGRAM_PARAMS = re.compile(
    r"params(\.get\(|\[)\"(jaxpr|call_jaxpr|fun_jaxpr|branches|(body|cond)_(jaxpr|nconsts)|num_carry)\""
)


def test_programs_of_equations_are_found_in_one_file():
    uses = [
        f"{name}: {match.group()}"
        for name, path in FILES.items()
        for match in PROGRAM_PARAMS.finditer(path.read_text(encoding="utf-8"))
        if name not in ("jaxpr/inner_programs.py", "base/xla.py")
    ]
    assert not uses, f"ask spmd.jaxpr.inner_programs for them: {uses}"
    assert PROGRAM_PARAMS.search(FILES["jaxpr/inner_programs.py"].read_text(encoding="utf-8"))


def test_collectives_are_called_in_one_file():
    calls = []
    for name in FILES:
        if name == "wire/collectives.py":
            continue
        for node in nodes_of(name):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in COLLECTIVES
                and ast.unparse(node.value) in ("lax", "jax.lax")
            ):
                calls.append(f"{name}:{node.lineno} {node.attr}")
            if isinstance(node, ast.ImportFrom) and node.module == "jax.lax":
                calls += [
                    f"{name}:{node.lineno} {alias.name}"
                    for alias in node.names
                    if alias.name in COLLECTIVES
                ]
    assert not calls, f"collectives outside wire/collectives.py: {calls}"
    assert any(
        isinstance(node, ast.Attribute) and node.attr in COLLECTIVES
        for node in nodes_of("wire/collectives.py")
    )


def test_regions_by_device_are_made_in_one_file():
    def calls_shard_map(name):
        functions = [
            node.func
            for node in nodes_of(name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        return any(
            function.attr == "shard_map" and ast.unparse(function) == "jax.shard_map"
            for function in functions
        )

    files = [name for name in FILES if calls_shard_map(name)]
    assert files == ["base/xla.py"], (
        f"jax.shard_map( in {files}; spmd.base.xla.shard_map takes arrays without elements"
    )


def test_no_assert_statements():
    asserts = [
        f"{name}:{node.lineno}"
        for name in FILES
        for node in nodes_of(name)
        if isinstance(node, ast.Assert)
    ]
    assert not asserts, f"assert, which -O removes and which says nothing to a user: {asserts}"


# writes of a few bytes into pipes, which take all or none of so little, and to the terminal
SHORT = {
    "planner/compile_server.py",
    "distributed/watchdog.py",
    "run/signals.py",
    "launch/notebook_worker.py",
}


def test_unbuffered_writes_are_complete():
    """`os.write` and files without a buffer write a part of the bytes where a disk is almost full,
    without an error.
    """
    partial = set()
    for name in FILES:
        ignored = [
            node.value
            for node in nodes_of(name)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ]
        if any(ast.unparse(call.func) in ("os.write", "os.pwrite") for call in ignored):
            partial.add(name)
        for call in (node for node in nodes_of(name) if isinstance(node, ast.Call)):
            unbuffered = any(
                word.arg == "buffering" and ast.unparse(word.value) == "0" for word in call.keywords
            )
            if unbuffered and "'rb'" not in map(ast.unparse, call.args):
                partial.add(name)
    assert partial == SHORT, "write_at of spmd/base/output_files.py writes all of the bytes"


NAMING = (
    "name_errors(",
    "wrap_os_errors(",
    "replace_file(",
    "replace_atomically(",
    "suppress(OSError",
    "except OSError",
    "except (OSError",
)


def writes(node, around=""):
    """(Line, blocks around it) of each call that opens a file for writing with no name in the
    errors of what is written then.
    """
    if isinstance(node, ast.With):
        around += "".join(ast.unparse(item.context_expr) for item in node.items)
    elif isinstance(node, ast.Try):
        around += "".join(
            f"except {ast.unparse(handler.type)}" for handler in node.handlers if handler.type
        )
    elif isinstance(node, ast.Call):
        method = ast.unparse(node.func).rpartition(".")[2]
        constants = [
            ast.unparse(each).strip("'")
            for each in (*node.args, *(word.value for word in node.keywords))
        ]
        replaces = isinstance(node.func, ast.Attribute) and method in ("write_text", "write_bytes")
        if replaces or (
            method == "open" and {"w", "wb", "a", "ab", "x", "xb", "r+b"} & {*constants}
        ):
            yield node.lineno, around
    for child in ast.iter_child_nodes(node):
        yield from writes(child, around)


def test_every_written_file_is_named_in_errors():
    """The system's error of a full disk does not say which file it is about."""
    unnamed = {
        name
        for name in FILES
        for _, around in writes(tree_of(name))
        if not any(each in around for each in NAMING)
    }
    # a part of a file of `open_output`, and what another process prints
    assert unnamed == {"inference/weights.py", "planner/compile_server.py"}, (
        "open_output and name_errors of spmd/base/output_files.py name it"
    )


def test_every_public_name_is_documented():
    plain = [name for name in spmd.__all__ if not inspect.getdoc(getattr(spmd, name))]
    assert not plain, f"no docstring: {plain}"


def test_every_public_function_and_class_shows_an_example():
    callables = [name for name in spmd.__all__ if callable(getattr(spmd, name))]
    without = [name for name in callables if ">>>" not in (getattr(spmd, name).__doc__ or "")]
    assert not without, f"no example: {without}"


def test_every_module_says_what_it_is():
    plain = [name for name in FILES if not ast.get_docstring(tree_of(name))]
    assert not plain, f"no docstring: {plain}"


def test_no_module_has_the_name_of_a_public_function():
    functions = {name for name in spmd.__all__ if inspect.isfunction(getattr(spmd, name))}
    modules = {word for name in FILES for word in name.removesuffix(".py").split("/")}
    assert functions
    assert not functions & modules


PACKAGES = {
    name.removesuffix("/__init__.py"): ast.literal_eval(node.value)
    for name in FILES
    if "/" in name and name.endswith("/__init__.py")
    for node in tree_of(name).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_beside_a_public_function_has_its_name(package):
    """`spmd.data.csv` is a function or a module, and which one must not hang on what was imported
    before.
    """
    beside = {
        name.split("/")[-1].removesuffix(".py")
        for name in FILES
        if name.rpartition("/")[0] == package
    }
    assert not beside & set(PACKAGES[package])


def test_public_names_are_the_ones_that_editors_see():
    """The tables of names and the imports under TYPE_CHECKING say the same."""
    blocks = [node for node in tree_of("__init__.py").body if isinstance(node, ast.If)]
    (block,) = (node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = {name: f"{module}.{name}" for name, module in vars(spmd)["_HOMES"].items()}
    assert seen == {name: f"spmd.{name}" for name in vars(spmd)["_MODULES"]} | names


@functools.cache
def attributes_read():
    readers = FILES.keys() - {"layout/schema.py", "layout/toml_reader.py"}
    return {
        node.attr for name in readers for node in nodes_of(name) if isinstance(node, ast.Attribute)
    }


SECTIONS = [value for _, value in inspect.getmembers(schema, dataclasses.is_dataclass)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_of_a_layout_is_read(section):
    """By name, outside the two files that declare and spell it; the plain names of `[compiler]` by
    a table.
    """
    unread = [
        field.name
        for field in dataclasses.fields(section)
        if field.name not in attributes_read() | set(XLA_NAMES)
    ]
    assert not unread, f"{section.__name__}: nothing reads {unread}"


def test_files_of_tests_have_names_of_their_own():
    # pytest imports them by these
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


def test_no_word_of_a_machine_in_the_sources():
    files = [
        name
        for name, path in FILES.items()
        if re.search(r"/(home|Users|work|root)/", path.read_text(encoding="utf-8"))
    ]
    assert not files


def packages(name):
    """The `__init__.py` that run before a file does."""
    parts = name.split("/")[:-1]
    return {"/".join([*parts[:at], "__init__.py"]) for at in range(len(parts) + 1)} - {name}


def test_no_imports_go_round():
    """So every module can be the first that is imported: what it needs, packages too, never needs
    it while it is half there.
    """
    needs = {}
    for name in FILES:
        needs[name] = {file_of(module) for _, module in imports(name, functions=False)} - {name}
        needs[name] |= set().union(*map(packages, needs[name])) - packages(name) - {name}
    assert len(list(graphlib.TopologicalSorter(needs).static_order())) == len(FILES)


def test_no_imports_go_round_inside_functions():
    """Every module stands on its own, imports inside functions included; `if TYPE_CHECKING` does
    not count.
    """
    needs = {name: {file_of(module) for _, module in imports(name)} - {name} for name in FILES}
    assert len(list(graphlib.TopologicalSorter(needs).static_order())) == len(FILES)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("__main__")])
def test_every_module_imports(name):
    importlib.import_module(module_of(name))


FIRST = """
import importlib, os, sys
import flax.linen, flax.nnx, jax, numpy, optax, orbax.checkpoint
for name in sys.argv[1:]:
    if not (child := os.fork()):
        importlib.import_module(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.mark.slow
def test_every_module_imports_first():
    """Each in a fork of a process that has imported nothing else of the library."""
    names = [module_of(name) for name in FILES if not name.startswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", FIRST, *names],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
