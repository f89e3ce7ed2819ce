"""The pages list every error, layout key, public name and benchmark, and their links resolve."""

import dataclasses
import importlib
import inspect
import re

import pytest
from docpages import PAGES, ROOT, prose

import spmd
from spmd import errors
from spmd.layout.gradients import Gradients
from spmd.layout.schema import Layout
from spmd.layout.trained import Adapter
from spmd.wire.codec import CODECS, codec_options


def text(name):
    return PAGES[f"docs/{name}.md"].read_text(encoding="utf-8")


def sections(name):
    """Heading of the second level -> the text below it."""
    parts = re.split(r"^## (.+)$", text(name), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def anchors(page):
    """What may follow a "#" in a link to a page: its headings, in lower case, with "-" for spaces
    and without marks.
    """
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        linked = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        name = linked.relative_to(ROOT).as_posix() if linked.is_relative_to(ROOT) else str(linked)
        if not linked.exists() or (anchor and anchor not in anchors(name)):
            wrong.append(target)
    assert not wrong


def test_anchors_are_found():
    assert {"known-limits", "measured-facts", "design-decisions"} <= anchors("docs/decisions.md")
    assert "gradients" in anchors("docs/layouts.md") and "a-codec" in anchors("docs/extending.md")


CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.SpmdError)
}


def test_every_error_has_its_place():
    entries = sections("errors")
    assert list(entries) == list(CLASSES), (
        "docs/errors.md: a heading for each class, in the order of spmd/errors.py"
    )
    for name, below in entries.items():
        assert re.search(r"^- \*\*When\*\*: \S.{20,}$", below, re.MULTILINE), name
        assert re.search(r"^- \*\*Fix\*\*: \S.{20,}$", below, re.MULTILINE), name


def test_the_tree_of_errors_is_that_of_the_sources():
    tree = re.search(
        r"SpmdError\n(?:[ ]*[├│└].*\n)+",
        inspect.cleandoc(errors.__doc__ or "").replace("\n    ", "\n"),
    )
    assert tree and tree[0] in text("errors")


def keys():
    """Section of a layout file -> its keys."""
    not_keys = {"name", "source"}
    for field in dataclasses.fields(Layout):
        if field.name in not_keys:
            continue
        if dataclasses.is_dataclass(field.default):
            # keys of the same table
            inline = {"options"} if hasattr(field.default, "codec") else set()
            yield (
                f"[{field.name}]",
                [key.name for key in dataclasses.fields(field.default) if key.name not in inline],
            )
        elif field.name in ("params", "activations"):
            yield f"[[{field.name}]]", ["path", "spec", "except"]
        elif field.name == "adapters":
            yield (
                "[[adapters]]",
                [
                    "except" if key.name == "except_" else key.name
                    for key in dataclasses.fields(Adapter)
                    if key.compare
                ],
            )
        elif field.name in ("mesh", "axes"):
            yield f"[{field.name}]", []


@pytest.mark.parametrize("section, names", [pytest.param(*pair, id=pair[0]) for pair in keys()])
def test_every_key_of_a_layout_is_listed(section, names):
    below = sections("layouts")[section]
    assert not [name for name in names if f"`{name}`" not in below]
    listed = set(re.findall(r"^\| `(\w+)` \|", below, re.MULTILINE))
    assert not listed - set(names), "keys that do not exist"


def test_options_of_codecs_and_the_top_are_listed():
    below = sections("layouts")["[gradients]"]
    assert not [
        option for codec in CODECS for option in codec_options(codec) if f"`{option}`" not in below
    ]
    assert not [codec for codec in CODECS if f'`"{codec}"`' not in below]
    assert (
        "`description`" in sections("layouts")["At the top"]
        and len(list(keys())) == 19
        and Gradients().codec == "exact"
    )


RETURNED = {  # types that public functions return and that users do not construct
    "spmd.data.records.Batches",
    "spmd.inference.ensemble.Calibration",
    "spmd.inference.ensemble.Evaluation",
    "spmd.inference.workers.Answer",
    "spmd.inference.exporter.ExportReport",
    "spmd.planner.step_profile.StepProfile",
    "spmd.sweeps.results.Sweep",
    "spmd.sweeps.results.TrialResult",
}


def reference():
    """Every name that the reference shows."""
    pages = [
        path.read_text(encoding="utf-8")
        for page, path in PAGES.items()
        if page.startswith("docs/reference/")
    ]
    named = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    # a function whose module has its name
    return [re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in named]


def test_the_reference_has_every_public_name():
    wanted = set()
    for name in spmd.__all__:
        value = getattr(spmd, name)
        if not inspect.ismodule(value):
            wanted.add(f"spmd.{name}")
            continue
        inner = getattr(
            value,
            "__all__",
            [
                n
                for n, v in vars(value).items()
                if not n.startswith("_") and inspect.isclass(v) | callable(v)
            ],
        )
        wanted |= {
            f"spmd.{name}.{member}" for member in inner if name != "errors" or member in CLASSES
        }
    # it is spmd.errors.SpmdError
    wanted = {name for name in wanted | RETURNED if name != "spmd.SpmdError"}
    shown = reference()
    assert len(shown) == len(set(shown))
    assert wanted == set(shown), (
        f"missing {sorted(wanted - set(shown))}, too many {sorted(set(shown) - wanted)}"
    )


