"""What is wrong with a `[gradients]` table, word for word, in both spellings; each concrete fix is applied."""

import numpy as np
import pytest

import spmd
from spmd.errors import LayoutError
from spmd.layout.gradients import GradientRule, Gradients
from spmd.layout.schema import Batch, Default, Layout, Rule
from spmd.layout.toml_reader import loads
from tests.layout.applied import fits, told, unread

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


# each: what the file says, the same in Python, what is told (with the file's line), what the fix makes of it
RULE = '[[gradients.rules]]\npath = "{}"\ncodec = "{}"\n'
BIASED = """without error feedback: what is left out is lost for good, and training may not converge.
      fix: [gradients] error_feedback = true, or allow_biased = true to go without."""
ELSEWHERE = """XLA reduces gradients itself, in their own dtype.
      fix: reduction = "all_reduce", or "reduce_scatter"."""
IDLE = """nothing reads it: no codec here does.
      fix: leave it out, or such as  reduction = "all_reduce"  codec = "bfloat16"."""
UNREAD = {
    "unknown codec": (
        table('codec = "power_sdg"\nerror_feedback = true'),
        in_python("all_reduce", "power_sdg", error_feedback=True),
        """\
  line 3: [gradients] codec
      no codec "power_sdg".
      fix: did you mean "power_sgd"? This version knows: exact, bfloat16, int8, float8, sign, top_k, power_sgd.""",
        [table('codec = "power_sgd"\nerror_feedback = true')],
    ),
    "unknown codec of a rule": (
        table(RULE.format("**/bias", "int4")),
        in_python("all_reduce", rules=(GradientRule("**/bias", "int4"),)),
        """\
  line 3: [[gradients.rules]] rule 1
      no codec "int4".
      fix: did you mean "int8"?""",
        [table(RULE.format("**/bias", "int8"))],
    ),
    "rank 0": (
        table('codec = "power_sgd"\nrank = 0\nerror_feedback = true'),
        in_python("all_reduce", "power_sgd", {"rank": 0}, error_feedback=True),
        """\
  line 4: [gradients] rank
      0 for codec power_sgd.
      fix: a whole number from 1.""",
        [table('codec = "power_sgd"\nrank = 1\nerror_feedback = true')],
    ),
    "rank 0 of a rule": (
        table('error_feedback = true\n[[gradients.rules]]\npath = "**/kernel"\ncodec = "power_sgd"\nrank = 0'),
        in_python("all_reduce", error_feedback=True, rules=(GradientRule("**/kernel", "power_sgd", {"rank": 0}),)),
        """\
  line 4: [[gradients.rules]] rule 1 rank
      0 for codec power_sgd.
      fix: a whole number from 1.""",
        [],
    ),
    "block 0": (
        table('codec = "int8"\nblock = 0'),
        in_python("all_reduce", "int8", {"block": 0}),
        "  line 4: [gradients] block\n      0 for codec int8.\n      fix: a whole number from 1.",
        [table('codec = "int8"\nblock = 1')],
    ),
    "block below 0": (
        table('codec = "float8"\nblock = -256'),
        in_python("all_reduce", "float8", {"block": -256}),
        "  line 4: [gradients] block\n      -256 for codec float8.\n      fix: a whole number from 1.",
        [],
    ),
    "half a block": (
        table('codec = "sign"\nerror_feedback = true\nblock = 1.5'),
        in_python("all_reduce", "sign", {"block": 1.5}, error_feedback=True),
        "  line 5: [gradients] block\n      1.5 for codec sign.\n      fix: a whole number from 1.",
        [],
    ),
    "true is no number": (
        table('codec = "int8"\nblock = true'),
        in_python("all_reduce", "int8", {"block": True}),
        "  line 4: [gradients] block\n      true for codec int8.\n      fix: a whole number from 1.",
        [],
    ),
    "keep 0": (
        table('codec = "top_k"\nerror_feedback = true\nkeep = 0'),
        in_python("all_reduce", "top_k", {"keep": 0}, error_feedback=True),
        "  line 5: [gradients] keep\n      0 for codec top_k.\n      fix: a share of the elements, above 0, at most 1.",
        [table('codec = "top_k"\nerror_feedback = true\nkeep = 1')],
    ),
    "unknown way": (
        table('codec = "bfloat16"\nreduce = "tree"'),
        in_python("all_reduce", "bfloat16", {"reduce": "tree"}),
        '  line 4: [gradients] reduce\n      "tree" for codec bfloat16.\n      fix: "one_shot" or "ring".',
        [table(f'codec = "bfloat16"\nreduce = "{way}"') for way in ("one_shot", "ring")],
    ),
    "another codec's option": (
        table('codec = "power_sgd"\nblock = 256\nerror_feedback = true'),
        in_python("all_reduce", "power_sgd", {"block": 256}, error_feedback=True),
        """\
  line 4: unknown key: [gradients] block
      it is an option of int8, float8, sign; the codec is power_sgd.
      fix: leave it out, or codec = "int8".""",
        [table('codec = "power_sgd"\nerror_feedback = true'), table('codec = "int8"\nblock = 256\nerror_feedback = true')],
    ),
    "another codec's option in a rule": (
        table('codec = "int8"\nblock = 128\n[[gradients.rules]]\npath = "**/kernel"\ncodec = "bfloat16"\nblock = 256'),
        in_python("all_reduce", "int8", {"block": 128}, rules=(GradientRule("**/kernel", "bfloat16", {"block": 256}),)),
        """\
  line 5: unknown key: [[gradients.rules]] rule 1 block
      it is an option of int8, float8, sign; the codec is bfloat16.
      fix: leave it out, or codec = "int8".""",
        [table('codec = "int8"\nblock = 128\n[[gradients.rules]]\npath = "**/kernel"\ncodec = "bfloat16"')],
    ),
    "unknown option": (
        table('codec = "int8"\nblok = 256'),
        in_python("all_reduce", "int8", {"blok": 256}),
        '  line 4: unknown key: [gradients] blok\n      nothing reads it.\n      fix: did you mean "block"?',
        [table('codec = "int8"\nblock = 256')],
    ),
    "an option unlike any other": (
        table('codec = "int8"\nqueue = 256'),
        in_python("all_reduce", "int8", {"queue": 256}),
        """\
  line 4: unknown key: [gradients] queue
      nothing reads it.
      fix: known: reduction, codec, error_feedback, allow_biased, start_step, bucket_bytes, exact_axes, diagnostics, weights, block.""",
        [],
    ),
    "biased": (
        table('codec = "sign"'),
        in_python("all_reduce", "sign"),
        f"  line 3: [gradients] codec\n      sign {BIASED}",
        [table(f'codec = "sign"\n{switch} = true') for switch in ("error_feedback", "allow_biased")],
    ),
    "biased in a rule": (
        table('codec = "int8"\n' + RULE.format("**/kernel", "power_sgd")),
        in_python("all_reduce", "int8", rules=(GradientRule("**/kernel", "power_sgd"),)),
        f"  line 4: [[gradients.rules]] rule 1\n      power_sgd {BIASED}",
        [table('codec = "int8"\nerror_feedback = true\n' + RULE.format("**/kernel", "power_sgd"))],
    ),
    "under the compiler": (
        table('codec = "bfloat16"', "compiler"),
        in_python("compiler", "bfloat16"),
        f'  line 3: [gradients] codec\n      "bfloat16" under reduction "compiler": {ELSEWHERE}',
        [table('codec = "bfloat16"', way) for way in ("all_reduce", "reduce_scatter")],
    ),
    "no reduction": (
        '[gradients]\ncodec = "int8"\n',
        in_python(codec="int8"),
        f'  line 2: [gradients] codec\n      "int8" under reduction "compiler": {ELSEWHERE}',
        [table('codec = "int8"')],
    ),
    "a ring that remembers": (
        table('codec = "bfloat16"\nreduce = "ring"\nerror_feedback = true'),
        in_python("all_reduce", "bfloat16", {"reduce": "ring"}, error_feedback=True),
        """\
  line 4: [gradients] reduce
      a ring rounds on the way, where no worker can keep what was lost for error feedback.
      fix: reduce = "one_shot", or error_feedback = false.""",
        [
            table('codec = "bfloat16"\nreduce = "one_shot"\nerror_feedback = true'),
            table('codec = "bfloat16"\nreduce = "ring"\nerror_feedback = false'),
        ],
    ),
    "buckets of nothing": (
        table('codec = "int8"\nbucket_bytes = 0'),
        in_python("all_reduce", "int8", bucket_bytes=0),
        "  line 4: [gradients] bucket_bytes\n      0.\n      fix: a whole number from 1.",
        [table('codec = "int8"\nbucket_bytes = 1')],
    ),
    "a start before the start": (
        table('codec = "int8"\nstart_step = -1'),
        in_python("all_reduce", "int8", start_step=-1),
        "  line 4: [gradients] start_step\n      -1.\n      fix: a whole number from 0.",
        [table('codec = "int8"\nstart_step = 0')],
    ),
    "a step out of reach": (
        table('codec = "int8"\nstart_step = 3000000000'),
        in_python("all_reduce", "int8", start_step=3000000000),
        "  line 4: [gradients] start_step\n      3000000000.\n      fix: below 2**31.",
        [table('codec = "int8"\nstart_step = 0')],
    ),
    "an axis named twice": (
        table('codec = "int8"\nexact_axes = ["data", "data"]'),
        in_python("all_reduce", "int8", exact_axes=("data", "data")),
        "  line 4: [gradients] exact_axes\n      names data more than once.\n      fix: each axis once.",
        [table('codec = "int8"')],
    ),
    "biased, though what it leaves out is fed back": (
        table('codec = "sign"\nerror_feedback = true\nallow_biased = true'),
        in_python("all_reduce", "sign", error_feedback=True, allow_biased=True),
        "  line 5: [gradients] allow_biased\n      nothing reads it: no codec here does.\n"
        '      fix: leave it out, or such as  reduction = "all_reduce"  codec = "bfloat16".',
        [table('codec = "sign"\nerror_feedback = true')],
    ),
    "a start of nothing": (
        table("start_step = 100"),
        in_python("all_reduce", start_step=100),
        f"  line 3: [gradients] start_step\n      {IDLE}",
        [table('codec = "bfloat16"\nstart_step = 100'), table("")],
    ),
    "diagnostics of nothing": (
        table("diagnostics = true"),
        in_python("all_reduce", diagnostics=True),
        f"  line 3: [gradients] diagnostics\n      {IDLE}",
        [table('codec = "bfloat16"\ndiagnostics = true')],
    ),
    "unknown format of weights": (
        table('weights = "bf16"', "reduce_scatter"),
        in_python("reduce_scatter", weights="bf16"),
        """\
  line 3: [gradients] weights
      no weights "bf16".
      fix: did you mean "bfloat16"? This version knows: exact, bfloat16.""",
        [table('weights = "bfloat16"\n[default]\nparams = "shard:data"', "reduce_scatter")],
    ),
}


