"""What a notebook's cell shows: one style, escaped user text, and drawings."""

import re
import types

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spmd
from spmd import viz
from spmd.api import Result
from spmd.errors import MeshError, OptionError
from spmd.nn.schedule import make_schedule
from spmd.render.html import aligned, filled
from spmd.render.terminal import paint
from spmd.run.history import History
from spmd.sweeps.config import Trial
from spmd.sweeps.results import Sweep, TrialResult

ODD = "<b>odd</b>"


def history(name=ODD):
    made = History((name,))
    made.add_steps(1, np.array([[[2.0], [1.0]], [[1.0], [1.0]]]))
    made.add_evaluation(2, {f"eval_{name}": 1.5})
    return made


def layout():
    rules = (spmd.Rule(f"{ODD}/**/kernel", (None, "model"), except_=(f"{ODD}/head",), line=7),)
    words = {
        "gradients": spmd.Gradients(rules=(spmd.GradientRule(f"{ODD}/embed", "int8"),)),
        "default": spmd.Default("shard:data"),
    }
    return spmd.Layout(
        f"for {ODD}",
        (("data", -1), ("model", 2)),
        params=rules,
        axes=((ODD, "model"),),
        name=ODD,
        **words,
    )


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_aligned_fits_its_width_and_loses_nothing(width):
    rows = [
        ("parameter", "array", "spec", "chosen by", "bytes/device"),
        (
            "decoder/blocks/0/attention/query/kernel",
            "float32[768, 12, 64]",
            '["data", "model", "-"]',
            "rule 2, line 14",
            "16.0 KiB",
        ),
        ("x" * 50, "float32[]", "full", "default shard:data, but no dim divides by 4", "40 B"),
    ]

    def letters(parts):
        return sorted(re.sub(r"\s", "", "".join(parts)))

    lines = aligned(rows, width=width)
    assert max(map(len, lines)) <= width and letters(lines) == letters(sum(rows, ()))
    assert (len(lines) == 3) == (width == 200)


def test_filled_breaks_only_lines_that_are_too_long():
    text = "a short line\n  " + "word " * 30
    lines = filled(text, width=40).splitlines()
    assert (
        lines[0] == "a short line"
        and max(map(len, lines)) <= 40
        and lines[2].startswith("    word")
    )
    assert filled(text, width=1000) == text


def test_tables_fit_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    layer = {
        "a rather long name of a kernel": jax.numpy.zeros((64, 64)),
        "bias": jax.numpy.zeros((64,)),
    }
    model = spmd.FunctionalModel(
        lambda key: {"decoder": [layer, layer]},
        lambda params, x: x @ params["decoder"][0]["a rather long name of a kernel"],
    )
    trainer = spmd.Trainer(
        model,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.1),
        mesh="data=8",
        layout="fsdp",
    )
    trainer.prepare(
        {
            "x": jax.ShapeDtypeStruct((8, 64), "float32"),
            "y": jax.ShapeDtypeStruct((8, 64), "float32"),
        }
    )
    values = {
        "learning_rate": 0.123456,
        "weight_decay": 0.00123456,
        "momentum": 0.9,
        "an_option_with_a_long_name": "nesterov",
    }
    tried = TrialResult(Trial(0, values, 0), 0.5, {}, history("loss"), "done", None)
    cell = trainer.wire._repr_html_()
    assert (
        cell.count("<rect") == 2 + 1
        and "reduce_gradients/exact/0, reduce_scatter over data: " in cell
        and f"{trainer.wire.bytes():,} bytes" in cell
    )
    for table in (trainer.summary(), trainer.wire, Sweep([tried], [], ("eval_loss", "min"), 1)):
        assert max(map(len, str(table).splitlines())) <= 60, str(table)
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, str(trainer.summary()).splitlines())) > 90


@pytest.mark.parametrize("width", [80, 100, 160])
def test_summary_of_equal_blocks_by_width(width, monkeypatch, golden):
    monkeypatch.setenv("COLUMNS", str(width))
    block = {
        "attention": {"query": {"kernel": jax.numpy.zeros((64, 64)), "bias": jax.numpy.zeros(6)}}
    }
    params = {
        "embed": jax.numpy.zeros((50, 64)),
        "blocks": [block] * 12,
        "stages": [{"layers": [block] * 3}] * 4,
        "last": [block] * 2,
    }
    model = spmd.FunctionalModel(
        lambda key: params,
        lambda params, x: x @ params["blocks"][0]["attention"]["query"]["kernel"],
    )
    layout = spmd.Layout(params=(spmd.Rule("blocks/7/**/kernel", ("data",)),), name="mine")
    trainer = spmd.Trainer(
        model,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.1),
        mesh="data=8",
        layout=layout,
    )
    assert max(map(len, trainer.summary().splitlines())) <= width
    golden(f"summary_of_equal_blocks_{width}", str(trainer.summary()))


def test_words_are_not_split():
    lines = aligned(
        [("what", "where"), ("reduce_scatter", "672.0 KiB of blocks/0/attention/query/kernel")],
        width=34,
    )
    assert lines == [
        "what            where",
        "reduce_scatter  672.0 KiB of",
        " " * 16 + "blocks/0/",
        " " * 16 + "attention/query/",
        " " * 16 + "kernel",
    ]
    assert (
        filled("a/very/long/path and words", width=8) == "a/very/\n  long/\n  path\n  and\n  words"
    )


