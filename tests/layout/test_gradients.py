"""What is wrong with a `[gradients]` table, word for word, in both spellings; each concrete fix is
applied.
"""

import re

import numpy as np
import pytest

import spmd
from spmd.errors import LayoutError
from spmd.layout.gradients import GradientRule, Gradients
from spmd.layout.schema import Batch, Default, Layout, Rule
from spmd.layout.toml_reader import loads
from tests.layout.applied import error_text, fits, unreadable

NODES = '[batch]\nspec = [["node", "data"]]\n'
BY_NODE = Batch((("node", "data"),))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(text, reduction="all_reduce"):
    """Line 3 is the first of the text."""
    return f'[gradients]\nreduction = "{reduction}"\n{text}\n'


def in_python(*args, **more):
    layout = {name: more.pop(name) for name in ("batch", "params", "default") if name in more}
    return Layout(gradients=Gradients(*args, **more), **layout)


# each: TOML, the same layout in Python, and TOML with the fix applied; the expected texts are in
# tests/goldens/gradients_*.txt
RULE = '[[gradients.rules]]\npath = "{}"\ncodec = "{}"\n'
UNREAD = {
    "unknown codec": (
        table('codec = "power_sdg"\nerror_feedback = true'),
        in_python("all_reduce", "power_sdg", error_feedback=True),
        [table('codec = "power_sgd"\nerror_feedback = true')],
    ),
    "unknown codec of a rule": (
        table(RULE.format("**/bias", "int5")),
        in_python("all_reduce", rules=(GradientRule("**/bias", "int5"),)),
        [table(RULE.format("**/bias", "int8"))],
    ),
    "rank 0": (
        table('codec = "power_sgd"\nrank = 0\nerror_feedback = true'),
        in_python("all_reduce", "power_sgd", {"rank": 0}, error_feedback=True),
        [table('codec = "power_sgd"\nrank = 1\nerror_feedback = true')],
    ),
    "rank 0 of a rule": (
        table(
            'error_feedback = true\n[[gradients.rules]]\npath = "**/kernel"\ncodec = "power_sgd"\n'
            "rank = 0"
        ),
        in_python(
            "all_reduce",
            error_feedback=True,
            rules=(GradientRule("**/kernel", "power_sgd", {"rank": 0}),),
        ),
        [],
    ),
    "block 0": (
        table('codec = "int8"\nblock = 0'),
        in_python("all_reduce", "int8", {"block": 0}),
        [table('codec = "int8"\nblock = 1')],
    ),
    "block below 0": (
        table('codec = "float8"\nblock = -256'),
        in_python("all_reduce", "float8", {"block": -256}),
        [],
    ),
    "half a block": (
        table('codec = "sign"\nerror_feedback = true\nblock = 1.5'),
        in_python("all_reduce", "sign", {"block": 1.5}, error_feedback=True),
        [],
    ),
    "true is no number": (
        table('codec = "int8"\nblock = true'),
        in_python("all_reduce", "int8", {"block": True}),
        [],
    ),
    "keep 0": (
        table('codec = "top_k"\nerror_feedback = true\nkeep = 0'),
        in_python("all_reduce", "top_k", {"keep": 0}, error_feedback=True),
        [table('codec = "top_k"\nerror_feedback = true\nkeep = 1')],
    ),
    "unknown way": (
        table('codec = "bfloat16"\nreduce = "tree"'),
        in_python("all_reduce", "bfloat16", {"reduce": "tree"}),
        [table(f'codec = "bfloat16"\nreduce = "{way}"') for way in ("one_shot", "ring")],
    ),
    "another codec's option": (
        table('codec = "power_sgd"\nblock = 256\nerror_feedback = true'),
        in_python("all_reduce", "power_sgd", {"block": 256}, error_feedback=True),
        [
            table('codec = "power_sgd"\nerror_feedback = true'),
            table('codec = "int8"\nblock = 256\nerror_feedback = true'),
        ],
    ),
    "another codec's option in a rule": (
        table(
            'codec = "int8"\nblock = 128\n[[gradients.rules]]\npath = "**/kernel"\ncodec = '
            '"bfloat16"\nblock = 256'
        ),
        in_python(
            "all_reduce",
            "int8",
            {"block": 128},
            rules=(GradientRule("**/kernel", "bfloat16", {"block": 256}),),
        ),
        [
            table(
                'codec = "int8"\nblock = 128\n[[gradients.rules]]\npath = "**/kernel"\ncodec = '
                '"bfloat16"'
            )
        ],
    ),
    "unknown option": (
        table('codec = "int8"\nblok = 256'),
        in_python("all_reduce", "int8", {"blok": 256}),
        [table('codec = "int8"\nblock = 256')],
    ),
    "an option unlike any other": (
        table('codec = "int8"\nqueue = 256'),
        in_python("all_reduce", "int8", {"queue": 256}),
        [],
    ),
    "biased": (
        table('codec = "sign"'),
        in_python("all_reduce", "sign"),
        [
            table(f'codec = "sign"\n{switch} = true')
            for switch in ("error_feedback", "allow_biased")
        ],
    ),
    "biased in a rule": (
        table('codec = "int8"\n' + RULE.format("**/kernel", "power_sgd")),
        in_python("all_reduce", "int8", rules=(GradientRule("**/kernel", "power_sgd"),)),
        [table('codec = "int8"\nerror_feedback = true\n' + RULE.format("**/kernel", "power_sgd"))],
    ),
    "under the compiler": (
        table('codec = "bfloat16"', "compiler"),
        in_python("compiler", "bfloat16"),
        [table('codec = "bfloat16"', way) for way in ("all_reduce", "reduce_scatter")],
    ),
    "no reduction": (
        '[gradients]\ncodec = "int8"\n',
        in_python(codec="int8"),
        [table('codec = "int8"')],
    ),
    "a ring that remembers": (
        table('codec = "bfloat16"\nreduce = "ring"\nerror_feedback = true'),
        in_python("all_reduce", "bfloat16", {"reduce": "ring"}, error_feedback=True),
        [
            table('codec = "bfloat16"\nreduce = "one_shot"\nerror_feedback = true'),
            table('codec = "bfloat16"\nreduce = "ring"\nerror_feedback = false'),
        ],
    ),
    "buckets of nothing": (
        table('codec = "int8"\nbucket_bytes = 0'),
        in_python("all_reduce", "int8", bucket_bytes=0),
        [table('codec = "int8"\nbucket_bytes = 1')],
    ),
    "a start before the start": (
        table('codec = "int8"\nstart_step = -1'),
        in_python("all_reduce", "int8", start_step=-1),
        [table('codec = "int8"\nstart_step = 0')],
    ),
    "a step out of reach": (
        table('codec = "int8"\nstart_step = 3000000000'),
        in_python("all_reduce", "int8", start_step=3000000000),
        [table('codec = "int8"\nstart_step = 0')],
    ),
    "an axis named twice": (
        table('codec = "int8"\nexact_axes = ["data", "data"]'),
        in_python("all_reduce", "int8", exact_axes=("data", "data")),
        [table('codec = "int8"')],
    ),
    "biased, though what it leaves out is fed back": (
        table('codec = "sign"\nerror_feedback = true\nallow_biased = true'),
        in_python("all_reduce", "sign", error_feedback=True, allow_biased=True),
        [table('codec = "sign"\nerror_feedback = true')],
    ),
    "a start of nothing": (
        table("start_step = 100"),
        in_python("all_reduce", start_step=100),
        [table('codec = "bfloat16"\nstart_step = 100'), table("")],
    ),
    "diagnostics of nothing": (
        table("diagnostics = true"),
        in_python("all_reduce", diagnostics=True),
        [table('codec = "bfloat16"\ndiagnostics = true')],
    ),
    "a gather under the compiler": (
        table('gather = "layer"', "compiler"),
        in_python("compiler", gather="layer"),
        [table('gather = "layer"', "reduce_scatter"), table("", "compiler")],
    ),
    "accumulation under the compiler": (
        table('accumulate = "local"', "compiler"),
        in_python("compiler", accumulate="local"),
        [table('accumulate = "local"', "reduce_scatter")],
    ),
    "a format of weights under the compiler": (
        table('weights = "bfloat16"', "compiler"),
        in_python("compiler", weights="bfloat16"),
        [table('weights = "bfloat16"\n[default]\nparams = "shard:data"', "reduce_scatter")],
    ),
    "unknown format of weights": (
        table('weights = "bf16"', "reduce_scatter"),
        in_python("reduce_scatter", weights="bf16"),
        [table('weights = "bfloat16"\n[default]\nparams = "shard:data"', "reduce_scatter")],
    ),
}