@pytest.mark.parametrize("text, python, problem, fixes", UNREAD.values(), ids=UNREAD)
def test_a_table_that_means_nothing(text, python, problem, fixes):
    assert told(text) == unread(problem)
    line, said = problem.split(": ", 1)
    assert line.startswith("  line ")
    assert told(python) == f'layout "layout" cannot be read\n1 problem:\n\n  {said}', "nobody has written it, so it has no lines"
    for fix in fixes:
        fits(fix)


def test_a_ring_has_no_inside():
    text = NODES + table('codec = "bfloat16"\nreduce = "{}"\nexact_axes = ["data"]')
    problem = (
        '  line 6: [gradients] reduce\n      a ring goes over all data axes at once, exact_axes or not.\n      fix: reduce = "one_shot".'
    )
    assert told(text.format("ring"), "node=2,data=4") == unread(problem)
    fits(text.format("one_shot"), "node=2,data=4")


def test_one_misspelt_word_is_one_problem():
    """What follows is read as if the likely word stood there."""
    assert told(table('codec = "int8"', "allreduce")) == unread(
        """\
  line 2: [gradients] reduction
      no reduction "allreduce".
      fix: did you mean "all_reduce"? This version knows: compiler, all_reduce, reduce_scatter, parameter_server."""
    )
    assert "1 problem:" in told(table('codec = "int_8"\nblock = 16\nstart_step = 5'))


