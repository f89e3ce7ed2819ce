"""Folders of pictures, Parquet files, and `spmd data bench`."""

import datetime
import decimal
import errno
import logging
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import written

import spmd
from spmd.data.image_files import _eight_bits
from spmd.data.parquet_files import open_parquet
from spmd.errors import DataError, MissingExtraError, OptionError
from spmd.launch.cli import main


@pytest.fixture
def pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for label, name in enumerate(["cats", "dogs"]):
        (tmp_path / name).mkdir()
        for at in range(3):
            image.fromarray(np.full((4 + at, 6, 3), 100 * label + 10 * at, np.uint8)).save(
                tmp_path / name / f"{at}.png"
            )
    return tmp_path


def test_folders_are_classes(pictures):
    data = spmd.data.images(pictures, size=(4, 5), batch_size=4, shuffle=False, workers=2)
    batches = list(data)
    assert np.concatenate([batch["label"] for batch in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    pixels = np.concatenate([batch["image"] for batch in batches])
    assert pixels.shape == (6, 4, 5, 3) and pixels.dtype == np.float32
    assert np.allclose(pixels[:, 0, 0, 0] * 255, [0, 10, 20, 100, 110, 120])
    assert next(iter(spmd.data.images(pictures, size=(2, 2), channels=1, batch_size=6)))[
        "image"
    ].shape == (6, 2, 2, 1)


def test_hidden_pictures_are_not_read(pictures, caplog):
    hidden = pictures / "cats" / ".ipynb_checkpoints"
    (hidden / "deep").mkdir(parents=True)
    for path in (
        hidden / "0.png",
        hidden / "deep" / "0.png",
        pictures / "dogs" / "._0.png",
        pictures / "._0.png",
    ):
        path.write_bytes(b"notes of another program")
    data = spmd.data.images(pictures, size=(4, 5), batch_size=6, shuffle=False)
    assert next(iter(data))["label"].tolist() == [0, 0, 0, 1, 1, 1] and not caplog.messages


def test_pictures_come_in_the_order_of_folders_and_names(pictures):
    """As pathlib sorts them: "a" and what it holds before "a.png", and "b-1" after "b"; a folder
    named as a picture is no picture.
    """
    for path in ("a/x.png", "a.png/y.png", "b/x.PNG", "b-1/x.png"):
        (pictures / "cats" / path).parent.mkdir(parents=True)
        shutil.copy(pictures / "cats" / "0.png", pictures / "cats" / path)
    found = spmd.data.images(pictures, size=(4, 5), batch_size=6).format.paths
    assert found[:7] == tuple(
        map(str, sorted(path for path in (pictures / "cats").rglob("*") if path.is_file()))
    )


def test_folder_of_pictures_that_cannot_be_read_is_named(pictures, monkeypatch):
    def scandir(path):
        if Path(path).name == "more":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    listed = os.scandir
    (pictures / "cats" / "more").mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError) as raised:
        spmd.data.images(pictures, size=(4, 5), batch_size=6)
    assert (
        raised.value.summary == f"{pictures / 'cats' / 'more'} cannot be read: Permission denied."
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_their_exif_data_say(tmp_path, orientation):
    image, ops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
    (tmp_path / "a").mkdir()
    picture, exif = (
        image.fromarray(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)),
        image.Exif(),
    )
    exif[0x0112] = orientation
    picture.save(tmp_path / "a" / "0.png", exif=exif)
    upright = np.asarray(ops.exif_transpose(image.open(tmp_path / "a" / "0.png")))
    assert np.array_equal(upright, np.asarray(picture)) == (orientation == 1)
    read = next(iter(spmd.data.images(tmp_path, size=upright.shape[:2], batch_size=1)))["image"][0]
    assert np.array_equal(np.rint(read * 255), upright)


def test_a_picture_that_is_cut_off_is_named(pictures):
    path = pictures / "dogs" / "1.png"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"1\.png: it cannot be read"):
        list(spmd.data.images(pictures, size=(4, 5), batch_size=6))
    assert (
        len(
            next(iter(spmd.data.images(pictures, size=(4, 5), batch_size=6, on_error="skip")))[
                "label"
            ]
        )
        == 5
    )
    with pytest.raises(
        DataError, match=r"holds no pictures in folders that are classes; it has no folders"
    ):
        spmd.data.images(pictures / "cats", size=(4, 5), batch_size=6)
    for size in ((4, 0), 32, (4, 4, 3), (True, 4)):
        with pytest.raises(OptionError, match=r"fix: size=\(height, width\)"):
            spmd.data.images(pictures, size=size, batch_size=6)