@pytest.mark.parametrize(
    "name, text, python, fixes", [(name, *case) for name, case in UNREAD.items()], ids=UNREAD
)
def test_invalid_table(golden, name, text, python, fixes):
    by_file = error_text(text)
    golden(golden_name(name), by_file)
    without_lines = re.sub(r"(?m)^  line \d+: ", "  ", by_file).replace(
        "mine.toml", 'layout "layout"', 1
    )
    assert without_lines != by_file and error_text(python) == without_lines, (
        "a layout made in Python has no lines"
    )
    for fix in fixes:
        fits(fix)


def golden_name(case):
    return "gradients_" + re.sub(r"\W+", "_", case.replace("'s", ""))


def test_ring_with_exact_axes():
    text = NODES + table('codec = "bfloat16"\nreduce = "{}"\nexact_axes = ["data"]')
    why = "a ring reduces over all data axes at once, so exact_axes has no effect."
    problem = f'  line 6: [gradients] reduce\n      {why}\n      fix: reduce = "one_shot".'
    assert error_text(text.format("ring"), "node=2,data=4") == unreadable(problem)
    fits(text.format("one_shot"), "node=2,data=4")


def test_misspelt_reduction_is_one_problem(golden):
    """What follows is read as if the likely word stood there."""
    golden(
        "gradients_misspelt_reduction_is_one_problem",
        error_text(table('codec = "int8"', "allreduce")),
    )
    assert "1 problem:" in error_text(table('codec = "int_8"\nblock = 16\nstart_step = 5'))


