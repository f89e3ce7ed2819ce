"""TFRecord and ArrayRecord files: features read in bulk and one at a time, and damaged records."""

import gzip
import logging
import sys

import numpy as np
import pytest
import written
from linear import fit

import spmd
from spmd.data import tfrecords
from spmd.data.features import example_message
from spmd.errors import DataError, MissingExtraError, OptionError

ROWS = 40
FEATURES = {
    "x": spmd.data.fixed((2, 2), "float32"),
    "y": spmd.data.fixed((), "int32"),
    "raw": spmd.data.fixed((3,), "uint8"),
}


def example(at, **options):
    return written.example(
        x=np.arange(4, dtype=np.float32) + at, y=[at * 100 - 300], raw=bytes([at, 1, 2]), **options
    )


@pytest.fixture
def path(tmp_path):
    """Whole numbers of one to ten bytes, so that records have several lengths, and are built in
    several ways.
    """
    return written.tfrecord(
        tmp_path / "a.tfrecord", [example(at, packed=at % 5 != 0) for at in range(ROWS)]
    )


def read(path, features=None, **options):
    options = {"batch_size": 16, "shuffle": False, **options}
    data = spmd.data.tfrecord(path, features=FEATURES if features is None else features, **options)
    batches = list(data)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in data.fields}


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 64, 100, 1001])
def test_checksums_are_those_made_bit_by_bit(length):
    data = np.random.default_rng(length).bytes(length)
    assert tfrecords.crc_function()(data) == written.crc(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_features_are_read(path, workers):
    rows = read(path, workers=workers)
    assert rows["y"].tolist() == [at * 100 - 300 for at in range(ROWS)]
    assert np.array_equal(
        rows["x"], [(np.arange(4, dtype=np.float32) + at).reshape(2, 2) for at in range(ROWS)]
    )
    assert rows["raw"][:, 0].tolist() == list(range(ROWS))


def test_features_that_are_not_read_may_be_anything(tmp_path):
    records = [
        written.example(y=[at], name=b"n" * (at % 3), more=[at] * (at % 2)) for at in range(9)
    ]
    path = written.tfrecord(tmp_path / "a.tfrecord", records)
    assert read(path, {"y": spmd.data.fixed((), "int64")})["y"].tolist() == list(range(9))


def test_whole_numbers_of_all_sizes(tmp_path):
    values = [0, -1, 127, 128, 2**31 - 1, -(2**31), 2**62, -(2**63), 2**63 - 1, 300]
    path = written.tfrecord(
        tmp_path / "a.tfrecord", [written.example(y=[x, y]) for x in values for y in values]
    )
    assert read(path, {"y": spmd.data.fixed((2,), "int64")})["y"].tolist() == [
        [x, y] for x in values for y in values
    ]


def test_defaults_decoding_and_padding(tmp_path):
    records = [
        written.example(
            text=bytes(range(at)), tokens=list(range(at)), **({"w": [0.5]} if at % 2 else {})
        )
        for at in range(5)
    ]
    path = written.tfrecord(tmp_path / "a.tfrecord", records)
    features = {
        "w": spmd.data.fixed((), "float32", default=2.0),
        "text": spmd.data.fixed((), "int32", decode=lambda raw: np.int32(sum(raw))),
        "tokens": spmd.data.padded(4, "int32", fill=-1),
    }
    rows = read(path, features)
    assert rows["w"].tolist() == [2, 0.5, 2, 0.5, 2] and rows["text"].tolist() == [0, 0, 1, 3, 6]
    assert rows["tokens"].tolist() == [
        [-1] * 4,
        [0, -1, -1, -1],
        [0, 1, -1, -1],
        [0, 1, 2, -1],
        [0, 1, 2, 3],
    ]
    assert rows["tokens_mask"].sum(axis=1).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(
        DataError,
        match=r'a.tfrecord, record 4 \(byte \d+\): feature "tokens" has 4 numbers, and is padded '
        r"to "
        r"3",
    ):
        read(path, {"tokens": spmd.data.padded(3, "int32")})
    with pytest.raises(OptionError, match='"tokens_mask" is the mask of a padded feature too'):
        read(
            path,
            {"tokens": spmd.data.padded(4, "int32"), "tokens_mask": spmd.data.fixed((), "int32")},
        )


WRONG = {
    "no such feature": (
        {"z": spmd.data.fixed((), "int32")},
        r'there is no feature "z"; it has raw, x, y',
    ),
    "another kind": (
        {"y": spmd.data.fixed((), "float32")},
        'feature "y" holds whole numbers, and float32 is wanted',
    ),
    "another shape": (
        {"x": spmd.data.fixed((5,), "float32")},
        r'feature "x" has 4 numbers, and shape \[5\] needs 5',
    ),
    "too large": (
        {"y": spmd.data.fixed((), "uint8")},
        'feature "y" has -300, which uint8 does not hold',
    ),
    "bytes that do not divide": (
        {"raw": spmd.data.fixed((1,), "int16")},
        'feature "raw" has 3 bytes, which are no int16',
    ),
    "a decoder that fails": (
        {"raw": spmd.data.fixed((), "int32", decode=lambda raw: 1 // 0)},
        'decode of "raw" raises ZeroDivisionError',
    ),
    "a decoder of other shapes": (
        {"raw": spmd.data.fixed((), "int32", decode=lambda raw: [1])},
        r'decode of "raw" gives int64\[1\]; int32\[\] is',
    ),
}


@pytest.mark.parametrize("features, text", WRONG.values(), ids=WRONG.keys())
def test_features_that_do_not_fit_raise(path, features, text):
    with pytest.raises(DataError, match=r"a.tfrecord, record 0 \(byte 0\): " + text):
        read(path, features)


def starts(path):
    return tfrecords.scan(str(path))[0].tolist()


def test_a_flipped_bit_is_named_and_skipped(path, caplog):
    at, raw = starts(path)[17], bytearray(path.read_bytes())
    raw[at + 30] ^= 4
    path.write_bytes(raw)
    with pytest.raises(
        DataError,
        match=rf"a.tfrecord, record 17 \(byte {at}\): its checksum is not that of its data\n    "
        r"fix: ",
    ):
        read(path)
    with caplog.at_level(logging.WARNING, "spmd"):
        assert read(path, on_error="skip")["raw"][:, 0].tolist() == [
            record for record in range(ROWS) if record != 17
        ]
    assert "epoch 1 did without 1 of 40 records" in caplog.text


@pytest.mark.parametrize(
    "damage", ["truncated in a record", "truncated in a head", "a length", "a large length"]
)
def test_damage_that_hides_the_next_record_is_located(path, damage, caplog):
    at, raw = starts(path)[17], bytearray(path.read_bytes())
    if damage.startswith("truncated"):
        raw = raw[: at + (30 if damage == "truncated in a record" else 5)]
    else:
        raw[at + (0 if damage == "a length" else 6)] ^= 16
    path.write_bytes(raw)
    text = (
        "the file is truncated"
        if damage.startswith("truncated")
        else "the checksum of its length is not right"
    )
    with pytest.raises(DataError, match=rf"a.tfrecord, record 17 \(byte {at}\): {text}"):
        read(path)
    with caplog.at_level(logging.WARNING, "spmd"):
        assert len(read(path, on_error="skip")["y"]) == 17
    assert "record 17" in caplog.text and "All from there on is left out" in caplog.text


def test_a_damaged_file_is_warned_of_each_time(path, tmp_path, caplog):
    at, raw = starts(path)[17], path.read_bytes()
    path.write_bytes(raw[: at + 30])
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "spmd"):
            assert len(read(path, on_error="skip", index=tmp_path / "index")["y"]) == 17
        assert "All from there on is left out" in caplog.text
    path.write_bytes(raw)
    assert len(read(path, on_error="skip", index=tmp_path / "index")["y"]) == ROWS
    assert len(list((tmp_path / "index").iterdir())) == 1  # of the whole file


def test_the_number_that_does_not_fit_is_named(tmp_path):
    path = written.tfrecord(tmp_path / "b.tfrecord", [written.example(y=[-1, 3])])
    with pytest.raises(DataError, match='feature "y" has -1, which uint8 does not hold'):
        read(path, {"y": spmd.data.fixed((2,), "uint8")})


def test_records_are_found_by_their_lengths(tmp_path):
    sizes = [5] * 30 + [6] + [0] * 3 + [7] * 40
    path = written.tfrecord(tmp_path / "a.tfrecord", [b"z" * size for size in sizes])
    expected = np.cumsum([0, *(size + 16 for size in sizes)])
    begins, ends = tfrecords.scan(str(path))
    assert begins.tolist() == expected[:-1].tolist() and ends.tolist() == expected[1:].tolist()


@pytest.mark.parametrize("module", ["google_crc32c", "google.protobuf.text_format"])
def test_a_missing_extra_is_named_before_a_file_is_opened(path, module, monkeypatch):
    example_message.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{module} is not installed.*\n.*\.\[tfrecord\]"):
        read(path)


def test_files_without_records(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"")
    with pytest.raises(DataError, match="no TFRecord file has a record"):
        read(tmp_path / "a.tfrecord")
    (tmp_path / "b.tfrecord").write_bytes(written.framed(b"\xff\xff"))
    with pytest.raises(
        DataError, match=r"b.tfrecord, record 0 \(byte 0\): its bytes are no tf.train.Example"
    ):
        read(tmp_path / "?.tfrecord")


def test_what_is_declared_is_checked_before_a_file_is_opened():
    fixed, padded = spmd.data.fixed, spmd.data.padded
    for make, text in [
        (lambda: fixed("3", "int32"), r"fixed\('3', ...\): a shape is a tuple"),
        (lambda: fixed((-1,), "int32"), "a shape is a tuple of whole numbers"),
        (lambda: fixed((2.5,), "int32"), "a shape is a tuple of whole numbers"),
        (lambda: fixed((), None), "there is no dtype None"),
        (lambda: fixed((), "int32", default="x"), r"default='x'\): int32\[\] does not hold it"),
        (lambda: fixed((), "int32", default=1.5), "does not hold it"),
        (lambda: fixed((3,), "int32", default=[1, 2]), r"int32\[3\] does not hold it"),
        (lambda: fixed((), "int8", default=300), "does not hold it"),
        (lambda: fixed((), "int32", decode=3), "is an int.\n    fix: a function"),
        (lambda: padded(3, "int32", fill="x"), r"padded\(fill='x'\): int32 does not hold it"),
        (lambda: padded(3, "int32", fill=None), "does not hold it"),
    ]:
        with pytest.raises(OptionError, match=text):
            make()
    assert fixed((3,), "int32", default=[1, 2, 3]).default == [1, 2, 3] and padded(
        np.int64(3), "float32", fill=np.nan
    ).shape == (3,)


def test_numbers_that_a_narrow_dtype_does_not_hold_raise(tmp_path):
    path = written.tfrecord(
        tmp_path / "a.tfrecord", [written.example(x=np.array([1, 1e6], np.float32), y=[2])]
    )
    for features, text in [
        (
            {"x": spmd.data.fixed((2,), "float16")},
            'feature "x" has 1000000.0, which float16 does not hold',
        ),
        ({"y": spmd.data.fixed((), "bool")}, 'feature "y" has 2, which bool does not hold'),
    ]:
        with pytest.raises(DataError, match=text):
            read(path, features)


def test_a_compressed_file_raises(path):
    path.write_bytes(gzip.compress(path.read_bytes()))
    for on_error in ("stop", "skip"):
        with pytest.raises(
            DataError, match=r"a.tfrecord is compressed \(gzip\).*\n    fix: unpack it"
        ):
            read(path, on_error=on_error)


# buckets ------------------------------------------------------------------------------------------


@pytest.fixture
def sequences(tmp_path):
    records = [written.example(tokens=list(range(at % 9)), at=[at]) for at in range(ROWS)]
    features = {"tokens": spmd.data.padded(8, "int32"), "at": spmd.data.fixed((), "int32")}
    return spmd.data.tfrecord(
        written.tfrecord(tmp_path / "a.tfrecord", records),
        features=features,
        batch_size=4,
        seed=1,
        workers=2,
    )


def test_buckets_are_as_long_as_they_have_to_be(sequences):
    buckets = spmd.data.buckets(sequences, "tokens", [2, 5, 8])
    batches = list(buckets.epoch(1))
    assert len(batches) == len(buckets) and sorted(
        np.concatenate([batch["at"] for batch in batches])
    ) == list(range(ROWS))
    for batch in batches:
        length = batch["tokens"].shape[1]
        assert batch["tokens_mask"].shape == batch["tokens"].shape
        assert {2: 0, 5: 3, 8: 6}[length] <= (batch["at"] % 9).min() and (
            batch["at"] % 9
        ).max() <= length
    lengths = [batch["tokens"].shape[1] for batch in batches]
    # short and long ones are mixed
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))
    middle = buckets.epoch(1)
    _ = [next(middle) for _ in range(3)]
    rest = iter(spmd.data.buckets(sequences, "tokens", [2, 5, 8]))
    rest.set_state(middle.get_state())
    assert [batch["at"].tolist() for batch in rest] == [
        batch["at"].tolist() for batch in batches[3:]
    ]