def test_all_problems_of_a_table_are_told_at_once_in_the_order_of_the_file():
    text = told(table('weights = "bfloat16"\ncodec = "int8"\nblock = 0\nblok = 3\ndiagnostics = true\nbucket_bytes = 0', "compiler"))
    assert [line.strip() for line in text.splitlines() if line.startswith("  line")] == [
        "line 3: [gradients] weights",
        "line 4: [gradients] codec",
        "line 5: [gradients] block",
        "line 6: unknown key: [gradients] blok",
        "line 7: [gradients] diagnostics",
        "line 8: [gradients] bucket_bytes",
    ]


# what reads well and does not fit ------------------------------------------------------------------------------------

ON_MODEL = "does not fit this model on mesh data=4, model=2\n1 problem"
ON_NODES = "does not fit this model on mesh node=2, data=4\n1 problem"
INT8_INSIDE = 'codec = "int8"\nexact_axes = {}'
SHARED = '[[params]]\npath = "up/kernel"\nspec = ["-", ["data", "model"]]\n'
MISFITS = {
    "exact axis that is no data axis": (
        "data=4,model=2",
        table(INT8_INSIDE.format('["model"]')),
        in_python("all_reduce", "int8", exact_axes=("model",)),
        f"""{ON_MODEL} (4 of 4 parameters fit):

  [gradients] exact_axes
      "model" is no data axis.
      fix: of the axes that the batch is cut over: data.""",
        [],
    ),
    "exact axis that does not exist": (
        "node=2,data=4",
        NODES + table(INT8_INSIDE.format('["nod"]')),
        in_python("all_reduce", "int8", exact_axes=("nod",), batch=BY_NODE),
        f"""{ON_NODES} (4 of 4 parameters fit):

  [gradients] exact_axes
      mesh axis "nod" does not exist on mesh node=2, data=4.
      fix: did you mean "node"?""",
        [NODES + table(INT8_INSIDE.format('["node"]'))],
    ),
    "all data axes": (
        "node=2,data=4",
        NODES + table(INT8_INSIDE.format('["node", "data"]')),
        in_python("all_reduce", "int8", exact_axes=("node", "data"), batch=BY_NODE),
        f"""{ON_NODES} (4 of 4 parameters fit):

  [gradients] exact_axes
      every data axis (node, data) is reduced exactly, so no codec has anything to do.
      fix: leave the axis that crosses nodes out.""",
        [NODES + table(INT8_INSIDE.format('["data"]'))],
    ),
    "two rules for one": (
        "data=4,model=2",
        table(RULE.format("**/kernel", "int8") + RULE.format("up/*", "bfloat16")),
        in_python("all_reduce", rules=(GradientRule("**/kernel", "int8"), GradientRule("up/*", "bfloat16"))),
        f"""{ON_MODEL} (4 of 4 parameters fit):

  up/kernel   float32[256, 64]
      2 [[gradients.rules]] match this parameter.
      rule 1, line 3 claims it: path "**/kernel", codec int8
      rule 2, line 6 claims it: path "up/*", codec bfloat16
      fix: name it in one's  except.""",
        [
            table(RULE.format("**/kernel", "int8") + 'except = "up/kernel"\n' + RULE.format("up/*", "bfloat16")),
            table(RULE.format("**/kernel", "int8") + RULE.format("up/*", "bfloat16") + 'except = ["up/kernel"]'),
        ],
    ),
    "a rule for nothing": (
        "data=4,model=2",
        table(RULE.format("**/kernels", "int8")),
        in_python("all_reduce", rules=(GradientRule("**/kernels", "int8"),)),
        f"""{ON_MODEL} (4 of 4 parameters fit):

  [[gradients.rules]] rule 1, line 3: path "**/kernels" matches no parameter.
      fix: did you mean "**/kernel"? It matches 2.""",
        [table(RULE.format("**/kernel", "int8"))],
    ),
    "weights that do not travel": (
        "data=4,model=2",
        table('weights = "bfloat16"', "reduce_scatter"),
        in_python("reduce_scatter", weights="bfloat16"),
        f"""{ON_MODEL}:

  [gradients] weights
      SOURCE keeps every parameter and its moments whole on every worker, so no weight travels.
      fix: leave it out, or cut them: [default] params = "shard:data".""",
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
        f"""{ON_MODEL}:

  up/kernel   float32[256, 64]   spec ["-", ["data", "model"]]
      a dim is cut over a data axis and another one together, which codec int8 cannot follow.
      fix: the two axes on two dims, or [[gradients.rules]]  path = "up/kernel"  codec = "exact".""",
        [
            SHARED + table('codec = "int8"\n' + RULE.format("up/kernel", "exact"), "reduce_scatter"),
            SHARED.replace('["-", ["data", "model"]]', '["data", "model"]') + table('codec = "int8"', "reduce_scatter"),
        ],
    ),
}


