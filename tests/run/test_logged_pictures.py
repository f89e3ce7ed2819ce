"""Pictures from callbacks: files in the run's folder, records that name them, and TensorBoard,
which shows them and histograms.
"""

import struct
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from small import fit, numbers
from test_loggers import json_records

import spmd
from spmd.errors import OptionError
from spmd.run.pictures import MAGIC, png, write_picture

RANDOM = np.random.default_rng(0)
GRADIENT = RANDOM.integers(0, 256, (5, 7, 3)).astype(np.uint8)


def decoded(content):
    """The array of a PNG without filters, by its chunks."""
    assert content.startswith(MAGIC)
    at, chunks = len(MAGIC), {}
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            kind + body
        )
        chunks[kind], at = body, at + 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert depth == 8 and list(chunks)[-1] == b"IEND" and not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, {0: 1, 4: 2, 2: 3, 6: 4}[colour])


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (1, 1, 2), (3, 5, 3), (6, 2, 4)], ids=str)
def test_png_has_the_array(shape):
    array = RANDOM.integers(0, 256, shape).astype(np.uint8)
    assert (decoded(png(array[::-1])) == array[::-1].reshape(*shape[:2], -1)).all()


def test_pillow_reads_the_png(tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / write_picture(tmp_path, "a_b-c", 7, GRADIENT)
    assert (
        path == tmp_path / "pictures" / "a_b-c-00000007.png"
        and (np.asarray(image.open(path)) == GRADIENT).all()
    )


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("kind", ["figure", "png", "svg", "jax"])
def test_kinds_of_pictures(kind, tmp_path):
    if kind == "figure":
        picture = pytest.importorskip("matplotlib.figure").Figure()
        picture.subplots().plot([1, 2])
    elif kind == "jax":
        picture = jnp.asarray(GRADIENT)
    else:
        picture = tmp_path / f"given.{kind}"
        picture.write_bytes(
            png(GRADIENT)
            if kind == "png"
            else b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'
        )
    content = (tmp_path / write_picture(tmp_path, "it", 1, picture)).read_bytes()
    assert (b"<svg" in content) if kind == "svg" else content.startswith(MAGIC)


@pytest.mark.parametrize(
    ("picture", "why"),
    [
        (np.zeros((2, 2), np.float32), r"float32\[2, 2\]"),
        (np.zeros((2, 2, 5), np.uint8), r"uint8\[2, 2, 5\]"),
        (np.zeros((0, 2), np.uint8), r"uint8\[0, 2\]"),
        ([[1]], "a list"),
        (Path("missing.png"), "missing.png cannot be read: No such file"),
        (Path(__file__).with_name("small.py"), "neither a PNG nor an SVG"),
    ],
)
def test_what_is_no_picture_is_refused(picture, why, tmp_path):
    with pytest.raises(OptionError, match=why):
        write_picture(tmp_path, "it", 1, picture)


@pytest.mark.parametrize(
    "content", [MAGIC, MAGIC + b"\0" * 40, png(GRADIENT)[:32]], ids=["magic", "zeros", "cut off"]
)
def test_damaged_png_is_refused(content, tmp_path):
    (tmp_path / "it.png").write_bytes(content)
    with pytest.raises(
        OptionError, match=r"log_picture\(.it.\): .*it\.png is a damaged PNG file: it has no header"
    ):
        write_picture(tmp_path, "it", 1, tmp_path / "it.png")


def test_other_names_have_other_files(tmp_path):
    names = ["val/a", "val_a", "val a", "äö", "öä", "x" * 300, "x" * 299, "/" * 300]
    paths = [write_picture(tmp_path, name, 1, GRADIENT) for name in names]
    assert len(set(paths)) == len(names) == len(list((tmp_path / "pictures").iterdir()))


def test_second_picture_of_a_name_and_step_has_a_number(tmp_path):
    def twice(info):
        info.log_picture("it", GRADIENT[:2])
        info.log_picture("it", GRADIENT)

    fit(steps=2, callbacks=[twice], checkpoint=tmp_path)
    found = [
        record["pictures"]
        for record in json_records(tmp_path / "metrics.jsonl")
        if "pictures" in record
    ]
    assert [list(names) for names in found] == [["it"], ["it_2"]] * 2 and len(
        {*map(str, found)}
    ) == 4
    for pictures, rows in zip(found, [2, 5] * 2, strict=True):
        (path,) = pictures.values()
        assert (decoded((tmp_path / path).read_bytes()) == GRADIENT[:rows]).all()


def test_picture_without_a_name_is_refused(tmp_path):
    with pytest.raises(OptionError, match="log_picture: name=''"):
        write_picture(tmp_path, "", 1, GRADIENT)


def draw(info):
    info.log_picture("colours", GRADIENT)


def test_run_without_a_folder_says_once_that_it_has_no_pictures(caplog):
    assert int(fit(steps=3, callbacks=[draw]).state.step) == 3
    assert (
        caplog.text.count(
            'log_picture("colours"): the run has no folder to keep pictures in: none is logged.'
        )
        == 1
    )


def events(folder):
    """All events of all files, in the order of their names."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        while raw:
            (length,) = struct.unpack("<Q", raw[:8])
            found.append(Event.FromString(raw[12 : 12 + length]))
            raw = raw[16 + length :]
    return found


@pytest.mark.system
def test_tensorboard_shows_histograms_and_pictures(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    options = {
        "callbacks": [spmd.callbacks.Each(draw, every=2)],
        "watch": 2,
        "checkpoint": tmp_path / "run",
        "resume": True,
        "log_every": 1,
    }
    for steps in (3, 4):
        fit(
            numbers(),
            steps=steps,
            loggers=[spmd.loggers.TensorBoard(tmp_path / f"board{steps}")],
            **options,
        )
    first, resumed = events(tmp_path / "board3"), events(tmp_path / "board4")
    values = {value.tag: (event.step, value) for event in first for value in event.summary.value}
    step, image = values["pictures/colours"]
    assert step == 2 and (image.image.height, image.image.width, image.image.colorspace) == (
        5,
        7,
        3,
    )
    assert (decoded(image.image.encoded_image_string) == GRADIENT).all()
    records = [
        record
        for record in json_records(tmp_path / "run" / "metrics.jsonl")
        if "histograms" in record
    ]
    for name, fields in records[0]["histograms"].items():
        entry, (step, value) = spmd.loggers.Histogram(**fields), values[name]
        assert (
            step == 2
            and list(value.histo.bucket) == entry.counts
            and list(value.histo.bucket_limit) == entry.edges[1:]
        )
    assert records[0]["step"] == 2 and not any(event.HasField("session_log") for event in first)
    # what an interrupted run has from here on is dropped
    assert [event.step for event in resumed if event.HasField("session_log")] == [4]
    assert {event.step for event in resumed if event.summary.value} == {4}
