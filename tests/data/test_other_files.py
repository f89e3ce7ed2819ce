"""Pictures in folders, Parquet files, and the command that measures reading."""

import numpy as np
import pytest
import written

import spmd
from spmd.errors import DataError, MissingExtraError, OptionError
from spmd.launch.cli import main


@pytest.fixture
def pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for label, name in enumerate(["cats", "dogs"]):
        (tmp_path / name).mkdir()
        for at in range(3):
            image.fromarray(np.full((4 + at, 6, 3), 100 * label + 10 * at, np.uint8)).save(tmp_path / name / f"{at}.png")
    return tmp_path


def test_folders_are_classes(pictures):
    data = spmd.data.images(pictures, size=(4, 5), batch_size=4, shuffle=False, workers=2)
    batches = list(data)
    assert np.concatenate([batch["label"] for batch in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    pixels = np.concatenate([batch["image"] for batch in batches])
    assert pixels.shape == (6, 4, 5, 3) and pixels.dtype == np.float32
    assert np.allclose(pixels[:, 0, 0, 0] * 255, [0, 10, 20, 100, 110, 120])
    assert next(iter(spmd.data.images(pictures, size=(2, 2), channels=1, batch_size=6)))["image"].shape == (6, 2, 2, 1)


def test_a_picture_that_is_cut_off_is_named(pictures):
    path = pictures / "dogs" / "1.png"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"1\.png: it cannot be read"):
        list(spmd.data.images(pictures, size=(4, 5), batch_size=6))
    assert len(next(iter(spmd.data.images(pictures, size=(4, 5), batch_size=6, on_error="skip")))["label"]) == 5
    with pytest.raises(DataError, match=r"holds no pictures in folders that are classes; it has no folders"):
        spmd.data.images(pictures / "cats", size=(4, 5), batch_size=6)
    for size in ((4, 0), 32, (4, 4, 3)):
        with pytest.raises(OptionError, match="a size is"):
            spmd.data.images(pictures, size=size, batch_size=6)


def test_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part in range(2):
        numbers = list(range(part * 25, part * 25 + 25))
        pairs = arrow.FixedSizeListArray.from_arrays(arrow.array(np.repeat(numbers, 2).astype(np.float32)), 2)
        half = [None if at == 30 else at / 2 for at in numbers]
        parquet.write_table(arrow.table({"at": numbers, "half": half, "pair": pairs}), tmp_path / f"{part}.parquet", row_group_size=10)
    options = {"batch_size": 8, "seed": 3}
    with pytest.raises(DataError, match=r'1\.parquet, row 5: column "half" has no value'):
        list(spmd.data.parquet(tmp_path / "*.parquet", **options))
    data = spmd.data.parquet(tmp_path / "*.parquet", defaults={"half": -1}, workers=2, **options)
    assert {name: str(field) for name, field in data.fields.items()} == {"at": "int64[]", "half": "float32[]", "pair": "float32[2]"}
    batches = list(data.epoch(1))
    at = np.concatenate([batch["at"] for batch in batches])
    assert sorted(at) == list(range(50)) and at.tolist() == data.order.epoch(1).tolist()
    assert np.array_equal(np.concatenate([batch["half"] for batch in batches]), np.where(at == 30, -1, at / 2).astype(np.float32))
    assert np.array_equal(np.concatenate([batch["pair"] for batch in batches]), np.stack([at, at], axis=1).astype(np.float32))
    with pytest.raises(OptionError, match='did you mean "half"'):
        spmd.data.parquet(tmp_path / "*.parquet", columns=["halv"], **options)
    with pytest.raises(DataError, match="is no Parquet file"):
        (tmp_path / "a.txt").write_text("hello")
        spmd.data.parquet(tmp_path / "a.txt", **options)


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_text("")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"spmd\[parquet\]"):
        spmd.data.parquet(tmp_path / "a.parquet", batch_size=1)


def bench(capsys, *words):
    code = main(["data", "bench", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_the_command_measures_reading(tmp_path, capsys):
    csv = written.csv(tmp_path / "a.csv", [f"{at},{at / 2}" for at in range(50)], "x,y")
    code, told = bench(capsys, csv, "--batch-size", 8, "--step-ms", 60_000)
    assert code == 0 and "50 records of 1 CSV file in 7 batches of 8" in told and "records/s" in told and "(6 batches, 0 workers)" in told
    assert "the device does not wait" in told
    code, told = bench(capsys, csv, "--batch-size", 8, "--step-ms", 1e-6, "--batches", 3, "--workers", 2, "--shuffle", "16")
    assert code == 0 and "(2 batches, 2 workers)" in told and "the device waits 100 % of the time" in told


def test_the_command_reads_features_from_the_first_record(tmp_path, capsys):
    path = written.tfrecord(tmp_path / "a.tfrecord", [written.example(x=np.ones(3, np.float32), y=[at], z=b"abc") for at in range(9)])
    code, told = bench(capsys, path, "--batch-size", 3)
    assert code == 0
    assert [line.split() for line in told.splitlines()[1:4]] == [["x", "float32[3]"], ["y", "int64[1]"], ["z", "uint8[3]"]]
    assert "y  int32[]" in bench(capsys, path, "--batch-size", 3, "--features", "y=int32[]")[1]


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    csv = written.csv(tmp_path / "a.csv", ["1,2"] * 9, "x,y")
    (tmp_path / "a.txt").write_text("")
    for words, text in [
        ([tmp_path / "b.csv", "--batch-size", 3], "no file matches"),
        ([tmp_path / "a.txt", "--batch-size", 3], "files that end in txt"),
        ([csv, "--batch-size", 9], "there is one batch, of 9 records: nothing to measure"),
        ([csv, "--batch-size", 3, "--batches", 1], "--batches 1: from 2"),
        ([csv, "--batch-size", 3, "--step-ms", 0], "--step-ms 0: more than 0"),
        ([csv, "--batch-size", 3, "--shuffle", "yes"], '--shuffle "yes"'),
    ]:
        code, told = bench(capsys, *words)
        assert code == 2 and text in told, told


def lists(path, rows):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kind = arrow.list_(arrow.float32(), 2)
    parquet.write_table(arrow.table({"at": list(range(len(rows))), "pair": arrow.array(rows, kind)}), path, row_group_size=3)
    return path


def test_lists_that_are_missing_do_not_move_others(tmp_path):
    path = lists(tmp_path / "a.parquet", [[0, 1], None, [2, 3], [4, 5], [6, None], [8, 9], None, [10, 11]])
    options = {"batch_size": 8, "shuffle": False}
    with pytest.raises(DataError, match=r'a\.parquet, row 1: column "pair" has no value \(2 more of this batch'):
        list(spmd.data.parquet(path, **options))
    (batch,) = spmd.data.parquet(path, on_error="skip", **options)
    assert batch["at"].tolist() == [0, 2, 3, 5, 7]
    assert batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [8, 9], [10, 11]]
    with pytest.raises(OptionError, match='defaults: column "pair" holds lists'):
        spmd.data.parquet(path, defaults={"pair": 0}, **options)