def test_names_in_the_reference_have_docstrings():
    for name in reference():
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        assert inspect.getdoc(value), name


def test_benchmarks_are_listed_with_their_commands():
    below = text("benchmarks")
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        assert f"(../benchmarks/results/{path.name})" in below, path.name
        command = re.search(
            r"`(?:JAX_PLATFORMS=cpu )?(python [^`]+)`", path.read_text(encoding="utf-8")
        )
        assert command and f"`{command[1]}`" in below, f"{path.name}: {command and command[1]}"


def test_every_shipped_layout_is_listed():
    from spmd.layout.layout_files import load, shipped

    listed = [
        f"| `{name}` | {load(name).description} | {load(name).use_when} |" for name in shipped()
    ]
    assert "\n".join(listed) in text("layouts"), (
        "docs/layouts.md: `description` and `use_when` of each file"
    )


def test_the_cookbook_lists_every_how_to():
    listed = re.findall(
        r"^- \[(.+)\]\((\w+\.md)#",
        PAGES["docs/cookbook/index.md"].read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    pages = [
        page
        for page in PAGES
        if page.startswith("docs/cookbook/") and not page.endswith("index.md")
    ]
    headings = [
        (heading, page.rpartition("/")[2])
        for page in pages
        for heading in re.findall(r"^## (.+)$", prose(page), re.MULTILINE)
    ]
    assert sorted(listed) == sorted(headings) and len(listed) >= 20


RECEIVED = {  # beside RETURNED, types that users get and do not construct: they need no example
    "spmd.callbacks.Info",
    "spmd.callbacks.Sample",
    "spmd.loggers.RunFacts",
    "spmd.nn.Routing",
    "spmd.optimizers.GradientNorm",
    "spmd.optimizers.LossScale",
    "spmd.optimizers.SpikeSkip",
    "spmd.optimizers.WeightAverage",
    "spmd.wire.LocalState",
    "spmd.wire.ServerState",
    "spmd.wire.WireState",
    "spmd.wire.ZeroState",
}


def described(text, titles):
    """The names that sections of a docstring describe: `name: ...`, or `one, another: ...`."""
    parts = re.split(r"^(\w+):\n", text, flags=re.MULTILINE)
    below = "".join(
        part for title, part in zip(parts[1::2], parts[2::2], strict=True) if title in titles
    )
    return {
        name
        for names in re.findall(r"^  ([\w, ]+):", below, re.MULTILINE)
        for name in names.split(", ")
    }


def missing(name):
    """What the docstring of a public callable lacks: arguments, what is returned, or an example."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    is_class, text = inspect.isclass(value), inspect.getdoc(value) or ""
    if not (is_class or inspect.isfunction(value)) or (is_class and issubclass(value, Exception)):
        return []  # a metric or a loss that is an object, or an error
    signature = inspect.signature(value)
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    wanted = {
        each.name
        for each in signature.parameters.values()
        if not (is_class and each.kind in variadic)
    }
    lacks = (
        sorted(wanted - described(text, ("Args", "Attributes")))
        if name not in RECEIVED or not is_class
        else []
    )
    lacks = [argument for argument in lacks if not argument.startswith("_")]
    if (
        not is_class
        and signature.return_annotation is not None
        and not re.search(r"^Returns:$", text, re.MULTILINE)
    ):
        lacks.append("Returns:")
    if name not in RECEIVED | RETURNED and ">>>" not in text and "Example:" not in text:
        lacks.append("Example:")
    return lacks


def test_docstrings_say_arguments_results_and_an_example():
    assert not {name: lacks for name in reference() if (lacks := missing(name))}


METHODS = {  # those that most programs call
    "spmd.Trainer": ("place", "step", "steps", "evaluate", "predict", "restore", "rebuild"),
    "spmd.Result": ("evaluate", "predict", "export"),
    "spmd.Plan": ("fixes", "save", "explain"),
    "spmd.Ensemble": ("predict", "members", "uncertainty", "evaluate", "calibrate", "ask"),
    "spmd.ExportedModel": ("predict",),
    "spmd.callbacks.Info": ("stop", "ask"),
}


@pytest.mark.parametrize("name", METHODS)
def test_docstrings_of_methods_say_arguments_and_results(name):
    module, _, attribute = name.rpartition(".")
    for method in METHODS[name]:
        function = getattr(getattr(importlib.import_module(module), attribute), method)
        text, signature = inspect.getdoc(function) or "", inspect.signature(function)
        assert set(signature.parameters) - {"self"} <= described(text, ("Args",)), method
        assert signature.return_annotation is None or "Returns:" in text, method


def test_docstrings_are_written_by_hand_and_show_no_entities():
    """A dataclass without a docstring has its signature for one; an entity is shown as it is
    written.
    """
    for name in reference():
        module, _, attribute = name.rpartition(".")
        text = inspect.getdoc(getattr(importlib.import_module(module), attribute)) or ""
        assert not text.startswith(f"{attribute}(") and "Initialize self" not in text, name
        assert not re.search(r"&#?\w+;", text), name


def test_missing_parts_of_docstrings_are_found(monkeypatch):
    def undocumented(first, second) -> int:
        """Adds.

        Args:
          first: a number.
        """
        return first + second

    monkeypatch.setattr(spmd.viz, "undocumented", undocumented, raising=False)
    assert missing("spmd.viz.undocumented") == ["second", "Returns:", "Example:"]
