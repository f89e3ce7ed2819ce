"""Samples in tar files: written, and read for comparison, by the package webdataset."""

import io
import tarfile

import jax
import numpy as np
import optax
import pytest
import webdataset
from flax import nnx
from webdataset.tariterators import group_by_keys, tar_file_expander

import spmd
from spmd.errors import DataError, OptionError

X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = np.arange(40) % 4


def write(path, numbers, name="{:04}"):
    with webdataset.TarWriter(str(path)) as file:
        for number in numbers:
            file.write({"__key__": name.format(number), "npy": X[number], "cls": int(Y[number])})


@pytest.fixture
def shards(tmp_path):
    for shard in range(4):
        write(tmp_path / f"train-{shard}.tar", range(10 * shard, 10 * shard + 10))
    return str(tmp_path / "train-*.tar")


def decode(sample):
    return {"x": np.load(io.BytesIO(sample["npy"])), "y": np.int32(sample["cls"])}


def joined(batches):
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def train(data, **options):
    return spmd.fit(
        lambda: nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
        data,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1, momentum=0.9),
        progress=False,
        **options,
    )


def test_samples_are_those_of_the_package(shards, tmp_path):
    read = joined(spmd.data.webdataset(shards, decode=decode, batch_size=7, shuffle=False))
    np.testing.assert_array_equal(read["x"], X)
    expected = []
    for path in sorted(tmp_path.glob("train-*.tar")):
        with path.open("rb") as file:
            expected += group_by_keys(tar_file_expander([{"url": path.name, "stream": file}]))
    assert [decode(sample)["x"].tolist() for sample in expected] == read["x"].tolist()
    assert [int(sample["cls"]) for sample in expected] == read["y"].tolist()


def test_names_and_endings(tmp_path):
    seen = []
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as file:
        file.write({"__key__": "one/0001", "seg.png": b"s", "JPG": b"j", "txt": "word"})
        file.write({"__key__": "one/0002", "seg.png": b"", "JPG": b"k", "txt": "more"})

    def look(sample):
        seen.append(sample)
        return {"n": np.int32(len(sample["seg.png"]))}

    read = joined(
        spmd.data.webdataset(tmp_path / "a.tar", decode=look, batch_size=2, shuffle=False)
    )
    assert read["n"].tolist() == [1, 0]
    assert seen[-1] == {"__key__": "one/0002", "seg.png": b"", "jpg": b"k", "txt": b"more"}


def test_long_names(tmp_path):
    """Headers of their own hold names of more than 100 characters."""
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = tmp_path / f"{form}.tar"
        with tarfile.open(path, "w", format=form) as file:
            for number in range(3):
                info = tarfile.TarInfo(f"{'folder/' * 30}{number}.txt")
                info.size = 1
                file.addfile(info, io.BytesIO(str(number).encode()))
        records = spmd.data.webdataset(
            path,
            decode=lambda sample: {"n": np.int32(sample["txt"])},
            batch_size=1,
            shuffle=False,
        )
        assert joined(records)["n"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_fit_is_that_of_arrays(shards, workers):
    data = spmd.data.webdataset(shards, decode=decode, batch_size=8, workers=workers)
    given = train(data, epochs=3)
    arrays = train({"x": X, "y": Y.astype("int32")}, batch_size=8, epochs=3)
    jax.tree.map(np.testing.assert_array_equal, given.state.params, arrays.state.params)


def test_run_resumes_at_the_next_sample(shards, tmp_path):
    def data():
        return spmd.data.webdataset(shards, decode=decode, batch_size=8, index=tmp_path / "index")

    undisturbed = train(data(), epochs=3)
    train(data(), steps=7, checkpoint=tmp_path / "run")
    resumed = train(data(), epochs=3, checkpoint=tmp_path / "run", resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, undisturbed.state.params)


def test_notes_on_a_shard_are_no_sample(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for name in ("__meta__/a.json", "folder", "0.txt", "LICENSE", "._1.txt", "1.txt"):
            info = tarfile.TarInfo(name)
            if name == "folder":
                info.type = tarfile.DIRTYPE
                file.addfile(info)
                continue
            info.size = 1
            file.addfile(info, io.BytesIO(b"7"))
    records = spmd.data.webdataset(
        path, decode=lambda sample: {"n": np.int32(sample["txt"])}, batch_size=2
    )
    assert records.examples == 2


def bad(number):
    def decode_all_but_one(sample):
        if int(sample["cls"]) == 3:
            raise ValueError("no picture")
        return decode(sample)

    return decode_all_but_one if number else decode


def test_bad_samples_are_named_or_skipped(shards):
    with pytest.raises(DataError, match=r"train-0.tar, sample 3 \(byte \d+\): decode raises"):
        list(spmd.data.webdataset(shards, decode=bad(1), batch_size=8, shuffle=False))
    records = spmd.data.webdataset(shards, decode=bad(1), batch_size=8, on_error="skip")
    assert len(joined(records)["y"]) == 30


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x1f\x8b\x08 compressed", "is compressed \\(gzip\\)"),
        (b"no tar file" * 100, "a.tar: "),
    ],
)
def test_files_that_are_no_tar_files(tmp_path, content, message):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        spmd.data.webdataset(path, decode=decode, batch_size=2)