@pytest.mark.parametrize(
    "environment, terminal, coloured",
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(environment, terminal, coloured, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = types.SimpleNamespace(isatty=lambda: terminal)
    painted = paint(
        "DOES NOT FIT: much\n  fits: no\nfits: it", {"fits": "green", "DOES NOT FIT": "red"}, stream
    )
    marked = "\x1b[1;31mDOES NOT FIT\x1b[0m: much\n  fits: no\n\x1b[1;32mfits\x1b[0m: it"
    assert painted == (marked if coloured else "DOES NOT FIT: much\n  fits: no\nfits: it")


def sweep():
    tried = TrialResult(Trial(0, {"rate": ODD}, 0), 0.5, {}, history("loss"), "done", None)
    return Sweep([tried], [], ("eval_loss", "min"), 1)


def result():
    return Result(types.SimpleNamespace(step=3), history(), f"because {ODD}", None)


@pytest.mark.parametrize("made", [history, layout, sweep, result], ids=lambda made: made.__name__)
def test_what_comes_from_users_is_escaped(made):
    markup = made()._repr_html_()
    assert "&lt;b&gt;odd&lt;/b&gt;" in markup and "<b>odd" not in markup
    assert not re.findall(r"(?:src|href)=|url\(|@import|prefers-color-scheme", markup), (
        "nothing is fetched, and ink is the page's"
    )


def test_a_layout_is_a_line_and_a_table():
    assert (
        repr(layout())
        == f"Layout {ODD} on data=-1, model=2: 1 rule, 1 axis name, else shard:data; gradients by "
        "compiler, exact"
    )
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r"<tr>.*?</tr>", layout()._repr_html_())
    ]
    safe = ODD.replace("<", "&lt;").replace(">", "&gt;")
    assert rows == [
        ["", "of", "is", "except", "line"],
        [
            "parameters",
            f"{safe}/**/kernel",
            "[&quot;-&quot;, &quot;model&quot;]",
            f"{safe}/head",
            "7",
        ],
        ["axis name", safe, "&quot;model&quot;", "", ""],
        ["parameters", "all others", "shard:data", "", ""],
        ["batch", "all others", "[&quot;data&quot;]", "", ""],
        ["gradients", f"{safe}/embed", "int8", "", ""],
        ["gradients", "all others", "reduction compiler, codec exact", "", ""],
    ]
    plain = re.findall(r"<th>(.*?)</th>", spmd.Layout.load("zero1")._repr_html_())
    assert plain == ["", "of", "is"], "columns that say nothing are left out"


def test_every_key_of_a_layout_is_shown():
    """What a shipped file says beyond the defaults stands in its table."""
    markup = spmd.Layout.load("diloco")._repr_html_().split("<details>")[0]
    for said in ("mode local, every 50", "codec bfloat16", "error_feedback true"):
        assert said in markup, said


@pytest.mark.system
@pytest.mark.parametrize(
    "draw",
    [
        lambda *path: viz.curve(history("loss"), *path),
        lambda *path: viz.schedule(make_schedule("gpipe", stages=2, microbatches=2), *path),
        lambda *path: viz.timeline(
            spmd.simulate(spmd.ParameterServer(), workers=2, steps=3), *path
        ),
    ],
    ids=["curve", "schedule", "timeline"],
)
def test_drawings_show_where_no_file_is_asked_for(draw, tmp_path):
    picture = draw()
    shown = picture._repr_html_()
    assert picture.png().startswith(b"\x89PNG") and "dots" in repr(picture)
    assert (
        shown.count("<svg") == 1
        and "currentColor" in shown
        and "#000000" not in shown
        and "prefers-color-scheme" not in shown
    )
    assert draw(tmp_path / "new" / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in picture.save(tmp_path / "drawn.svg").read_text(encoding="utf-8")


def test_a_mesh_is_drawn_by_its_devices():
    drawing = viz.devices(spmd.make_mesh("data=2,model=2,stage=2"))
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r"<tr>.*?</tr>", drawing._repr_html_())
    ]
    assert (
        rows[0] == ["data, model", "stage 0", "stage 1"]
        and rows[2] == ["data 0, model 1", "2", "3"]
        and len(rows) == 5
    )
    with pytest.raises(MeshError, match="fix:"):
        viz.devices("data=3")


def test_an_array_is_drawn_by_its_pieces():
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("data", "model"))
    sharded = jax.device_put(
        np.zeros((8, 4), "f"), NamedSharding(mesh, PartitionSpec(None, "model"))
    )
    drawing = viz.pieces(sharded, ODD)
    assert re.findall(r'text-anchor="middle">([^<]*)<', drawing) == ["1, 3, 5, 7", "0, 2, 4, 6"], (
        "devices by number, not by place"
    )
    assert "&lt;b&gt;odd" in drawing and "<b>odd" not in drawing
    with pytest.raises(OptionError, match="not on a mesh"):
        viz.pieces(np.zeros(3))


def test_what_is_printed_is_what_a_cell_shows():
    """Text, with lines as they are, whether it is printed or stands alone; a summary has a table
    beside.
    """
    model = spmd.FunctionalModel(
        lambda key: {ODD: np.zeros((8, 4), "f")}, lambda params, x: x @ params[ODD]
    )
    summary = spmd.Trainer(
        model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1)
    ).summary()
    assert repr(summary) == str(summary) and "\n" in summary
    assert (
        "<td>float32[8, 4]</td>" in summary._repr_html_() and "<b>odd" not in summary._repr_html_()
    )