def test_all_problems_of_table_in_file_order():
    text = error_text(
        table(
            'weights = "bfloat16"\ncodec = "int8"\nblock = 0\nblok = 3\ndiagnostics = true\n'
            "bucket_bytes = 0",
            "compiler",
        )
    )
    assert [line.strip() for line in text.splitlines() if line.startswith("  line")] == [
        "line 3: [gradients] weights",
        "line 4: [gradients] codec",
        "line 5: [gradients] block",
        "line 6: unknown key: [gradients] blok",
        "line 7: [gradients] diagnostics",
        "line 8: [gradients] bucket_bytes",
    ]


# what reads well and does not fit -----------------------------------------------------------------

INT8_INSIDE = 'codec = "int8"\nexact_axes = {}'
SHARED = '[[params]]\npath = "up/kernel"\nspec = ["-", ["data", "model"]]\n'
MISFITS = {
    "exact axis that is no data axis": (
        "data=4,model=2",
        table(INT8_INSIDE.format('["model"]')),
        in_python("all_reduce", "int8", exact_axes=("model",)),
        [],
    ),
    "exact axis that does not exist": (
        "node=2,data=4",
        NODES + table(INT8_INSIDE.format('["nod"]')),
        in_python("all_reduce", "int8", exact_axes=("nod",), batch=BY_NODE),
        [NODES + table(INT8_INSIDE.format('["node"]'))],
    ),
    "all data axes": (
        "node=2,data=4",
        NODES + table(INT8_INSIDE.format('["node", "data"]')),
        in_python("all_reduce", "int8", exact_axes=("node", "data"), batch=BY_NODE),
        [NODES + table(INT8_INSIDE.format('["data"]'))],
    ),
    "two rules for one": (
        "data=8",
        table(RULE.format("**/kernel", "int8") + RULE.format("up/*", "bfloat16")),
        in_python(
            "all_reduce",
            rules=(GradientRule("**/kernel", "int8"), GradientRule("up/*", "bfloat16")),
        ),
        [
            table(
                RULE.format("**/kernel", "int8")
                + 'except = "up/kernel"\n'
                + RULE.format("up/*", "bfloat16")
            ),
            table(
                RULE.format("**/kernel", "int8")
                + RULE.format("up/*", "bfloat16")
                + 'except = ["up/kernel"]'
            ),
        ],
    ),
    "a rule for nothing": (
        "data=8",
        table(RULE.format("**/kernels", "int8")),
        in_python("all_reduce", rules=(GradientRule("**/kernels", "int8"),)),
        [table(RULE.format("**/kernel", "int8"))],
    ),
    "weights that are not sent": (
        "data=8",
        table('weights = "bfloat16"', "reduce_scatter"),
        in_python("reduce_scatter", weights="bfloat16"),
        [
            table("", "reduce_scatter"),
            table('weights = "bfloat16"\n[default]\nparams = "shard:data"', "reduce_scatter"),
            table('weights = "bfloat16"\n[optimizer]\nshard = "data"', "reduce_scatter"),
        ],
    ),
    "one dim over data and model": (
        "data=4,model=2",
        SHARED + table('codec = "int8"', "reduce_scatter"),
        in_python("reduce_scatter", "int8", params=(Rule("up/kernel", (None, ("data", "model"))),)),
        [
            SHARED
            + table('codec = "int8"\n' + RULE.format("up/kernel", "exact"), "reduce_scatter"),
            SHARED.replace('["-", ["data", "model"]]', '["data", "model"]')
            + table('codec = "int8"', "reduce_scatter"),
        ],
    ),
}


