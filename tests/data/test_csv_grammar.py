"""Where CSV records and fields begin and end, compared with a reader of single characters; nothing
else decides what is valid.
"""

import random

import numpy as np
import pytest
import written

import spmd
from spmd.data import csv_checks, csv_grammar
from spmd.data.sources import RecordSource
from spmd.errors import DataError
from tests.counted import counted_names

ALPHABETS = ['a1,"\n', 'a,"\n\r', 'a," \t\n\r', '"\n,']


def by_machine(text):
    """The rows of a text, parsed character by character; None where a quote is never closed."""
    rows, row, field, state, line = [], [], "", "start", ""
    for letter in text + "\n":
        if state == "quoted":
            state, field = ("closing", field) if letter == '"' else ("quoted", field + letter)
        elif letter == '"' and state != "plain":
            state, field = "quoted", field + '"' * (state == "closing")
        elif letter == ",":
            row, field, state = [*row, field], "", "start"
        elif letter in "\r\n":
            if line.strip(" \t"):
                rows.append([*row, field])
            row, field, state, line = [], "", "start", ""
            continue
        else:
            state, field = "plain", field + letter
        line += letter
    return rows if state != "quoted" else None


def by_grammar(path, raw, chunk):
    try:
        records = [
            pair
            for edges in csv_grammar.records(str(path), ",", chunk)
            for pair in zip(*edges, strict=True)
        ]
    except DataError as error:
        assert "a quote that is never closed" in str(error)
        return None
    return [
        [csv_grammar.unquoted(field).decode() for field in csv_grammar.split(raw[start:end], ",")]
        for start, end in records
    ]


def test_records_and_fields_are_those_of_a_reader_of_single_letters(tmp_path):
    path, rng, closed = tmp_path / "a.csv", random.Random(0), 0
    for _ in range(300):
        text = "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 24)))
        path.write_bytes(text.encode())
        expected = by_machine(text)
        assert by_grammar(path, text.encode(), rng.choice([1, 3, 100])) == expected, repr(text)
        closed += expected is not None
    assert 100 < closed < 300


def test_fields_of_many_records_are_those_of_each_alone(tmp_path):
    rng = random.Random(1)
    for _ in range(100):
        lines = ["".join(rng.choices('a1,"', k=rng.randint(1, 9))) for _ in range(8)]
        lines = [
            line.encode() + rng.choice([b"\n", b"\r\n", b""])
            for line in lines
            if by_machine(line) is not None
        ]
        ends = np.cumsum([len(line) for line in lines])
        cells = csv_grammar.Cells(
            b"".join(lines), ends - [len(line) for line in lines], ends, ",", 2
        )
        alone = [
            [csv_grammar.unquoted(field) for field in csv_grammar.split(line, ",")]
            for line in lines
        ]
        assert cells.odd == {at: len(row) for at, row in enumerate(alone) if len(row) != 2}
        assert [
            [cells.field(at, column) for column in (0, 1)] for at in range(len(cells.rows))
        ] == [row for row in alone if len(row) == 2]


ODD_ROWS = {
    "a quote in the middle of a field": b'5" pipe',
    "text after a quote that closes": b'"a"b',
    "not UTF-8": b"\xff\xfe",
    "more letters than Python's csv takes": b"x" * 200_000,
    "the same in quotes": b'"' + b"x" * 200_000 + b'"',
    "a line break in quotes": b'"two\nlines"',
}