@pytest.mark.parametrize("mesh, text, python, problem, fixes", MISFITS.values(), ids=MISFITS)
def test_a_table_that_does_not_fit(mesh, text, python, problem, fixes):
    assert told(text, mesh) == f"mine.toml {problem}".replace("SOURCE", "mine.toml")
    without_lines = problem.replace(", line 3", "").replace(", line 6", "").replace("SOURCE", "this layout")
    assert told(python, mesh) == f"this layout {without_lines}"
    for fix in fixes:
        fits(fix, mesh)


def test_a_fix_that_names_a_rule_leaves_room_for_it():
    """The parameter is a rule's already; a second rule for it alone would be one too many."""
    text = SHARED + table(RULE.format("up/*", "int8") + "{}", "reduce_scatter")
    fix = 'except = ["up/kernel"]  in the rule for "up/*", and  [[gradients.rules]]  path = "up/kernel"  codec = "exact".'
    assert fix in told(text.format(""))
    fits(text.format('except = ["up/kernel"]\n' + RULE.format("up/kernel", "exact")))


def test_a_codec_by_rule_cannot_follow_either():
    """The codec that is named is the rule's; one whose rule says exact is no problem, whatever the others do."""
    text = SHARED + table('codec = "int8"\n' + RULE.format("up/*", "bfloat16"), "reduce_scatter")
    assert "which codec bfloat16 cannot follow" in told(text)
    fits(SHARED + table(RULE.format("down/*", "int8"), "reduce_scatter"))