def test_buckets_that_do_not_fit_raise(sequences):
    with pytest.raises(
        DataError, match=r'record 8 .*"tokens" has 8 numbers, but the longest bucket 5'
    ):
        spmd.data.buckets(sequences, "tokens", [2, 5])
    for name, lengths, text in [
        ("at", [2], "not a padded feature; padded features: tokens"),
        ("tokens", [5, 2], "increasing whole numbers"),
        ("tokens", [9], "padded to 8"),
        ("tokens", 9, "lengths 9"),
    ]:
        with pytest.raises(OptionError, match=text):
            spmd.data.buckets(sequences, name, lengths)
    with pytest.raises(OptionError, match="batches of 3 lengths, and a step is compiled for one"):
        fit(spmd.data.buckets(sequences, "tokens", [2, 5, 8]), epochs=1)


def test_a_bad_record_moves_no_other_to_another_bucket(tmp_path, caplog):
    """Its length is not that of the record that replaces it, here the longest."""
    records = [
        written.example(tokens=list(range(8 if at == 0 else 1)), at=[at]) for at in range(12)
    ]
    records[5] = b"\xff"
    features = {"tokens": spmd.data.padded(8, "int32"), "at": spmd.data.fixed((), "int32")}
    options = {"features": features, "batch_size": 4, "shuffle": False}
    path = written.tfrecord(tmp_path / "a.tfrecord", records)
    with pytest.raises(DataError, match="record 5"):
        spmd.data.buckets(spmd.data.tfrecord(path, **options), "tokens", [2, 8])
    buckets = spmd.data.buckets(
        spmd.data.tfrecord(path, on_error="skip", **options), "tokens", [2, 8]
    )
    assert buckets.lengths.tolist() == [8, *[1] * 4, 0, *[1] * 6] and len(buckets) == 4
    expected = [[1, 2, 3, 4], [6, 7, 8], [9, 10, 11], [0]]
    for start in range(4):
        batches = iter(buckets)
        batches.set_state({**batches.get_state(), "batch": start, "skipped": int(start > 1)})
        caplog.clear()
        with caplog.at_level(logging.WARNING, "spmd"):
            assert [batch["at"].tolist() for batch in batches] == expected[start:]
        assert "without 1 of 12" in caplog.text
    buckets._bucket[0] = 0
    with pytest.raises(DataError, match=r'record 0 .*"tokens" is longer than when it was measured'):
        list(buckets)