def test_parquet_lists_of_one_length(tmp_path):
    """A column of lists that could have any length, as most writers make them; one of another
    length is a bad record.
    """
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pairs = [[float(at), float(at)] for at in range(20)]
    parquet.write_table(
        arrow.table({"at": range(20), "pair": pairs}), tmp_path / "a.parquet", row_group_size=6
    )
    data = spmd.data.parquet(tmp_path / "a.parquet", batch_size=5)
    assert str(data.fields["pair"]) == "float32[2]"
    for batch in data.epoch(0):
        assert np.array_equal(batch["pair"], np.stack([batch["at"]] * 2, axis=1).astype(np.float32))
    pairs[13], pairs[15], pairs[16] = None, [1.0], [1.0, None]
    parquet.write_table(
        arrow.table({"at": range(20), "pair": pairs}), tmp_path / "b.parquet", row_group_size=6
    )
    for row, what in ((13, "no value"), (15, "a list that is not of length 2"), (16, "no value")):
        with pytest.raises(DataError, match=rf'row {row}: column "pair" has {what}'):
            list(
                spmd.data.parquet(tmp_path / "b.parquet", batch_size=1, shuffle=False).epoch(0, row)
            )
    left = [
        batch["at"]
        for batch in spmd.data.parquet(
            tmp_path / "b.parquet", batch_size=1, shuffle=False, on_error="skip"
        )
    ]
    assert sorted(np.concatenate(left).tolist()) == [
        at for at in range(20) if at not in (13, 15, 16)
    ]
    parquet.write_table(arrow.table({"odd": [[1.0], [1.0, 2.0]]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="its lists are of several lengths"):
        spmd.data.parquet(tmp_path / "c.parquet", batch_size=1)


def test_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part in range(2):
        numbers = list(range(part * 25, part * 25 + 25))
        pairs = arrow.FixedSizeListArray.from_arrays(
            arrow.array(np.repeat(numbers, 2).astype(np.float32)), 2
        )
        half = [None if at == 30 else at / 2 for at in numbers]
        parquet.write_table(
            arrow.table({"at": numbers, "half": half, "pair": pairs}),
            tmp_path / f"{part}.parquet",
            row_group_size=10,
        )
    options = {"batch_size": 8, "seed": 3}
    with pytest.raises(DataError, match=r'1\.parquet, row 5: column "half" has no value'):
        list(spmd.data.parquet(tmp_path / "*.parquet", **options))
    data = spmd.data.parquet(tmp_path / "*.parquet", defaults={"half": -1}, workers=2, **options)
    assert {name: str(field) for name, field in data.fields.items()} == {
        "at": "int64[]",
        "half": "float32[]",
        "pair": "float32[2]",
    }
    batches = list(data.epoch(1))
    at = np.concatenate([batch["at"] for batch in batches])
    assert sorted(at) == list(range(50)) and at.tolist() == data.order.epoch(1).tolist()
    assert np.array_equal(
        np.concatenate([batch["half"] for batch in batches]),
        np.where(at == 30, -1, at / 2).astype(np.float32),
    )
    assert np.array_equal(
        np.concatenate([batch["pair"] for batch in batches]),
        np.stack([at, at], axis=1).astype(np.float32),
    )
    with pytest.raises(OptionError, match='did you mean "half"'):
        spmd.data.parquet(tmp_path / "*.parquet", columns=["halv"], **options)
    with pytest.raises(DataError, match="is no Parquet file"):
        (tmp_path / "a.txt").write_text("hello")
        spmd.data.parquet(tmp_path / "a.txt", **options)


def test_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_text("")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"\[parquet\]"):
        spmd.data.parquet(tmp_path / "a.parquet", batch_size=1)


def bench(capsys, *words):
    code = main(["data", "bench", *map(str, words)])
    output = capsys.readouterr()
    return code, output.out + output.err


def test_bench_command_measures_reading(tmp_path, capsys):
    csv = written.csv(tmp_path / "a.csv", [f"{at},{at / 2}" for at in range(50)], "x,y")
    code, output = bench(capsys, csv, "--batch-size", 8, "--step-ms", 60_000)
    assert (
        code == 0
        and "50 records of 1 CSV file in 7 batches of 8" in output
        and "records/s" in output
        and "(6 batches, 0 workers)" in output
    )
    assert "the device does not wait" in output
    code, output = bench(
        capsys,
        csv,
        "--batch-size",
        8,
        "--step-ms",
        1e-6,
        "--batches",
        3,
        "--workers",
        2,
        "--shuffle",
        "16",
    )
    assert (
        code == 0
        and "(2 batches, 2 workers)" in output
        and "the device waits 100 % of the time" in output
    )


def test_bench_command_reads_features_from_the_first_record(tmp_path, capsys):
    path = written.tfrecord(
        tmp_path / "a.tfrecord",
        [written.example(x=np.ones(3, np.float32), y=[at], z=b"abc") for at in range(9)],
    )
    code, output = bench(capsys, path, "--batch-size", 3)
    assert code == 0
    assert [line.split() for line in output.splitlines()[1:4]] == [
        ["x", "float32[3]"],
        ["y", "int64[1]"],
        ["z", "uint8[3]"],
    ]
    assert "y  int32[]" in bench(capsys, path, "--batch-size", 3, "--features", "y=int32[]")[1]


def test_bench_command_reports_bad_arguments(tmp_path, capsys):
    csv = written.csv(tmp_path / "a.csv", ["1,2"] * 9, "x,y")
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.tfrecord").write_bytes(b"")
    (tmp_path / "a.array_record").write_bytes(b"no")
    written.tfrecord(tmp_path / "b.tfrecord", [b"\xff"])
    for words, text in [
        ([tmp_path / "b.csv", "--batch-size", 3], "no file matches"),
        ([tmp_path / "a.txt", "--batch-size", 3], "files that end in txt"),
        ([csv, "--batch-size", 9], "there is only one batch, of 9 records"),
        ([csv, "--batch-size", 3, "--batches", 1], "--batches 1 is too few"),
        ([csv, "--batch-size", 3, "--step-ms", 0], "--step-ms 0."),
        ([csv, "--batch-size", 3, "--step-ms", "nan"], "--step-ms nan."),
        (
            [csv, "--batch-size", 3, "--features", "x=int32[]"],
            "--features is for tf.train.Example; CSV files have columns",
        ),
        ([tmp_path / "a.tfrecord", "--batch-size", 3], "all files are empty"),
        (
            [tmp_path / "b.tfrecord", "--batch-size", 3],
            "b.tfrecord: the first record is no tf.train.Example with features",
        ),
        (
            [tmp_path / "a.array_record", "--batch-size", 3],
            "a.array_record: its first record cannot be read",
        ),
        ([csv, "--batch-size", 3, "--shuffle", "yes"], '--shuffle "yes"'),
    ]:
        code, output = bench(capsys, *words)
        assert code == 2 and text in output, output


def lists(path, rows):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kind = arrow.list_(arrow.float32(), 2)
    parquet.write_table(
        arrow.table({"at": list(range(len(rows))), "pair": arrow.array(rows, kind)}),
        path,
        row_group_size=3,
    )
    return path


def test_lists_that_are_missing_do_not_move_others(tmp_path):
    path = lists(
        tmp_path / "a.parquet", [[0, 1], None, [2, 3], [4, 5], [6, None], [8, 9], None, [10, 11]]
    )
    options = {"batch_size": 8, "shuffle": False}
    with pytest.raises(
        DataError, match=r'a\.parquet, row 1: column "pair" has no value \(2 more of this batch'
    ):
        list(spmd.data.parquet(path, **options))
    (batch,) = spmd.data.parquet(path, on_error="skip", **options)
    assert batch["at"].tolist() == [0, 2, 3, 5, 7]
    assert batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [8, 9], [10, 11]]
    with pytest.raises(OptionError, match='defaults: column "pair" holds lists'):
        spmd.data.parquet(path, defaults={"pair": 0}, **options)


