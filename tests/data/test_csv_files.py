"""CSV files: what is inferred, what is a field, and what is wrong on which line."""

import codecs

import numpy as np
import pytest
import written

import spmd
from spmd.data import csv_files
from spmd.data.number_parsing import decimals
from spmd.errors import DataError, OptionError


def read(path, **options):
    """All rows, in their order."""
    data = spmd.data.csv(path, **{"batch_size": 100, "shuffle": False, **options})
    return {name: np.concatenate([batch[name] for batch in list(data)]) for name in data.fields}


ODD = [
    "0",
    "-0",
    "+5",
    "007",
    "1.5",
    ".5",
    "5.",
    "-1.25",
    "123456789.123456789",
    "9007199254740993",
    "1e5",
    "-2.5E-3",
    "1" * 25,
    "nan",
    "inf",
    " 7 ",
    "0.1",
    "0.30000000000000004",
    "3.4028236e38",
    "1.7976931348623157e308",
    "4.9e-324",
]


def test_decimals_parse_as_python_floats():
    texts = [
        *ODD,
        *(
            f"{value:.{digits}f}"
            for value in np.random.default_rng(0).normal(size=200) * 1e3
            for digits in (0, 3, 9)
        ),
    ]
    raw, ends = ",".join(texts).encode(), np.cumsum([len(text) + 1 for text in texts]) - 1
    values, integral, sound = decimals(
        np.frombuffer(raw, np.uint8), np.concatenate([[0], ends[:-1] + 1]), ends
    )
    for text, value, is_integral, is_sound in zip(
        texts, values.tolist(), integral.tolist(), sound.tolist(), strict=True
    ):
        if is_sound:
            assert value.hex() == float(text).hex(), text
            assert is_integral == text.strip("+-").isdigit()
    assert sound[len(ODD) :].all() and not sound[ODD.index("1e5")] and not sound[ODD.index("nan")]
    for text in ("-", ".", "+.", "1-5", "--5", "1.2.3", "abc", "", "5-", "1 2"):
        assert not decimals(
            np.frombuffer(text.encode() + b"\n", np.uint8), np.array([0]), np.array([len(text)])
        )[2][0], text


def test_columns_of_unusual_numbers_are_read(tmp_path):
    path = written.csv(tmp_path / "a.csv", ODD, "x")
    assert np.array_equal(
        read(path, types={"x": "float64"})["x"],
        np.array([float(text) for text in ODD]),
        equal_nan=True,
    )


def test_types_are_inferred_and_shown(tmp_path):
    path = written.csv(
        tmp_path / "a.csv", ["1,2.5,cat", "2,3,dog", "3000000000,,cat"], "count,real,kind"
    )
    data = spmd.data.csv(
        path, batch_size=2, categories={"kind": ["cat", "dog"]}, defaults={"real": -1.0}
    )
    assert repr(data).splitlines()[1:] == [
        "    count  int64[]",
        "    real   float32[]",
        "    kind   int32[]",
    ]
    rows = read(path, categories={"kind": ["cat", "dog"]}, defaults={"real": -1.0})
    assert (
        rows["count"].tolist() == [1, 2, 3000000000]
        and rows["real"].tolist() == [2.5, 3, -1]
        and rows["kind"].tolist() == [0, 1, 0]
    )


def test_quotes_newlines_and_other_separators(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbfx;word\r\n1;"a;b"\r\n\r\n2;"two\nlines"\r\n3;"say ""so"""\r\n4;plain'
    )
    words = ["a;b", "two\nlines", 'say "so"', "plain"]
    rows = read(path, separator=";", categories={"word": words})
    assert rows["x"].tolist() == [1, 2, 3, 4] and rows["word"].tolist() == [0, 1, 2, 3]
    assert read(path, separator=";", columns=["x"], batch_size=1)["x"].tolist() == [1, 2, 3, 4]