@pytest.mark.parametrize(
    "name, mesh, text, python, fixes",
    [(name, *case) for name, case in MISFITS.items()],
    ids=MISFITS,
)
def test_table_does_not_fit_mesh(golden, name, mesh, text, python, fixes):
    by_file = error_text(text, mesh)
    golden(golden_name(name), by_file)
    assert error_text(python, mesh) == re.sub(r", line \d+", "", by_file).replace(
        "mine.toml", "this layout"
    )
    for fix in fixes:
        fits(fix, mesh)


def test_fix_that_adds_rule_excludes_parameter_from_other_rule():
    """The parameter is a rule's already; a second rule for it alone would be one too many."""
    text = SHARED + table(RULE.format("up/*", "int8") + "{}", "reduce_scatter")
    fix = (
        'except = ["up/kernel"]  in the rule for "up/*", and  [[gradients.rules]]  path = '
        '"up/kernel"  codec = "exact".'
    )
    assert fix in error_text(text.format(""), "data=4,model=2")
    fits(
        text.format('except = ["up/kernel"]\n' + RULE.format("up/kernel", "exact")),
        "data=4,model=2",
    )


def test_codec_of_rule_on_mixed_dim():
    """The codec that is named is the rule's; one whose rule says exact is no problem, whatever the
    others do.
    """
    text = SHARED + table('codec = "int8"\n' + RULE.format("up/*", "bfloat16"), "reduce_scatter")
    assert "which codec bfloat16 does not support" in error_text(text, "data=4,model=2")
    fits(SHARED + table(RULE.format("down/*", "int8"), "reduce_scatter"), "data=4,model=2")


# notes --------------------------------------------------------------------------------------------


def own_notes(layout, mesh="data=8"):
    """The notes on communication, without those on the placement of parameters."""
    return [
        line
        for line in fits(layout, mesh).notes()
        if "error_feedback" in line or "error feedback" in line or "is sent" in line
    ]


def test_note_error_feedback_without_codec():
    noted = [
        "note: error_feedback = true, but every gradient is sent exactly: no residual is kept."
    ]
    assert own_notes(in_python("all_reduce", error_feedback=True)) == noted


@pytest.mark.parametrize(
    "gradients",
    [("int8", {}, True), ("int8", {"block": 1}, False), ("top_k", {"keep": 1}, True)],
    ids=str,
)
def test_note_codec_without_effect(gradients):
    codec, options, feedback = gradients
    rules = (GradientRule("**"),) if not options else ()
    (note,) = own_notes(
        in_python("all_reduce", codec, options, error_feedback=feedback, rules=rules)
    )
    assert (
        note
        == f"note: every gradient is sent exactly: codec {codec} applies to none that it makes "
        "smaller."
    )


