"""From shapes to specs: which rule wins, which dim a default shards, and that the cost is linear in
the model's size.
"""

import dataclasses
import random

import jax
import pytest

from spmd.base import path_match
from spmd.base.specs import spec_text
from spmd.errors import LayoutError
from spmd.layout import fixes
from spmd.layout.check import fit_layout
from spmd.layout.gradients import GradientRule, Gradients
from spmd.layout.layout_files import shipped
from spmd.layout.resolve import Resolved, codec_rules, rule_matcher, shard_largest_dim
from spmd.layout.schema import Batch, Default, Layout, OptimizerState, Rule
from spmd.layout.summary import notes, rows, summary
from spmd.mesh import MeshSpec

MESH = MeshSpec.parse("data=4,model=2")


def shapes(**arrays):
    return {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in arrays.items()}


def placed(layout, params, names=None, mesh=MESH):
    return fit_layout(layout, params, names or {}, mesh).placements


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((8, 64), (None, "data")),
        ((64, 8), ("data", None)),
        ((64, 64), ("data", None)),
        ((6, 64, 62), (None, "data", None)),
        ((1366, 12), (None, "data")),
        ((10,), ()),
        ((6, 10), ()),
        ((), ()),
        ((0, 3), ()),
    ],
)
def test_default_shards_largest_divisible_dim(shape, spec):
    place = placed(Layout(default=Default("shard:data")), shapes(w=shape))["w"]
    assert place.spec == spec
    assert place.chosen_by == (
        "default shard:data" if spec else "default shard:data, but no dim divides by 4"
    )


@pytest.mark.parametrize(
    "spec, shape, further",
    [
        ((), (512, 64), ("data", None)),
        ((None, "model"), (512, 64), ("data", "model")),
        (("model",), (512, 64), ("model", "data")),
        (("model", None), (512, 6), ("model", None)),
        (("data",), (512, 64), ("data",)),
        ((("data", "model"),), (512, 64), (("data", "model"),)),
    ],
)
def test_optimizer_state_is_sharded_further_than_parameter(spec, shape, further):
    assert shard_largest_dim(spec, shape, "data", MESH) == further
    layout = Layout(params=(Rule("w", spec),), optimizer=OptimizerState("data"))
    place = placed(layout, shapes(w=shape))["w"]
    assert (place.spec, place.state_spec) == (spec, further)


def test_optimizer_state_follows_parameter_by_default():
    place = placed(Layout(params=(Rule("w", (None, "model")),)), shapes(w=(8, 8)))["w"]
    assert place.state_spec == place.spec == (None, "model")


def test_except_leaves_parameter_to_another_rule():
    rules = (Rule("**/kernel", ("data",), ("head/*",)), Rule("head/kernel", (None, "model")))
    placements = placed(
        Layout(params=rules), shapes(**{"up/kernel": (8, 8), "head/kernel": (8, 8)})
    )
    assert {path: (place.spec, place.chosen_by) for path, place in placements.items()} == {
        "up/kernel": (("data",), "rule 1"),
        "head/kernel": ((None, "model"), "rule 2"),
    }


def test_precedence_path_rule_logical_axes_default():
    layout = Layout(
        params=(Rule("ruled", (None, "data")),),
        axes=(("mlp", "model"), ("embed", None)),
        default=Default("shard:data"),
    )
    names = {"ruled": ("mlp", "embed"), "named": ("mlp", "embed"), "half": (None, "mlp")}
    placements = placed(
        layout, shapes(ruled=(8, 8), named=(8, 8), half=(8, 8), plain=(8, 8)), names
    )
    assert {path: (place.spec, place.chosen_by) for path, place in placements.items()} == {
        "ruled": ((None, "data"), "rule 1"),
        "named": (("model", None), "axes (mlp, embed)"),
        "half": ((None, "model"), "axes (-, mlp)"),
        "plain": (("data", None), "default shard:data"),
    }


