"""Layouts as text: there and back, where each rule stands, and what ships."""

import contextlib
import dataclasses
import itertools

import pytest

import spmd
from spmd.errors import LayoutError
from spmd.layout.gradients import GradientRule, Gradients
from spmd.layout.layout_files import shipped
from spmd.layout.schema import Batch, Default, Layout, OptimizerState, Remat, Rule
from spmd.layout.toml_reader import loads
from spmd.layout.toml_writer import dumps

SPECS = [
    (),
    (None,),
    ("data",),
    (None, "model"),
    ("data", None, "model"),
    (("data", "model"), None),
    (None, ("a", "b")),
]
GENERATED = {
    "empty": Layout(),
    "text": Layout(description='a "quoted" \\ word,\ta tab\nand a line', use_when="always"),
    "mesh": Layout(mesh=(("data", -1), ("model", 2))),
    "specs": Layout(params=tuple(Rule(f"a/{n}/*", spec) for n, spec in enumerate(SPECS))),
    "except": Layout(
        params=(Rule("**", ("data",), ("*/a", "{b,c}/**")), Rule('odd "name"', (None,)))
    ),
    "batch": Layout(
        batch=Batch(
            ("data", "model"), (Rule("y", ("data",)), Rule("z/**", ("data", None), ("z/a",)))
        )
    ),
    "two axes": Layout(batch=Batch((("data", "fsdp"),))),
    "axes": Layout(axes=(("embed", None), ("mlp", "model"), ("odd name", ("data", "model")))),
    "default": Layout(default=Default("shard:data", 0.25)),
    "zero": Layout(default=Default(max_replicated=0.0)),
    "error": Layout(default=Default("error")),
    "optimizer": Layout(optimizer=OptimizerState("data")),
    "owners": Layout(optimizer=OptimizerState(matrices="owner")),
    "gradients": Layout(gradients=Gradients("reduce_scatter")),
    "codecs": Layout(
        gradients=Gradients(
            "all_reduce",
            "int8",
            {"block": 128},
            error_feedback=True,
            start_step=10,
            bucket_bytes=1024,
            exact_axes=("data",),
            rules=(
                GradientRule("**/embedding", "exact", except_=("head/**",)),
                GradientRule("**/kernel", "power_sgd", {"rank": 2, "warm_start": False}),
            ),
        )
    ),
    "remat": Layout(remat=Remat("nothing", ("blocks/*", "**/mlp"))),
    "dots": Layout(remat=Remat("dots")),
    "sequence and experts": Layout(
        sequence=spmd.Sequence("context", "contiguous"), experts=spmd.Experts("expert")
    ),
}
GENERATED |= {
    f"{first} and {second}": dataclasses.replace(
        GENERATED[first],
        **{
            f.name: getattr(GENERATED[second], f.name)
            for f in dataclasses.fields(Layout)
            if f.name in second
        },
    )
    for first, second in itertools.permutations(
        ("mesh", "batch", "axes", "default", "optimizer", "gradients", "remat"), 2
    )
}


@pytest.mark.parametrize("layout", GENERATED.values(), ids=GENERATED)
def test_toml_round_trip(layout):
    assert loads(dumps(layout)) == layout
    assert layout == Layout() or loads(dumps(layout)) != Layout()


@pytest.mark.parametrize("name", shipped())
def test_shipped_layout(name):
    layout, text = Layout.load(name), shipped()[name].read_text(encoding="utf-8")
    assert loads(dumps(layout)) == layout
    assert loads(layout.to_toml()) == layout
    assert (layout.name, layout.source) == (name, f"layouts/{name}.toml")
    assert text.startswith('description = "')
    assert len(layout.description) > 20 and len(layout.use_when) > 20
    assert len(text.splitlines()) < 50
    assert sum(line.startswith("#") for line in text.splitlines()) >= 2
    assert layout.mesh