def test_a_line_with_too_few_fields_is_named(tmp_path):
    path = written.csv(tmp_path / "a.csv", ['1,2,"line\nbreak"', "3,4,b", "5,6", "7,8,9,10"])
    options = {"columns": ["age"], "batch_size": 2, "shuffle": False}
    with pytest.raises(DataError) as raised:
        list(spmd.data.csv(path, **options))
    assert str(raised.value).startswith(
        f"{path}, line 5: 2 fields, and there are 3 columns (1 more of this batch cannot be read "
        "either.)"
    )
    # no quotes, and as many separators as there should be
    path = written.csv(tmp_path / "b.csv", ["1,2,3", "4,5,6", "5,6", "7,8,9"])
    assert [len(batch["age"]) for batch in spmd.data.csv(path, on_error="skip", **options)] == [
        2,
        1,
    ]
    path = written.csv(tmp_path / "c.csv", ["1,2,3", "4,5", "5,6,7,8", "7,8,9"])
    assert read(path, on_error="skip")["age"].tolist() == [1, 7]


BAD = {
    "no number": ("1,x,3", r"line 3: column \"height\" has 'x', which is not a number"),
    "no value": (
        "1,,3",
        r"line 3: column \"height\" has no value; defaults=\{\"height\": ...\} would give it one",
    ),
    "a fraction": (
        "1.5,2,3",
        r"line 3: column \"age\" has '1.5', which is not a whole number; types=\{\"age\": "
        r"\"float32\"\}",
    ),
    "too large": (
        "3000000000,2,3",
        r"line 3: column \"age\" has 3000000000, which int32 does not hold",
    ),
    "not UTF-8": ("\udcff,2,3", r"line 3: 'utf-8' codec can't decode"),
}


@pytest.mark.parametrize("quoted", [False, True], ids=["fast", "with quotes"])
@pytest.mark.parametrize("line, text", BAD.values(), ids=BAD.keys())
def test_bad_field_is_named_with_its_line(tmp_path, line, text, quoted):
    path = tmp_path / "a.csv"
    lines = ["age,height,kind", '1,2.5,"3"' if quoted else "1,2.5,3", line, "4,5.5,6"]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    options = {"batch_size": 3, "types": {"age": "int32", "height": "float32", "kind": "int32"}}
    with pytest.raises(DataError, match=text):
        list(spmd.data.csv(path, **options))
    assert sorted(next(iter(spmd.data.csv(path, on_error="skip", **options)))["age"].tolist()) == [
        1,
        4,
    ]


def test_unreadable_files_and_bad_options_raise(tmp_path):
    written.csv(tmp_path / "a.csv", ["1,2"], "x,y")
    cases = [
        (
            "none-*.csv",
            {},
            r"no file matches .*none-\*.csv.*\n    fix: another pattern; the folder .* holds a.csv",
        ),
        ("a.csv", {"columns": ["z"]}, r'columns: there is no column "z"'),
        ("a.csv", {"defaults": {"X": 1}}, 'defaults: there is no column "X"'),
        ("a.csv", {"defaults": {"x": 1.5}}, r'"x" is 1.5, and the column is int32'),
        ("a.csv", {"separator": ",,"}, "one letter"),
        ("a.csv", {"types": {"x": "flt"}}, "float32"),
    ]
    for name, content in {
        "empty.csv": "",
        "header.csv": "x,y\n",
        "other.csv": "x,z\n1,2\n",
        "twice.csv": "x,x\n1,2\n",
        "open.csv": 'x,y\n1,2\n3,"4\n5,6\n',
        "text.csv": "x,y\n1,cat\n2,dog\n",
    }.items():
        (tmp_path / name).write_text(content)
    cases += [
        ("empty.csv", {}, "all files are empty"),
        ("header.csv", {}, "no CSV file has a record below its header"),
        (
            "[ao]*.csv",
            {},
            r"other.csv has columns x, z; .*a.csv has x, y|open.csv, line 3: a quote that is never "
            r"closed",
        ),
        ("twice.csv", {}, "names x twice"),
        ("open.csv", {}, "open.csv, line 3: a quote that is never closed"),
        (
            "text.csv",
            {},
            r"column \"y\" holds text, such as 'cat', and no numbers .*\n    fix: "
            r"categories=\{\"y\": \['cat', 'dog'\]\}",
        ),
    ]
    for name, options, text in cases:
        with pytest.raises((DataError, OptionError), match=text):
            spmd.data.csv(tmp_path / name, batch_size=1, **options)
    (tmp_path / "b.csv").write_text("")  # an empty file among others has no records and is no error
    assert spmd.data.csv([tmp_path / "b.csv", tmp_path / "a.csv"], batch_size=1).examples == 1