def test_fewer_logical_names_than_dims():
    layout = Layout(axes=(("embed", None), ("heads", "model")))
    placements = placed(
        layout,
        shapes(query=(8, 4, 6), bias=(4, 6)),
        {"query": ("embed", "heads"), "bias": ("heads",)},
    )
    assert {path: (place.spec, place.chosen_by) for path, place in placements.items()} == {
        "query": ((None, "model"), "axes (embed, heads)"),
        "bias": (("model",), "axes (heads)"),
    }


def test_several_logical_names_on_one_dim():
    layout = Layout(axes=(("heads", "model"), ("kv", None), ("embed", "data")))
    place = placed(layout, shapes(w=(8, 8)), {"w": (("heads", "kv"), "embed")})["w"]
    assert (place.spec, place.chosen_by) == (("model", "data"), "axes (heads and kv, embed)")


UNKNOWN = Layout(axes=(("embed", "data"), ("heads", "model")), source="mine.toml")


@pytest.mark.parametrize(
    "names, shape, fix, spec, added",
    [
        (("embed", "kv"), (8, 6), 'add  kv = "-"  to [axes]', ("data", None), {"kv": None}),
        (
            ("kv", "wide"),
            (8, 6),
            'add  kv = "-"  and  wide = "-"  to [axes]',
            (None, None),
            {"kv": None, "wide": None},
        ),
        (
            ("embed", "model"),
            (8, 6),
            'add  model = "model"  to [axes]',
            ("data", None),
            {"model": "model"},
        ),
        (
            ("heads", "model"),
            (8, 6),
            'add  model = "-"  to [axes]',
            ("model", None),
            {"model": None},
        ),
        (
            ("embad", "heads"),
            (8, 6),
            'did you mean "embed"? Or add  embad = "-"  to [axes]',
            (None, "model"),
            {"embad": None},
        ),
        (
            ("embad", "heads"),
            (9, 6),
            'add  embad = "-"  to [axes]',
            (None, "model"),
            {"embad": None},
        ),
        (("embed", "kv"), (9, 6), "", (None, None), None),
    ],
)
def test_unknown_logical_name_fixes_fit(names, shape, fix, spec, added):
    all_shapes, all_names = shapes(w=shape, other=(8, 8)), {"w": names, "other": ("embed", "heads")}
    with pytest.raises(LayoutError) as caught:
        placed(UNKNOWN, all_shapes, all_names)
    rule = f'a rule  path = "w"  spec = {spec_text(spec)}'
    wanted = f"{fix}, or {rule}." if fix else f"{rule}, or a width divisible by 4, such as 12."
    assert str(caught.value).partition("fix: ")[2] == wanted
    placed(dataclasses.replace(UNKNOWN, params=(Rule("w", spec),)), all_shapes, all_names)
    if added is not None:
        placed(
            dataclasses.replace(UNKNOWN, axes=(*UNKNOWN.axes, *added.items())),
            all_shapes,
            all_names,
        )


def test_logical_names_are_ignored_without_axes():
    assert (
        placed(Layout(), shapes(w=(8, 8)), {"w": ("mlp", "embed")})["w"].chosen_by
        == "default replicate"
    )


def test_bytes_per_device_and_copies():
    layout = Layout(params=(Rule("a", ("data", "model")), Rule("b", ("model",)), Rule("c", ())))
    placements = placed(layout, shapes(a=(8, 8), b=(8, 8), c=(8, 8)))
    assert [place.bytes_per_device(MESH) for place in placements.values()] == [32, 128, 256]
    assert [place.copies(MESH) for place in placements.values()] == [1, 4, 8]


def test_summary_lists_specs_and_origins(golden):
    layout = Layout(params=(Rule("a", ("data", "model"), line=7),), source="mine.toml")
    resolved = fit_layout(layout, shapes(a=(8, 8), b=(8,)), {}, MESH)
    assert rows(resolved) == [
        ("a", "float32[8, 8]", '["data", "model"]', "rule 1, line 7", "32 B", "x1"),
        ("b", "float32[8]", "replicated", "default replicate", "32 B", "x8"),
    ]
    golden("resolve_summary_lists_specs_and_origins", summary(resolved))