def table(path, **columns):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        arrow.table({name: arrow.array(values) for name, values in columns.items()}),
        path,
        row_group_size=3,
    )
    return path


def test_columns_of_parquet_that_are_no_numbers_raise_at_once(tmp_path):
    day = datetime.datetime(2020, 1, 1)
    for name, values in {
        "struct": [{"x": 1}],
        "decimal128": [decimal.Decimal("1.5")],
        "timestamp": [day],
        "string": ["x"],
        "date32": [day.date()],
        "null": [None],
    }.items():
        with pytest.raises(
            DataError,
            match=rf'column "a" is {name}.*, which cannot be placed on a device.*\n    fix: '
            r"columns=",
        ):
            spmd.data.parquet(table(tmp_path / "a.parquet", a=values), batch_size=1)
    table(tmp_path / "b.parquet", a=[1])
    with pytest.raises(DataError, match=r"b.parquet has columns a int64; .*a.parquet has a null"):
        spmd.data.parquet(tmp_path / "?.parquet", batch_size=1)
    for options, text in [
        ({"columns": "a"}, "columns='a'"),
        ({"columns": []}, "a list of names"),
        ({"columns": ["a", "a"]}, "each once"),
        ({"defaults": 1}, "defaults=1 is an int"),
        ({"defaults": {"a": 1.5}}, 'defaults: "a" is 1.5, and the column is int64'),
    ]:
        with pytest.raises(OptionError, match=text):
            spmd.data.parquet(tmp_path / "b.parquet", batch_size=1, **options)


