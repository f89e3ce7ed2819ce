"""The report: one file, nothing fetched, nothing left unescaped."""

import html.parser
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import viz
from spmd.errors import CheckpointError, OptionError

EVIL = '<script>alert("x")</script>'


class Reader(html.parser.HTMLParser):
    """Tags with their attributes, and the text between them; complains about tags that do not
    match.
    """

    VOID = ("meta", "img", "br")

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    layout = spmd.Layout(
        description=f"{EVIL} over `model`.",
        params=(spmd.Rule("w<b>", ("data", "model")),),
        source="<i>mine</i>",
        default=spmd.Default("replicate"),
    )
    model = spmd.FunctionalModel(
        lambda key: {"w<b>": jnp.zeros((8, 2)), "b": jnp.zeros(2)},
        lambda p, x: x @ p["w<b>"] + p["b"],
    )
    data = np.ones((16, 8), np.float32), np.ones((16, 2), np.float32)
    result = spmd.fit(
        model,
        data,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.01),
        mesh="data=4,model=2",
        layout=layout,
        batch_size=8,
        steps=4,
        eval_data=data,
        checkpoint=folder,
        profile="2:4",
    )
    return result, folder


def test_page_holds_everything_itself(run, tmp_path):
    result, folder = run
    page = viz.report(
        result, tmp_path / "new" / "report.html", title="A & B", checkpoint=folder
    ).read_text(encoding="utf-8")
    reader = Reader(page)
    targets = [attrs["href"] for tag, attrs in reader.tags if tag == "a"]
    assert not re.search(
        r"https?://|//[a-z]|<link|<script|<img|@import|url\(",
        page.replace("http://www.w3.org/2000/svg", ""),
    )
    assert len(targets) == 3 and all((tmp_path / "new" / target).exists() for target in targets)
    assert "currentColor" in page, "drawings are readable on a dark page"


def test_page_opens_with_the_headline(run, tmp_path):
    result, folder = run
    text = Reader(
        viz.report(result, tmp_path / "report.html", title="A & B", checkpoint=folder).read_text(
            encoding="utf-8"
        )
    ).text
    loss, rate = result.history["eval_loss"][-1], result.samples_per_second
    place = 0
    for word in (f"{loss:.4g}", "spent training", f"{rate:,.0f}", "Curves", "measured in"):
        # behind the last one: on a slow machine the rate may be among the digits of the loss
        begin = text.find(word, place)
        assert begin >= 0, word
        place = begin + len(word)
    assert jax.__version__ in text


def test_page_says_what_was_run(run, tmp_path):
    result, folder = run
    text = Reader(
        viz.report(result, tmp_path / "report.html", title="A & B", checkpoint=folder).read_text(
            encoding="utf-8"
        )
    ).text
    assert f"{EVIL} over model." in text  # code, without its backticks
    # shown as text, not as tags
    assert "A & B" in text and EVIL in text and "<i>mine</i>" in text and "w<b>" in text
    assert "4 steps on 8 devices, 4 workers; gradients are reduced by compiler." in text
    assert (
        f"{result.history['loss'][-1]:.6g}" in text
        and f"{result.history['eval_loss'][-1]:.6g}" in text
    )
    assert "data=4, model=2: 8 devices of kind cpu" in text and "model 1" in text
    assert (
        "steps 3 to 4 on 8 devices, beside the plan for 1x8xcpu" in text
        and "exposed communication" in text
    )
    assert str(folder / "checkpoints") in text and "step 4" in text
    for line in result.trainer.summary().splitlines()[-1:]:
        assert line in text


def test_page_has_the_command_without_its_secrets(run, tmp_path, monkeypatch):
    words = ["python", "train.py", "--api-key", "pa55", "--uri=http://ann:pa55@host", "--lr", "0.1"]
    monkeypatch.setattr("sys.orig_argv", words)
    # as in a script, whatever other tests have imported
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    page = viz.report(run[0], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "pa55" not in page
    shown = "python train.py --api-key '***' '--uri=http://***@host' --lr 0.1"
    assert shown in Reader(page).text


def test_without_checkpoints_it_says_so(run, tmp_path):
    result, _ = run
    with pytest.raises(CheckpointError, match="there is no such folder"):
        viz.report(result, tmp_path / "a.html", checkpoint=tmp_path / "absent")
    assert not (tmp_path / "a.html").exists()
    assert "None were requested." in viz.report(result, tmp_path / "a.html").read_text(
        encoding="utf-8"
    )
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "none saved yet" in viz.report(
        result, tmp_path / "b.html", checkpoint=tmp_path / "run"
    ).read_text(encoding="utf-8")


def test_arguments_of_the_report(run, tmp_path):
    result, folder = run
    page = tmp_path / "a.html"
    for options, text in (
        (
            {"result": "runs/missing"},
            "result='runs/missing' is a str.\n    fix: what spmd.fit returns.",
        ),
        ({"title": 3}, "title=3 is an int.\n    fix: a str."),
        ({"checkpoint": 3}, "checkpoint=3 is an int.\n    fix: a folder, or an spmd.Checkpoint."),
    ):
        with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
            viz.report(**({"result": result, "path": page} | options))
    for inside in (folder / "checkpoints", folder / "checkpoints" / "4"):
        text = (
            f" is inside of the folder of a run, and not that folder.\n    fix: {folder}, which it "
            "is in."
        )
        with pytest.raises(CheckpointError, match=f"{re.escape(text)}$"):
            viz.report(result, page, checkpoint=inside)
        with pytest.raises(CheckpointError, match=f"{re.escape(text)}$"):
            result.trainer.restore(inside)
    with pytest.raises(
        CheckpointError, match="is not the folder of a run: it has neither checkpoints nor metrics"
    ):
        viz.report(result, page, checkpoint=spmd.Checkpoint(tmp_path))
    assert not page.exists()
    assert "step 4" in viz.report(result, page, checkpoint=spmd.Checkpoint(folder)).read_text(
        encoding="utf-8"
    )