# ArrayRecord --------------------------------------------------------------------------------------


@pytest.fixture
def array_records(tmp_path):
    from array_record.python import array_record_module

    for part in range(2):
        writer = array_record_module.ArrayRecordWriter(
            str(tmp_path / f"{part}.array_record"), "group_size:1"
        )
        for at in range(part * 20, part * 20 + 20):
            writer.write(example(at))
        writer.close()
    return tmp_path / "*.array_record"


def test_array_records_by_features_and_by_a_function(array_records, path):
    options = {"batch_size": 16, "seed": 5, "workers": 2}
    by_features = list(spmd.data.array_record(array_records, features=FEATURES, **options))
    as_tfrecord = list(spmd.data.tfrecord(path, features=FEATURES, **options))
    by_function = list(
        spmd.data.array_record(
            array_records,
            decode=lambda raw: {"size": np.int32(len(raw)), "first": np.arange(3)},
            **options,
        )
    )
    for batch, expected in zip(by_features, as_tfrecord, strict=True):
        assert all(np.array_equal(batch[name], expected[name]) for name in FEATURES)
    assert [len(batch["size"]) for batch in by_function] == [16, 16, 8]
    assert set(np.concatenate([batch["size"] for batch in by_function]).tolist()) == {
        len(example(at)) for at in range(ROWS)
    }