@pytest.mark.parametrize("quoted", [False, True], ids=["no quotes", "quotes elsewhere"])
@pytest.mark.parametrize("odd", ODD_ROWS.values(), ids=ODD_ROWS.keys())
def test_a_column_that_is_not_read_may_hold_anything(tmp_path, odd, quoted):
    """For any batch size, with and without reader threads, and in each of two processes."""
    rows = [b"%d,a" % at for at in range(20)]
    rows[7] = b"7," + odd
    rows[15] = b'15,"a"' if quoted else rows[15]
    path = tmp_path / "a.csv"
    path.write_bytes(b"\n".join([b"x,y", *rows]))
    for batch_size in (1, 6, 20):
        for workers in (0, 2):
            data = spmd.data.csv(
                path, columns=["x"], batch_size=batch_size, workers=workers, shuffle=False
            )
            assert [x for batch in data for x in batch["x"].tolist()] == list(range(20))
    for rank in range(2):
        part = RecordSource(spmd.data.csv(path, columns=["x"], batch_size=10, shuffle=False))
        part.local_rows = np.arange(5) + 5 * rank
        read = [x for batch in part.epoch(0) for x in batch.leaves["x"][part.local_rows].tolist()]
        assert read == [at for at in range(20) if at // 5 % 2 == rank]


@pytest.mark.parametrize("quoted", [False, True], ids=["no quotes", "quotes elsewhere"])
def test_skipped_records_do_not_depend_on_the_batch_size(tmp_path, quoted):
    odd = {
        3: b"\xff,1",
        5: b"5,\xff",
        8: b"8",
        9: b"9,1,2",
        11: b'1"1,1',
        12: b'12"3,1',
        13: b"13," + b"1" * 140_000,
    }
    rows = [
        odd.get(at, b'"%d","%d"' % (at, at) if quoted and at % 4 == 0 else b"%d,%d" % (at, at))
        for at in range(20)
    ]
    path = tmp_path / "a.csv"
    path.write_bytes(b"\n".join([b"x,y", *rows]))
    options = {"types": {"x": "int32", "y": "float32"}, "shuffle": False, "on_error": "skip"}
    for batch_size in (1, 2, 7, 20):
        for workers in (0, 3):
            data = spmd.data.csv(path, batch_size=batch_size, workers=workers, **options)
            assert [x for batch in data for x in batch["x"].tolist()] == [
                at for at in range(20) if at not in odd
            ]


@pytest.mark.parametrize(
    "content",
    [b"\n\r\n  \nx,y\n\n1,2\n \t\n3,4\n", b"x,y\r1,2\r3,4\r", b'\xef\xbb\xbf"x",y\n"1",2\n3,"4"'],
)
def test_files_that_other_readers_take(tmp_path, content):
    """Blank lines, lone carriage returns, quotes after a byte order mark."""
    (tmp_path / "a.csv").write_bytes(content)
    batch = next(iter(spmd.data.csv(tmp_path / "a.csv", batch_size=2, shuffle=False)))
    assert {name: leaf.tolist() for name, leaf in batch.items()} == {"x": [1, 3], "y": [2, 4]}
    assert batch["x"].dtype == np.int32


def test_the_line_of_a_record_is_counted_by_any_line_break(tmp_path):
    for lines, number in [
        (b"x\n1\n2\na\n", 4),
        (b"x\r1\r2\ra\r", 4),
        (b"x\r\n1\r\n2\r\na", 4),
        (b'x\r\n1\n"\n2"\n\ra', 6),
    ]:
        (tmp_path / "a.csv").write_bytes(lines)
        with pytest.raises(DataError, match=rf"a.csv, line {number}: "):
            list(spmd.data.csv(tmp_path / "a.csv", types={"x": "int32"}, batch_size=9))


def test_work_on_columns_grows_with_their_number(tmp_path, monkeypatch):
    """Counts comparisons of names."""
    name_class = counted_names()
    wide = 2000
    path = written.csv(
        tmp_path / "a.csv", [",".join(["1"] * wide)], ",".join(f"c{at}" for at in range(wide))
    )
    read = csv_checks._header
    monkeypatch.setattr(
        csv_checks, "_header", lambda *arguments: [name_class(name) for name in read(*arguments)]
    )
    names = [name_class(f"c{at}") for at in reversed(range(wide))]
    data = spmd.data.csv(
        path,
        columns={"x": names, "y": names[:5]},
        types={name: "int32" for name in names[:9]},
        batch_size=1,
    )
    assert next(iter(data))["x"].tolist() == [[1] * wide]
    assert name_class.compared < 50 * wide