def test_files_without_a_header(tmp_path):
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    assert read(tmp_path / "a.csv", names=["a", "b"])["b"].tolist() == [2, 4]


def test_index_is_written_only_to_the_index_folder(tmp_path, monkeypatch):
    path = written.csv(tmp_path / "a.csv", [f"{at},0" for at in range(9)], "x,y")
    first = read(path, index=tmp_path / "kept")
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["a.csv"] and len(
        list((tmp_path / "kept").iterdir())
    ) == 1
    with monkeypatch.context() as patched:
        patched.setattr(csv_files, "_scan", None)  # the index is used, not another scan
        assert read(path, index=tmp_path / "kept")["x"].tolist() == first["x"].tolist()
    written.csv(path, ["1,2"], "x,y")  # a changed file is indexed again
    assert read(path, index=tmp_path / "kept")["x"].tolist() == [1]


def test_a_file_that_has_shrunk_raises(tmp_path):
    path = written.csv(tmp_path / "a.csv", [f"{at},0" for at in range(9)], "x,y")
    data = spmd.data.csv(path, batch_size=9)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"a.csv has 36 bytes, and had 40 when it was indexed"):
        next(iter(data))


def test_columns_side_by_side_have_the_dtype_that_is_declared(tmp_path):
    path = written.csv(tmp_path / "a.csv", ["1,2.5,3000000000", "2,3.5,3000000001"])
    data = spmd.data.csv(
        path,
        columns={"both": ["age", "height"], "wide": ["age", "kind"], "alone": ["age"]},
        batch_size=2,
    )
    batch = next(iter(data))
    assert {name: batch[name].dtype for name in batch} == {
        name: field.dtype for name, field in data.fields.items()
    }
    assert batch["both"].dtype == np.float32


def test_table_with_only_text_columns(tmp_path):
    path = written.csv(tmp_path / "a.csv", ["x,p", "y,q", "x,q"], "a,b")
    rows = read(path, categories={"a": ["x", "y"], "b": ["p", "q"]})
    assert rows["a"].tolist() == [0, 1, 0] and rows["b"].tolist() == [0, 1, 1]