def test_array_records_that_differ_are_named_or_padded(array_records):
    def grow(raw):
        return {"tokens": np.arange(len(raw) % 4, dtype=np.int32)}

    options = {"decode": grow, "batch_size": 40, "shuffle": False}
    with pytest.raises(
        DataError,
        match=r'0.array_record, record \d+: decode returns int32\[\d\] for "tokens", but '
        r"int32\[\d\] "
        r"for the first",
    ):
        next(iter(spmd.data.array_record(array_records, **options)))
    batch = next(
        iter(
            spmd.data.array_record(
                array_records, pad={"tokens": spmd.data.padded(3, "int32", fill=9)}, **options
            )
        )
    )
    assert batch["tokens"].shape == (40, 3) and batch["tokens_mask"].sum(axis=1).tolist() == [
        len(example(at)) % 4 for at in range(ROWS)
    ]
    calls = iter(range(100))

    def fail_at_record_23(raw):
        if next(calls) == 24:  # the first call is for the shapes
            raise ValueError("no")
        return grow(b"")

    with pytest.raises(DataError, match=r"1.array_record, record 3: decode raises ValueError: no"):
        next(
            iter(spmd.data.array_record(array_records, **{**options, "decode": fail_at_record_23}))
        )


def test_files_that_are_not_array_records_raise(array_records, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match=r"a.txt is not an ArrayRecord file"):
        spmd.data.array_record(tmp_path / "a.txt", decode=len, batch_size=1)
    with pytest.raises(OptionError, match="both given"):
        spmd.data.array_record(array_records, decode=len, features=FEATURES, batch_size=1)
    for read_files in (spmd.data.array_record, spmd.data.tfrecord):
        for features in ({}, {"x": 3}, "x"):
            with pytest.raises(OptionError, match=r"features=.*\n    fix: such as"):
                read_files(array_records, features=features, batch_size=1)