# notes ---------------------------------------------------------------------------------------------------------------


def own_notes(layout, mesh="data=8"):
    """What the exchange has to say; the first lines are about where parameters are."""
    return [line for line in fits(layout, mesh).notes() if "error_feedback" in line or "error feedback" in line or "travels" in line]


def test_error_feedback_without_a_codec_is_noted():
    noted = ["note: error_feedback = true, but every gradient travels exactly: no residual is kept."]
    assert own_notes(in_python("all_reduce", error_feedback=True)) == noted


@pytest.mark.parametrize("gradients", [("int8", {}, True), ("int8", {"block": 1}, False), ("top_k", {"keep": 1}, True)], ids=str)
def test_a_codec_that_has_nothing_to_do_is_noted(gradients):
    codec, options, feedback = gradients
    rules = (GradientRule("**"),) if not options else ()
    (note,) = own_notes(in_python("all_reduce", codec, options, error_feedback=feedback, rules=rules))
    assert note == f"note: every gradient travels exactly: no rule leaves codec {codec} one that it would make smaller."


@pytest.mark.parametrize("mesh", ["data=1", "data=1,model=2"])
def test_a_codec_with_one_worker_is_noted(mesh):
    assert own_notes(in_python("all_reduce", "int8", error_feedback=True), mesh) == [
        "note: one worker, nothing travels: codec int8 is not used."
    ]


def test_what_residuals_hold_is_told():
    # kernels of 64 KiB, biases of 1 KiB and 256 B; under fsdp as much, since each worker's gradient is whole
    for default in (Default(), Default("shard:data")):
        line = "error feedback keeps 129.2 KiB of float32 residuals on each device."
        assert own_notes(in_python("reduce_scatter", "int8", error_feedback=True, default=default)) == [line]
    halves = in_python("all_reduce", "int8", error_feedback=True, params=(Rule("**/kernel", (None, "model")),))
    assert own_notes(halves, "data=4,model=2") == ["error feedback keeps 65.2 KiB of float32 residuals on each device."]


def test_nothing_is_noted_of_a_codec_that_has_something_to_do():
    assert own_notes(in_python("all_reduce", "bfloat16")) == []
    assert own_notes(in_python("all_reduce")) == []


# Python only ---------------------------------------------------------------------------------------------------------

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
def test_a_wrong_type_is_told_where_it_is_given(make):
    with pytest.raises(spmd.errors.OptionError):
        make()


def test_one_name_and_one_rule_need_no_tuple():
    one = GradientRule("**/kernel", "int8", except_="up/kernel")
    assert one.except_ == ("up/kernel",) and Rule("**", (), except_="a").except_ == ("a",)
    assert Gradients("all_reduce", rules=one, exact_axes="data") == Gradients("all_reduce", rules=(one,), exact_axes=("data",))


UNREAD_UNDER_COMPILER = ("start_step = 4", "bucket_bytes = 4", "allow_biased = true", 'exact_axes = ["data"]')


@pytest.mark.parametrize("line", UNREAD_UNDER_COMPILER)
@pytest.mark.parametrize("reduction", ["compiler", "all_reduce"])
def test_an_option_that_nothing_reads_is_refused(line, reduction):
    with pytest.raises(LayoutError, match="nothing reads it"):
        loads(table(line, reduction))


@pytest.mark.parametrize("text", ["exact_axes = [1]", '[[gradients.rules]]\npath = "w"\ncodec = ["exact"]'])
def test_lists_where_names_belong(text):
    with pytest.raises(LayoutError, match=r"is not a list of mesh axes|no codec"):
        loads(table('codec = "int8"\n' + text))