def test_shipped_layout_names():
    assert list(shipped()) == [
        "backup_workers",
        "context_parallel",
        "conv_data_dense_model",
        "data_parallel",
        "data_parallel_bf16",
        "diloco",
        "expert_parallel",
        "fsdp",
        "fsdp_bf16",
        "fsdp_pipeline_tensor",
        "fsdp_sequence_parallel",
        "fsdp_tensor_parallel",
        "hierarchical_int8",
        "parameter_server",
        "parameter_server_async",
        "pipeline",
        "pipeline_1f1b",
        "power_sgd",
        "sequence_parallel",
        "spatial",
        "tensor_parallel",
        "transformer_parallel",
        "zero1",
    ]
    layouts = [Layout.load(name) for name in shipped()]
    assert len(set(map(dumps, layouts))) == len(layouts)


def test_load_accepts_path_name_and_layout(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(shipped()["fsdp"].read_text())
    layout = Layout.load("fsdp")
    assert Layout.load(path) == Layout.load(str(path)) == Layout.load(layout) == layout
    assert Layout.load(path).source == str(path)
    assert Layout.load(path).name == "mine"


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("name", shipped())
def test_load_refuses_a_truncated_file(name, tmp_path, caplog):
    text, path, read = shipped()[name].read_text(encoding="utf-8"), tmp_path / "mine.toml", []
    for size in range(0, len(text), 1 if name == "fsdp" else 7):
        path.write_text(text[:size], encoding="utf-8")
        caplog.clear()
        with contextlib.suppress(LayoutError):
            Layout.load(path)
            read += [] if caplog.messages else [text[:size]]
    assert all(part.endswith("\n") for part in read) and len(read) < 20, (
        "a file that ends after a complete line is not noticed"
    )


@pytest.mark.parametrize(
    "text", ["", "\n", "# end\n", 'description = "a"\n', '[[params]]\npath = "w"\n']
)
def test_load_refuses_a_file_without_a_table(text, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(LayoutError, match=r"mine\.toml is empty, or was truncated|cannot be read"):
        Layout.load(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text(Layout(description="fast").to_toml())
    assert Layout.load(tmp_path / "mine.toml") == Layout(name="mine", description="fast")


def test_load_warns_of_a_last_line_without_a_line_break(tmp_path, caplog):
    (tmp_path / "mine.toml").write_text("[default]\nmax_replicated = 0")
    assert Layout.load(tmp_path / "mine.toml").default.max_replicated == 0
    assert ["does not end with a line break" in message for message in caplog.messages] == [True]


def test_rules_carry_line_numbers():
    text = """# a comment, then a rule

[[params]]
path = "a"
spec = ["-"]

[[batch.rules]]
path = "x"
spec = ["data"]

  [[ params ]]  # the second
spec = ["data"]
path = "b"
[[batch.rules]]
path = "y"
spec = ["data"]
[[params]]
path = "c"
spec = []
"""
    layout = loads(text)
    assert [(rule.path, rule.line) for rule in layout.params] == [("a", 3), ("b", 11), ("c", 17)]
    assert [(rule.path, rule.line) for rule in layout.batch.rules] == [("x", 7), ("y", 14)]


def test_line_is_ignored_in_rule_equality():
    assert Rule("a", ("data",), line=3) == Rule("a", ("data",))


def problems(text):
    with pytest.raises(LayoutError) as caught:
        loads(text, "mine.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    "text, line, why",
    [
        ("mesh = 3", 1, "3 is not a table"),
        ("description = 3", 1, "3 is not a string"),
        ("\n[mesh]\ndata = 1.5", 3, "1.5 is not a whole number"),
        ("[mesh]\ndata = -1\nmodel = -1", 1, "more than one -1"),
        ("params = 3", 1, "is not a list of rules"),
        ('[[params]]\npath = "a"\nspec = [1]', 1, "spec [1] is not a list of mesh axes"),
        ('[[params]]\npath = "a"\nspec = [[]]', 1, "spec [[]] is not a list of mesh axes"),
        ('[[params]]\npath = "a"\nspec = [""]', 1, 'spec [""] is not a list of mesh axes'),
        ("[axes]\nmlp = 3", 2, "spec [3] is not a list of mesh axes"),
        ('[default]\nmax_replicated = "half"', 2, '"half" is not a number'),
        ("[default]\nmax_replicated = true", 2, "true is not a number"),
        ("[default]\nmax_replicated = nan", 2, "nan is not a share"),
        ('[remat]\nmodules = "a"', 2, '"a" is not a list'),
        ("[remat]\nmodules = [3]", 2, "3 is not a path"),
        ('[remat]\nmodules = ["{a"]', 2, "braces must close"),
        ('[batch]\nspec = "data"', 2, 'spec "data" is not a list of mesh axes'),
        ('[batch]\naxis = "data"', 2, "nothing reads it"),
        ("[elastic]\nstale = 3", 1, "nothing reads it"),
        ('["default"]\nparam = "error"', 2, "nothing reads it"),
    ],
)
def test_invalid_value_is_reported_with_line(text, line, why):
    message = problems(text)
    assert message.startswith("mine.toml cannot be read\n1 problem:\n")
    assert f"  line {line}: " in message
    assert why in message
    assert "fix: " in message


def test_problems_in_file_order():
    message = problems('[remat]\nsave = "x"\n[gradients]\ncodec = "y"\n[mesh]\ndata = 0\n[z]\n')
    lines = [
        line.split(":")[0].strip() for line in message.splitlines() if line.startswith("  line")
    ]
    assert lines == ["line 2", "line 4", "line 6", "line 7"]


def test_import_key_is_rejected():
    with pytest.raises(LayoutError, match="nothing reads it"):
        loads('import = "os"')


def test_to_toml():
    layout = spmd.Layout(
        params=(spmd.Rule("**/kernel", (None, "model")),), gradients=spmd.Gradients("all_reduce")
    )
    assert (
        layout.to_toml()
        == '[[params]]\npath = "**/kernel"\nspec = ["-", "model"]\n\n[gradients]\nreduction = '
        '"all_reduce"\n'
    )


def test_dicts_of_axes_in_code():
    given = spmd.Layout(mesh={"data": -1, "model": 2}, axes={"heads": "model", "embed": None})
    assert given == spmd.Layout(
        mesh=(("data", -1), ("model", 2)), axes=(("heads", "model"), ("embed", None))
    )


@pytest.mark.parametrize("value", ["data=8", 8, [1, 2], ["ab", "cde"]])
@pytest.mark.parametrize("name", ["mesh", "axes"])
def test_axes_that_are_no_pairs_are_refused(name, value):
    with pytest.raises(
        spmd.errors.OptionError, match=rf"Layout: {name}=.* is .*\.\n    fix: such as {name}="
    ):
        spmd.Layout(**{name: value})


def test_lists_of_mesh_axes_in_code():
    given = spmd.Layout(axes={"mlp": ["data", "model"]})
    assert (
        given.axes == (("mlp", ("data", "model")),)
        and hash(given)
        and loads(given.to_toml()).axes == given.axes
    )


WRONG = {
    "bool": ({"mesh": {"data": True}}, "mesh: 'data' is True"),
    "text": ({"mesh": {"data": "8"}}, "mesh: 'data' is '8'"),
    "number": ({"axes": {"mlp": 3}}, "axes: 'mlp' is 3"),
    "nested": ({"axes": {"mlp": [["data"]]}}, "axes: 'mlp' is"),
    "name": ({"axes": {1: "data"}}, "axes: 1 is 'data'"),
    "twice": ({"mesh": (("data", 4), ("data", 2))}, 'mesh: "data" is there twice'),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG.keys())
def test_values_of_axes_that_are_none(given, message):
    with pytest.raises(spmd.errors.OptionError, match=message):
        spmd.Layout(**given)