def test_byte_order_mark_is_not_part_of_the_first_number(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf1,2\n3,4\n")
    assert read(tmp_path / "a.csv", names=["a", "b"])["a"].tolist() == [1, 3]


def test_numbers_that_would_become_infinite_raise(tmp_path):
    path = written.csv(tmp_path / "a.csv", ["1.5", "1" + "0" * 17, "1e300", "inf"], "x")
    for dtype, line, text in [("float32", 4,
        "1e300, which float32 does not hold; types={\"x\": \"float64\"} would"),
                              ("float16", 3,
                                  "10+, which float16 does not hold; types={\"x\": \"float32\"} "
                                  "would")]:  # fmt: skip
        with pytest.raises(DataError, match=f'line {line}: column "x" has {text}'):
            read(path, types={"x": dtype})
    assert read(path, types={"x": "float64"})["x"].tolist() == [1.5, 1e17, 1e300, np.inf]
    for text in ("1e999", "1" * 400):
        with pytest.raises(DataError, match="which no floating number holds"):
            read(written.csv(tmp_path / "b.csv", ["1.5", text], "x"), types={"x": "float64"})


FIRST_BYTES = {
    "numbers in place of names": (
        b"1,2\n3,4\n",
        r"its header has numbers only: 1, 2\.\n    fix: names=",
    ),
    "gzip": (b"\x1f\x8b\x08\0\0\0", r"a\.csv is compressed \(gzip\).*\n    fix: unpack it"),
    "another code": ("a,b\n1,2\n".encode("utf-16"), "its header is not UTF-8"),
    "a mark alone": (codecs.BOM_UTF8, "no CSV file has a record"),
    "another separator": (b"a;b\n1;2\n", r"column \"a;b\" holds text.*\n    fix: separator=';'"),
}


@pytest.mark.parametrize("content, text", FIRST_BYTES.values(), ids=FIRST_BYTES.keys())
def test_a_file_of_another_kind_raises_at_once(tmp_path, content, text):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=text):
        spmd.data.csv(
            tmp_path / "a.csv", batch_size=1, names=["a"] if content == codecs.BOM_UTF8 else None
        )


def test_a_number_of_hundreds_of_digits_is_reported_with_its_line(tmp_path):
    path = written.csv(tmp_path / "a.csv", ["1", "2", "9" * 400], "x")
    with pytest.raises(
        DataError,
        match=r'line 4: column "x" has 9{80}... \(400 letters\), which int32 does not hold',
    ):
        read(path, types={"x": "int32"})
    assert read(path, types={"x": "int32"}, on_error="skip")["x"].tolist() == [1, 2]


def test_numbers_may_be_column_names(tmp_path):
    # as libraries write tables without column names
    path = written.csv(tmp_path / "a.csv", ["5,6,7"], "0,1,2")
    assert sorted(read(path)) == ["0", "1", "2"]
    assert read(written.csv(tmp_path / "b.csv", ["5,6"], "2019,2020"), columns=["2019", "2020"])[
        "2020"
    ].tolist() == [6]


def test_invalid_options_raise(tmp_path):
    path = written.csv(tmp_path / "a.csv", ["1,2"], "x,y")
    for options, text in [
        ({"columns": "x"}, "columns='x' is a str"),
        ({"columns": ["x", "x"]}, "columns: x twice"),
        ({"columns": {"a": 0}}, "columns=0 is an int"),
        ({"names": ["a", "a"]}, "names: a twice"),
        ({"defaults": 0}, "defaults=0 is an int.\n    fix: a dict"),
        ({"defaults": {"x": [1]}}, r'"x" is \[1\], and the column is int32'),
        ({"defaults": {"x": float("nan")}}, '"x" is nan, and the column is int32'),
        ({"defaults": {"x": 2**40}}, '"x" is 1099511627776, which int32 does not hold'),
        ({"defaults": {"x": 10**400}, "types": {"x": "float64"}}, "which float64 does not hold"),
        ({"categories": {"x": "12"}}, "\"x\" is '12'.\n    fix: a list of words"),
        ({"categories": {"x": [1, 2]}}, r'"x" is \[1, 2\]'),
        ({"categories": {"x": iter("12")}}, '"x" is <str'),
        ({"categories": {"x": ["1"]}, "types": {"x": "int8"}}, "types and categories both name x"),
        ({"index": path}, "a.csv cannot be created: .*a.csv is a file"),
    ]:
        with pytest.raises(OptionError, match=text):
            spmd.data.csv(path, **{"batch_size": 1, **options})
    for files, kind, text in [
        ([path, tmp_path / "*.csv"], DataError, "a.csv is given twice"),
        (7, OptionError, "files=7 is an int"),
    ]:
        with pytest.raises(kind, match=text):
            spmd.data.csv(files, batch_size=1)