@pytest.mark.parametrize(
    ("layout", "axes", "idle", "mesh"),
    [
        (Layout(), {"data": 2, "model": 4}, ["model"], {"data": 8}),
        (Layout(), {"model": 2, "data": 2, "other": 3}, ["model", "other"], {"data": 12}),
        (
            Layout(batch=Batch((("replica", "data"),))),
            {"replica": 2, "data": 2, "model": 2},
            ["model"],
            {"replica": 2, "data": 4},
        ),
        (
            Layout(mesh=(("data", 2), ("model", 4))),
            {"data": 2, "model": 4},
            ["model"],
            {"data": 8, "model": 1},
        ),
        (
            Layout(axes=(("mlp", "model"),)),
            {"data": 2, "model": 2, "other": 2},
            ["model", "other"],
            {"data": 8, "model": 1},
        ),
    ],
    ids=["one", "two", "the innermost of two data axes", "in [mesh]", "in [axes]"],
)
def test_mesh_without_idle_axes_keeps_all_devices_and_names(layout, axes, idle, mesh):
    assert Resolved(layout, MeshSpec(tuple(axes.items())), {}).mesh_without(idle) == MeshSpec(
        tuple(mesh.items())
    )


def test_note_unused_mesh_axis():
    idle = fit_layout(Layout(), shapes(w=(8,)), {}, MESH)
    assert idle.idle_axes() == ("model",)
    assert notes(idle)[1:] == [
        'note: the layout does not use mesh axis "model" (2 devices); the model\'s own code must.'
    ]
    assert (
        fit_layout(Layout(batch=Batch((("data", "model"),))), shapes(w=(8,)), {}, MESH).idle_axes()
        == ()
    )


def test_idle_axis_fix_skips_mesh_that_does_not_fit():
    layout = Layout(axes=(("embed", "data"), ("mlp", "model")), source="mine.toml")
    with pytest.raises(LayoutError, match="they carry embed") as caught:
        fit_layout(layout, shapes(w=(12, 8)), {"w": ("embed", None)}, MESH)
    assert "mesh=" not in str(caught.value), "12 / 8 leaves 4"


def test_workers_counts_positions_along_data_axes():
    resolved = fit_layout(Layout(batch=Batch((("data", "model"),))), shapes(w=(8,)), {}, MESH)
    assert (resolved.data_axes, resolved.workers) == (("data", "model"), 8)