def test_a_first_array_record_that_cannot_be_read_is_skipped_like_any_other(tmp_path, caplog):
    from array_record.python import array_record_module

    path = tmp_path / "a.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for at in range(6):
        writer.write(b"number%d" % at)
    writer.close()
    raw = path.read_bytes()
    options = {"batch_size": 4, "shuffle": False}

    def number(raw):
        return {"at": np.int32(raw[6:])}

    for damaged, decode in [
        (raw.replace(b"number0", b"numbex0"), number),
        (raw, lambda raw: number(raw.replace(b"0", b"?"))),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(
            DataError,
            match=r"a.array_record, record 0: (it cannot be read|decode raises ValueError).*\n    "
            r"fix: .*skip",
        ):
            spmd.data.array_record(path, decode=decode, **options)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "spmd"):
            data = spmd.data.array_record(path, decode=decode, on_error="skip", **options)
            assert [batch["at"].tolist() for batch in data] == [[1, 2, 3], [4, 5]]
        assert "without 1 of 6" in caplog.text


def test_output_of_decode_is_checked(array_records):
    options = {"batch_size": 8, "shuffle": False}
    for decode, text in [
        (len, "decode returns an int, but must return a dict of arrays"),
        (
            lambda raw: {"x": "word"},
            'decode returns <U4 for "x", which cannot be placed on a device',
        ),
        (lambda raw: {}, "decode returns nothing"),
    ]:
        with pytest.raises(DataError, match=text):
            spmd.data.array_record(array_records, decode=decode, **options)
        with pytest.raises(DataError, match=r"\(None of the first 40 records can be read.\)"):
            spmd.data.array_record(array_records, decode=decode, on_error="skip", **options)
    for value in (1.5, 2**40):
        data = spmd.data.array_record(
            array_records,
            decode=lambda raw: {"x": [value]},
            pad={"x": spmd.data.padded(3, "int32")},
            **options,
        )
        with pytest.raises(DataError, match=r"with values that int32 cannot hold"):
            next(iter(data))