@pytest.mark.parametrize("left", [0.5, 0.99])
def test_truncated_file(tmp_path, left):
    path = tmp_path / "a.tar"
    write(path, range(10))
    content = path.read_bytes()
    last = content.rindex(b"0009.npy")
    path.write_bytes(content[: int(last + 600 * left)])
    with pytest.raises(DataError, match=r"a\.tar"):
        spmd.data.webdataset(path, decode=decode, batch_size=2)


def test_file_that_changes_after_it_was_indexed(tmp_path):
    path = tmp_path / "a.tar"
    write(path, range(10))
    records = spmd.data.webdataset(path, decode=decode, batch_size=2, shuffle=False)
    content = bytearray(path.read_bytes())
    content[1024:1536] = b"x" * 512
    path.write_bytes(content)
    with pytest.raises(DataError, match="has changed since its samples were found"):
        list(records)


def test_two_parts_of_one_ending(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for name in ("0.txt", "0.TXT"):
            info = tarfile.TarInfo(name)
            info.size = 1
            file.addfile(info, io.BytesIO(b"7"))
    with pytest.raises(DataError, match=r"0\.TXT is there twice"):
        spmd.data.webdataset(path, decode=decode, batch_size=2)


def test_decode_is_needed():
    with pytest.raises(OptionError, match="decode is"):
        spmd.data.webdataset("a.tar", decode=None, batch_size=2)


def add(file, name, content=b"7", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    file.addfile(info, io.BytesIO(content))


def test_what_stands_between_the_parts_of_a_sample(tmp_path):
    """As macOS writes it; by the package's own reader, too, these are two samples."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for number in range(2):
            for name in (f"._{number}.txt", f"{number}.txt", "README", f"{number}.cls"):
                add(file, name, str(number).encode())
    with path.open("rb") as file:
        files = tar_file_expander([{"url": path.name, "stream": file}])
        expected = [sorted(set(sample) - {"__url__"}) for sample in group_by_keys(files)]
    seen = []
    records = spmd.data.webdataset(
        path,
        decode=lambda sample: seen.append(sorted(sample)) or {"n": np.int32(sample["cls"])},
        batch_size=2,
        shuffle=False,
    )
    assert joined(records)["n"].tolist() == [0, 1]
    assert seen[-2:] == [[name for name in names if name != "__local_path__"] for names in expected]


@pytest.mark.parametrize("at", [0, 20, 99])
def test_damaged_header(tmp_path, at):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for number in range(100):
            add(file, f"{number}.txt")
    content = bytearray(path.read_bytes())
    content[1024 * at + 150] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar: "):
        spmd.data.webdataset(path, decode=lambda sample: {"n": np.int32(0)}, batch_size=2)


def test_file_of_every_shorter_length_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for number in range(5):
            add(file, f"{number}.txt", b"x" * 700)
    content = path.read_bytes()
    end = 5 * (512 + 1024) + 1024
    for size in range(1, end, 97):
        path.write_bytes(content[:size])
        with pytest.raises(DataError):
            spmd.data.webdataset(path, decode=lambda sample: {"n": np.int32(0)}, batch_size=2)
    path.write_bytes(content[:end])
    records = spmd.data.webdataset(path, decode=lambda sample: {"n": np.int32(0)}, batch_size=2)
    assert records.examples == 5


def test_two_tar_files_in_one(tmp_path):
    path = tmp_path / "a.tar"
    write(path, range(10))
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(DataError, match="is no file of it"):
        spmd.data.webdataset(path, decode=decode, batch_size=2)


def test_links_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        add(file, "0.txt")
        add(file, "1.txt", b"", type=tarfile.LNKTYPE, linkname="0.txt")
    with pytest.raises(DataError, match=r"1\.txt is a link"):
        spmd.data.webdataset(path, decode=lambda sample: {"n": np.int32(0)}, batch_size=2)