@pytest.mark.parametrize("name", shipped())
def test_shipped_layouts_fit_a_model_with_names(name):
    params = shapes(**{"up/kernel": (64, 256), "up/bias": (256,), "down/kernel": (256, 64)})
    names = {"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed")}
    if name == "expert_parallel":
        params |= shapes(**{"experts/up": (8, 64, 256)})
        names |= {"experts/up": ("expert", "embed", "mlp")}
    meshes = {
        "hierarchical_int8": "node=2,data=4",
        "context_parallel": "data=4,context=2",
        "expert_parallel": "data=4,expert=2",
    }
    meshes |= {"spatial": "data=2,row=2,column=2", "fsdp_pipeline_tensor": "data=2,stage=2,model=2"}
    meshes |= {"pipeline": "data=2,stage=4", "pipeline_1f1b": "data=2,stage=4"}
    meshes |= {"transformer_parallel": "stage=1,replica=2,data=2,context=1,model=2"}
    meshes |= {"fsdp_sequence_parallel": "replica=1,data=4,context=1,model=2"}
    mesh = MeshSpec.parse(meshes[name]) if name in meshes else MESH
    specs = {
        path: place.spec
        for path, place in fit_layout(Layout.load(name), params, names, mesh).placements.items()
    }
    assert (specs["up/kernel"], specs["up/bias"], specs["down/kernel"]) == {
        "data_parallel": ((), (), ()),
        "backup_workers": ((), (), ()),
        "context_parallel": ((), (), ()),
        "expert_parallel": ((None, None), (), (None, None)),
        "data_parallel_bf16": ((), (), ()),
        "diloco": ((), (), ()),
        "parameter_server": ((), (), ()),
        "parameter_server_async": ((), (), ()),
        "hierarchical_int8": ((), (), ()),
        "power_sgd": ((), (), ()),
        "spatial": ((), (), ()),
        "pipeline": ((), (), ()),
        "pipeline_1f1b": ((), (), ()),
        "fsdp_pipeline_tensor": (("data", "model"), ("data",), ("model", "data")),
        "zero1": ((), (), ()),
        "fsdp": ((None, "data"), ("data",), ("data", None)),
        "fsdp_bf16": ((None, "data"), ("data",), ("data", None)),
        "tensor_parallel": ((None, "model"), (), ("model", None)),
        "sequence_parallel": ((None, "model"), (), ("model", None)),
        "conv_data_dense_model": ((None, "model"), (), ("model", None)),
        "fsdp_tensor_parallel": (("data", "model"), ("data",), ("model", "data")),
        "fsdp_sequence_parallel": (("data", "model"), ("data",), ("model", "data")),
        "transformer_parallel": (("data", "model"), ("data",), ("model", "data")),
    }[name]


class Counted:
    """A pattern that counts how often it is asked."""

    calls = 0

    def __init__(self, pattern):
        self.fullmatch = lambda path: (Counted.count(), pattern.fullmatch(path))[1]

    @staticmethod
    def count():
        Counted.calls += 1


def work(monkeypatch, blocks, layout):
    """How many times a pattern is compared with a path while a layout is resolved, and for how many
    parameters.
    """
    leaves = {
        "attention/query/kernel": (64, 64),
        "attention/query/bias": (64,),
        "mlp/up/kernel": (64, 256),
        "mlp/up/bias": (256,),
    }
    params = shapes(
        **{f"blocks/{n}/{path}": shape for n in range(blocks) for path, shape in leaves.items()}
    )
    plain, Counted.calls = path_match.compiled, 0
    monkeypatch.setattr(path_match, "compiled", lambda pattern: Counted(plain(pattern)))
    try:
        fit_layout(layout, params, {}, MESH)
    except LayoutError as error:
        assert layout.default.params == "error", error
    monkeypatch.undo()
    return Counted.calls, len(params)


RULES = (
    Rule("**/query/kernel", (None, "model"), ("head/**", "blocks/0/**")),
    Rule("**/up/kernel", (None, "model")),
    Rule("**/query/bias", ("model",)),
    Rule("**/up/bias", ("model",)),
)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(params=(dataclasses.replace(RULES[0], except_=("blocks/0/**",)), *RULES[1:])),
        Layout(params=RULES[1:], default=Default("error")),
        Layout(params=(*RULES[1:], Rule("**/kernel", ())), default=Default("error")),
    ],
    ids=["fits", "a quarter has no rule", "rules overlap"],
)
def test_resolve_cost_is_linear_in_parameters(monkeypatch, layout):
    few, thousand = work(monkeypatch, 250, layout)
    many, ten_thousand = work(monkeypatch, 2500, layout)
    assert (thousand, ten_thousand) == (1000, 10_000)
    assert 9 * few < many <= 10 * few + 100
    assert many <= 5 * len(layout.params) * ten_thousand


LEVELS = ["a", "b", "ab", "x1", "x2", "kernel"]
PARTS = [
    *LEVELS,
    "*",
    "**",
    "?",
    "a**",
    "**b",
    "x?",
    "{a,b}",
    "{a/b,x*}",
    "{**/a,b}c",
    "***",
    "",
    "a,b",
]