def test_values_of_parquet_that_cannot_be_read_raise(tmp_path):
    path = table(
        tmp_path / "a.parquet",
        at=list(range(6)),
        a=[1.0, 2, 1e300, 4, 5, 6],
        b=[True, None, True, False, True, True],
    )
    options = {"batch_size": 6, "shuffle": False}
    with pytest.raises(DataError, match=r'row 1: column "b" has no value'):
        list(spmd.data.parquet(path, **options))
    with pytest.raises(
        DataError, match=r'row 2: column "a" has a number that float32 does not hold'
    ):
        list(spmd.data.parquet(path, defaults={"b": False}, **options))
    (batch,) = spmd.data.parquet(path, columns=["at", "b"], defaults={"b": 1}, **options)
    assert batch["at"].tolist() == list(range(6)) and batch["b"].tolist() == [
        True,
        True,
        True,
        False,
        True,
        True,
    ]
    (batch,) = spmd.data.parquet(path, on_error="skip", **options)
    assert batch["at"].tolist() == [0, 3, 4, 5] and batch["b"].tolist() == [True, False, True, True]
    data = spmd.data.parquet(path, columns=["at"], on_error="skip", **options)
    raw = bytearray(path.read_bytes())
    start = open_parquet(str(path)).metadata.row_group(1).column(0).data_page_offset
    raw[start : start + 40] = b"\xff" * 40
    path.write_bytes(raw)
    assert [batch["at"].tolist() for batch in pickle.loads(pickle.dumps(data))] == [[0, 1, 2]]
    with pytest.raises(DataError, match=r"a.parquet, row 3: its row group cannot be read"):
        list(spmd.data.parquet(path, columns=["at"], **options))


def test_16_bit_pictures_and_folders_without_classes(pictures, caplog):
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(pictures / "cats" / "0.png")
    (pictures / ".hidden").mkdir()
    (pictures / "cats" / "1.png").rename(pictures / ".hidden" / "1.png")
    (pictures / "cats" / "2.png").rename(pictures / "2.png")
    (pictures / "emus").mkdir()
    with caplog.at_level(logging.WARNING, "spmd"):
        data = spmd.data.images(pictures, size=(1, 1), batch_size=4, shuffle=False)
    assert (
        "1 pictures stand beside the folders of classes and are not read; classes without a "
        "picture: emus." in caplog.text
    )
    (batch,) = pickle.loads(pickle.dumps(data))
    assert batch["label"].tolist() == [0, 1, 1, 1] and batch["image"][0].tolist() == [
        [[np.float32((40_000 >> 8) / 255)] * 3]
    ]
    # as some versions of Pillow open such a file
    older = image.fromarray(np.full((1, 1), 40_000, np.int32))
    older.format = "PNG"
    assert np.asarray(_eight_bits(older, older.format, image)).tolist() == [[40_000 >> 8]]
    image.fromarray(np.ones((4, 4), np.float32)).save(pictures / "cats" / "3.tiff")
    with pytest.raises(
        DataError, match=r"3.tiff: it cannot be read: ValueError: its numbers are of 32 bits"
    ):
        list(spmd.data.images(pictures, size=(1, 1), batch_size=8))