@pytest.mark.parametrize(("mesh", "spec"), [("data=1", ()), ("data=1,model=2", (None, "model"))])
def test_note_codec_with_one_worker(mesh, spec):
    layout = in_python("all_reduce", "int8", error_feedback=True, params=(Rule("**/kernel", spec),))
    assert own_notes(layout, mesh) == ["note: one worker, nothing is sent: codec int8 is not used."]


def test_note_residual_bytes():
    # kernels of 64 KiB, biases of 1 KiB and 256 B; under fsdp as much, since each worker holds full
    # gradients
    for default in (Default(), Default("shard:data")):
        line = "error feedback keeps 129.2 KiB of float32 residuals on each device."
        assert own_notes(
            in_python("reduce_scatter", "int8", error_feedback=True, default=default)
        ) == [line]
    halves = in_python(
        "all_reduce", "int8", error_feedback=True, params=(Rule("**/kernel", (None, "model")),)
    )
    assert own_notes(halves, "data=4,model=2") == [
        "error feedback keeps 65.2 KiB of float32 residuals on each device."
    ]


def test_no_note_for_effective_codec():
    assert own_notes(in_python("all_reduce", "bfloat16")) == []
    assert own_notes(in_python("all_reduce")) == []


# Python only --------------------------------------------------------------------------------------

WRONG_TYPES = {
    "options": lambda: Gradients("all_reduce", "int8", 5),
    "no options": lambda: Gradients("all_reduce", "int8", None),
    "options in a row": lambda: Gradients("all_reduce", "int8", ("block", 128)),
    "axes": lambda: Gradients("all_reduce", "int8", exact_axes=5),
    "axes of numbers": lambda: Gradients("all_reduce", "int8", exact_axes=[5]),
    "rules": lambda: Gradients("all_reduce", "int8", rules=None),
    "rules of dicts": lambda: Gradients("all_reduce", "int8", rules=({"path": "w"},)),
    "no codec": lambda: Gradients("all_reduce", None),
    "a number for a codec": lambda: GradientRule("w", 8),
    "no path": lambda: GradientRule(None, "int8"),
    "a step": lambda: Gradients("all_reduce", "int8", start_step=1.5),
    "an option that is none": lambda: Gradients("all_reduce", "int8", {"block": None}),
    "an option of numpy's": lambda: Gradients("all_reduce", "int8", {"block": np.int64(16)}),
    "an option without a name": lambda: Gradients("all_reduce", "int8", {5: 16}),
    "a key as an option": lambda: Gradients("all_reduce", "int8", {"start_step": 5}),
    "the codec as an option": lambda: Gradients("all_reduce", "int8", {"codec": "sign"}),
    "a rule's key as an option": lambda: GradientRule("w", "int8", {"except": "a"}),
    "a switch": lambda: Gradients("all_reduce", "int8", error_feedback="yes"),
    "gradients": lambda: Layout(gradients={"codec": "int8"}),
}


@pytest.mark.parametrize("make", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_wrong_type_raises_option_error(make):
    with pytest.raises(spmd.errors.OptionError):
        make()


def test_single_name_or_rule_becomes_tuple():
    rule = GradientRule("**/kernel", "int8", except_="up/kernel")
    assert rule.except_ == ("up/kernel",) and Rule("**", (), except_="a").except_ == ("a",)
    assert Gradients("all_reduce", rules=rule, exact_axes="data") == Gradients(
        "all_reduce", rules=(rule,), exact_axes=("data",)
    )


UNREAD_UNDER_COMPILER = (
    "start_step = 4",
    "bucket_bytes = 4",
    "allow_biased = true",
    'exact_axes = ["data"]',
)


@pytest.mark.parametrize("line", UNREAD_UNDER_COMPILER)
@pytest.mark.parametrize("reduction", ["compiler", "all_reduce"])
def test_unread_option_raises(line, reduction):
    with pytest.raises(LayoutError, match="nothing reads it"):
        loads(table(line, reduction))


@pytest.mark.parametrize(
    "text", ["exact_axes = [1]", '[[gradients.rules]]\npath = "w"\ncodec = ["exact"]']
)
def test_list_where_name_is_expected(text):
    with pytest.raises(LayoutError, match=r"is not a list of mesh axes|no codec"):
        loads(table('codec = "int8"\n' + text))