def random_rules(rng, count):
    """Rules of random patterns, some of them the same, with random exceptions."""
    patterns = ["/".join(rng.choices(PARTS, k=rng.randint(1, 4))) for _ in range(count)]
    return tuple(
        Rule(rng.choice(patterns), (), tuple(rng.choices(patterns, k=rng.randint(0, 3))))
        for _ in range(count)
    )


def claims_of_each_pair(rules, path):
    """Indices of the rules that match a path, found by trying each."""
    compiled = path_match.compiled
    named = (index for index, rule in enumerate(rules) if compiled(rule.path).fullmatch(path))
    return [
        index
        for index in named
        if not any(compiled(pattern).fullmatch(path) for pattern in rules[index].except_)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_rule_matcher_equals_trying_each_pair(seed):
    rng = random.Random(seed)
    rules = random_rules(rng, 60)
    paths = [
        "/".join(rng.choices([*LEVELS, "", "a,b", "abc"], k=rng.randint(1, 5))) for _ in range(200)
    ]
    matching = rule_matcher(rules)
    claims = {path: claims_of_each_pair(rules, path) for path in paths}
    assert {path: matching(path) for path in paths} == claims
    assert len({tuple(claimed) for claimed in claims.values()}) > 20
    matched = path_match.match_all((rule.path for rule in rules), paths)
    assert matched == {rule.path: path_match.matches(rule.path, paths) for rule in rules}
    gradients = Gradients(
        "all_reduce",
        rules=tuple(GradientRule(rule.path, "exact", except_=rule.except_) for rule in rules),
    )
    first = {
        path: gradients.rules[claimed[0]] if claimed else gradients
        for path, claimed in claims.items()
    }
    assert codec_rules(gradients, paths) == first


MANY = {f"blocks/{number}/mlp/kernel": (8, 8) for number in range(400)}


@pytest.mark.parametrize(
    "rules",
    [
        [Rule(path, ("data",)) for path in MANY],
        [Rule(f"**/{number}/**", ("data",)) for number in range(400)],
        [Rule(f"blocks/{number}/*/{{kernel,bias}}", ("data",)) for number in range(400)],
        [Rule("**", ("data",), tuple(MANY)[1:])],
        [
            Rule("**/0/**", ()),
            Rule(
                "**",
                ("data",),
                tuple(f"*/{number}/mlp/?ernel" for number in range(400) if number != 1),
            ),
        ],
    ],
    ids=["paths", "a level of each", "braces", "excepted paths", "excepted patterns"],
)
def test_resolve_cost_does_not_grow_with_rules_times_parameters(monkeypatch, rules):
    plain, Counted.calls = path_match.compiled, 0
    monkeypatch.setattr(path_match, "compiled", lambda pattern: Counted(plain(pattern)))
    layout = Layout(
        params=tuple(rules),
        gradients=Gradients(
            "all_reduce", rules=tuple(GradientRule(path, "exact") for path in MANY)
        ),
    )
    placements = placed(layout, shapes(**MANY))
    assert {place.spec for place in placements.values()} == {("data",), ()} - (
        {()} if len(rules) == 400 else set()
    )
    assert Counted.calls <= 10 * 400


def test_near_names_are_searched_for_problems_that_are_shown_only(monkeypatch):
    searched, plain = [], fixes.suggest
    monkeypatch.setattr(
        fixes,
        "suggest",
        lambda pattern, paths: (searched.append(pattern), plain(pattern, paths))[1],
    )
    rules = tuple(Rule(f"blocks/{number}/mpl/kernel", ()) for number in range(300))
    with pytest.raises(
        LayoutError, match=r'did you mean "blocks/0/mlp/kernel"\? It matches 1\.'
    ) as caught:
        placed(Layout(params=rules), shapes(**MANY))
    assert len(caught.value.problems) == 300 and len(searched) == 100
    first = "blocks/0/mlp/kernel, blocks/1/mlp/kernel, blocks/2/mlp/kernel"
    assert (
        caught.value.problems[-1].fix
        == f"remove the pattern, or match one of: {first} and 397 more."
    )
