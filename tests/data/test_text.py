"""`spmd.data.text`: documents, their tokens and answers, rows, positions, and all that cannot be
used.
"""

import collections
import gc
import hashlib
import json
import logging
import pickle
import re
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
import texts

import spmd
from spmd.data import template_client, text_records, tokenize
from spmd.data.chat import ChatTemplate, formats
from spmd.data.packing import OPEN, pack_documents, unpack
from spmd.data.sources import RecordSource
from spmd.errors import DataError, MissingExtraError, OptionError, SpmdError
from spmd.launch import cli

DOCUMENTS = texts.sentences(60)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two files of documents, and a tokenizer beside them."""
    place = tmp_path_factory.mktemp("text")
    texts.folder(place / "model")
    texts.json_lines(place / "part-0.jsonl", [{"text": document} for document in DOCUMENTS[:40]])
    texts.json_lines(place / "part-1.jsonl", [{"text": document} for document in DOCUMENTS[40:]])
    return place


def read(place, files="part-*.jsonl", **options):
    return spmd.data.text(
        place / files,
        **{"tokenizer": place / "model", "length": 48, "batch_size": 4, "seed": 3, **options},
    )


def ids(place, document):
    """The tokens of a document with its end."""
    tokenizer = texts.tokenizer(place / "model")
    return [*tokenizer.encode(document).ids, tokenizer.token_to_id("<eos>")]


def counted(place, batch, row=0):
    """The text of targets that count in a row."""
    tokenizer = texts.tokenizer(place / "model")
    return tokenizer.decode(
        batch["targets"][row][batch["mask"][row] == 1].tolist(), skip_special_tokens=False
    )


# packing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [True, False])
def test_unpacking_gives_the_documents(place, pack):
    data = read(place, pack=pack, length=256)
    pieces = [tuple(piece.tolist()) for batch in data for piece in unpack(batch)]
    assert collections.Counter(pieces) == collections.Counter(
        tuple(ids(place, document)) for document in DOCUMENTS
    )
    assert len(data.rows) == (8 if pack else 60), "packed rows are fewer"
    total = sum(len(piece) for piece in pieces)
    assert data.padding == pytest.approx(
        1 - total / (len(data.rows) * 256), rel=1e-9
    ) and f"padding {data.padding:.1%}" in repr(data)


def test_rows_have_the_next_token_and_positions_of_their_documents(place):
    for batch in read(place, length=256):
        for row in range(4):
            segments, last = batch["segment_ids"][row], batch["segment_ids"][row].max()
            assert (
                set(segments) <= set(range(last + 1))
                and not batch["mask"][row][segments == 0].any()
            )
            for segment in range(1, last + 1):
                here = np.flatnonzero(segments == segment)
                assert batch["positions"][row][here].tolist() == list(range(len(here)))
                tokens, targets, mask = (
                    batch[name][row][here].tolist() for name in ("tokens", "targets", "mask")
                )
                assert targets == [*tokens[1:], 0] and mask == [1.0] * (len(here) - 1) + [0.0]


@pytest.mark.parametrize("long", ["split", "truncate", "error"])
def test_documents_longer_than_a_row(place, long, caplog):
    longer = [document for document in DOCUMENTS if len(ids(place, document)) > 24]
    beyond = sum(len(ids(place, document)) - 24 for document in longer)
    assert len(longer) > 10
    with caplog.at_level(logging.WARNING, "spmd"):
        if long == "error":
            with pytest.raises(DataError) as caught:
                read(place, length=24, long=long)
            assert len(caught.value.problems) == len(longer)
            return
        data = read(place, length=24, long=long, shuffle=False)
    predicted = sum(batch["mask"].sum() for batch in data)
    total = sum(len(ids(place, document)) for document in DOCUMENTS)
    # once each, but for first ones
    assert predicted == total - len(DOCUMENTS) - (beyond if long == "truncate" else 0)
    assert data.truncated_tokens == (beyond if long == "truncate" else 0)
    assert (
        f"{beyond} of {total} tokens, of {len(longer)} documents, are beyond 24 tokens and are "
        "left out" in caplog.text
    ) == (long == "truncate")
    assert (
        f"{len(longer)} documents are longer than a row: "
        f"{'they continue' if long == 'split' else f'{beyond} tokens are'}" in repr(data)
    )
    if long == "split":
        batch = {name: np.concatenate([batch[name] for batch in data]) for name in data.fields}
        continues = (batch["mask"] == 1) & (np.arange(24) == 23)
        assert continues.any(), "the last token of a row has a target, the first of another row"
        joined = collections.Counter(token for piece in unpack(batch) for token in piece.tolist())
        assert joined == collections.Counter(
            token for document in DOCUMENTS for token in ids(place, document)
        )


def test_rows_are_nearly_full_and_neighbours_stay_together():
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    rows = pack_documents(lengths, 1024)
    assert rows.padding < 0.02 and pack_documents(lengths, 1024, pack=False).padding > 0.4
    spread = [np.ptp(rows.document[a:b]) for a, b in zip(rows.first, rows.first[1:], strict=False)]
    assert np.median(spread) < 2 * OPEN
    sizes = np.add.reduceat(rows.size, rows.first[:-1])
    assert sizes.max() <= 1024 and np.bincount(rows.document).tolist() == [1] * 5000


def test_last_batch_is_full_and_documents_without_tokens_are_in_no_row(place, tmp_path):
    path = texts.json_lines(
        tmp_path / "a.jsonl", [{"text": "a cat"}, {"text": ""}, {"text": "a dog"}]
    )
    data = read(place, path, batch_size=8, pack=False)
    # its end
    assert [len(batch["tokens"]) for batch in data] == [8] and data.lengths.tolist()[1] == 1
    with pytest.raises(DataError, match=r"a\.jsonl, line 2\n.*it has no tokens"):
        read(place, path, eos=False)


# position -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, 8])
def test_resuming_in_mid_epoch_gives_the_same_bits(place, workers, shuffle):
    expected = list(read(place, shuffle=shuffle).epoch(1))
    batches = read(place, shuffle=shuffle, workers=workers).epoch(1)
    head = [next(batches) for _ in range(3)]
    state = json.loads(json.dumps(batches.get_state()))
    batches.close()
    rest = iter(read(place, shuffle=shuffle, workers=2 - workers))
    rest.set_state(state)
    found = [*head, *rest]
    assert len(found) == len(expected) > 4
    for batch, other in zip(found, expected, strict=True):
        assert all(batch[name].tobytes() == other[name].tobytes() for name in batch)
    assert (
        next(iter(read(place, shuffle=shuffle).epoch(2)))["tokens"].tobytes()
        != expected[0]["tokens"].tobytes()
    )


def test_a_state_of_other_text_is_refused(place, tmp_path):
    state = iter(read(place)).get_state()
    for options, changed in [
        ({"length": 32}, "length was 48, and is 32"),
        ({"eos": False}, "tokenizer and format was"),
        (
            {"tokenizer": texts.folder(tmp_path / "other", [*texts.SPECIAL, "<more>"])},
            "tokenizer and format was",
        ),
        ({"pack": False}, "pack was True, and is False"),
    ]:
        with pytest.raises(DataError, match=changed):
            iter(read(place, **options)).set_state(state)


@pytest.mark.parametrize("size", [2, 4])
def test_processes_read_disjoint_rows_of_the_same_batches(place, size, monkeypatch):
    expected, data = list(read(place).epoch(1)), read(place)
    encode, seen = data.format.encoder.encode, []
    monkeypatch.setattr(
        data.format.encoder,
        "encode",
        lambda documents: seen.append(len(documents)) or encode(documents),
    )
    parts = []
    for rank in range(size):
        part = RecordSource(data)
        part.local_rows = np.arange(4).reshape(size, -1)[rank]
        parts.append([batch.leaves["tokens"] for batch in part.epoch(1)])
    for number, batches in enumerate(zip(*parts, strict=True)):
        used = np.stack([batch.any(axis=1) for batch in batches])
        assert (used.sum(axis=0) <= 1).all(), "no two have the same row"
        assert np.array_equal(sum(batches), expected[number]["tokens"])
    assert sum(seen) < 60 + len(data.rows), "a process tokenizes the documents of its rows only"


def test_other_processes_get_a_copy(place):
    data = read(place, chat=None)
    copy = pickle.loads(pickle.dumps(data))
    assert all(np.array_equal(a["targets"], b["targets"]) for a, b in zip(data, copy, strict=True))


def test_long_documents_are_kept_within_a_bound(place, tmp_path, monkeypatch):
    path = texts.json_lines(
        tmp_path / "a.jsonl", [{"text": " ".join(DOCUMENTS)}, {"text": " ".join(DOCUMENTS[::-1])}]
    )
    counts = {}
    for kept in (1 << 24, 10):
        monkeypatch.setattr(text_records, "KEPT", kept)
        data = read(place, path, batch_size=2, shuffle=True)
        encode, seen = data.format.encoder.encode, []
        data.format.encoder.encode = lambda documents, encode=encode, seen=seen: (
            seen.append(len(documents)) or encode(documents)
        )
        data.format.together = 1
        batches = list(data)
        counts[kept] = sum(seen)
        assert sum(batch["mask"].sum() for batch in batches) == data.lengths.sum() - 2
    assert counts[1 << 24] == 2 < counts[10]


def test_an_index_saves_tokenizing_all(place, tmp_path, monkeypatch):
    first = read(place, index=tmp_path / "index")
    monkeypatch.setattr(
        "spmd.data.text_records.TextRows._scan", lambda *_: pytest.fail("tokenized again")
    )
    again = read(place, index=tmp_path / "index")
    assert all(np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(first, again, strict=True))
    with pytest.raises(DataError, match="documents cannot be used"):  # found without tokenizing
        read(place, index=tmp_path / "index", length=12, long="error")
    with pytest.raises(pytest.fail.Exception):
        read(place, index=tmp_path / "index", eos=False)


# answers ------------------------------------------------------------------------------------------

TALK = texts.messages(
    "where is the cat", "on the mat", "and the dog", "under a tree", system="be short"
)


def test_only_answers_count(place, tmp_path):
    path = texts.json_lines(tmp_path / "a.jsonl", [TALK])
    batch = next(
        iter(read(place, path, chat="chatml", loss_on="answers", length=128, batch_size=1))
    )
    assert counted(place, batch) == "on the mat<|im_end|>under a tree<|im_end|>"
    everything = next(iter(read(place, path, chat="chatml", length=128, batch_size=1)))
    assert (
        np.array_equal(everything["tokens"], batch["tokens"])
        and everything["mask"].sum() > batch["mask"].sum()
    )
    assert counted(place, everything).startswith(
        "system\nbe short<|im_end|>\n<|im_start|>user\nwhere is"
    )


def test_template_of_the_folder_finds_the_same_answers(place, tmp_path):
    """Up to the line break after an answer, which only the format knows not to be of it."""
    path = texts.json_lines(tmp_path / "a.jsonl", [TALK])
    by_name, by_template = (
        next(iter(read(place, path, chat=chat, loss_on="answers", length=128, batch_size=1)))
        for chat in ("chatml", "template")
    )
    assert np.array_equal(by_name["tokens"], by_template["tokens"])
    assert counted(place, by_template) == "on the mat<|im_end|>\nunder a tree<|im_end|>\n"
    pickle.dumps(read(place, path, chat="template", length=128))


def test_prompt_and_completion(place, tmp_path):
    path = texts.json_lines(tmp_path / "a.jsonl", [{"q": "the cat sat on", "a": " the mat"}])
    options = {"field": ("q", "a"), "loss_on": "answers", "length": 64, "batch_size": 1}
    batch = next(iter(read(place, path, **options)))
    assert counted(place, batch) == " the mat<eos>"
    assert unpack(batch)[0].tolist() == ids(place, "the cat sat on the mat")
    assert (
        counted(place, next(iter(read(place, path, chat="chatml", **options))))
        == " the mat<|im_end|>"
    )


@pytest.mark.parametrize("answer", ["yes  \n\n", "  yes", "naïve 🙂", " \n 🙂 ", "\t", "é"])
def test_every_letter_of_an_answer_counts(place, tmp_path, answer):
    path = texts.json_lines(
        tmp_path / "a.jsonl",
        [{"prompt": "is it 🙂?\n\n", "completion": answer}, texts.messages("🙂 ", answer)],
    )
    for options, end in [
        ({"field": ("prompt", "completion")}, "<eos>"),
        ({"chat": "chatml"}, "<|im_end|>"),
    ]:
        # each reads one of the two lines
        data = read(
            place, path, loss_on="answers", length=64, batch_size=1, on_error="skip", **options
        )
        # a line break of the prompt may be in one token with what follows
        found = counted(place, next(iter(data))).lstrip("\n")
        assert found == answer.lstrip("\n") + end


def test_token_across_the_border_belongs_to_the_answer(place, tmp_path):
    path = texts.json_lines(tmp_path / "a.jsonl", [{"prompt": "on the m", "completion": "at"}])
    batch = next(
        iter(
            read(
                place,
                path,
                field=("prompt", "completion"),
                loss_on="answers",
                length=16,
                batch_size=1,
            )
        )
    )
    assert counted(place, batch) == " mat<eos>"


def test_known_formats_write_what_the_models_templates_write():
    """Texts as the templates of these models give them."""
    two, three = texts.messages("hi ", "yes"), texts.messages("hi", "yes", system="s")
    expected = {
        "chatml": "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n",
        "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "s<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyes<|eot_id|>",
        "gemma": "<bos><start_of_turn>user\ns\n\nhi<end_of_turn>\n<start_of_turn>model\n"
        "yes<end_of_turn>\n",
    }
    for name, text in expected.items():
        rendered = formats()[name].render(three["messages"])
        assert rendered.text == text
        (begin, end), *_ = rendered.answers
        assert text[begin:end].startswith("yes<")
    assert formats()["mistral"].render(two["messages"]).text == "<s>[INST] hi[/INST] yes</s>"
    for messages, why in [(three, "has no system message at all"), (texts.messages("a"), None)]:
        if why:
            with pytest.raises(ValueError, match=why):
                formats()["mistral"].render(messages["messages"])
    with pytest.raises(ValueError, match="in turn, and the roles are user, user"):
        formats()["gemma"].render([*two["messages"][:1]] * 2)


def test_settings_of_the_file_do_not_truncate_or_pad(place, tmp_path):
    tokenizer = texts.tokenizer(place / "model")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=512)
    data = read(place, tokenizer=tokenizer, eos="<eos>", length=256)
    assert (
        np.array_equal(data.lengths, read(place, length=256).lengths)
        and tokenizer.truncation is not None
    )


# Parquet ------------------------------------------------------------------------------------------


def test_parquet_holds_the_same_documents(place, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    talks = [texts.messages(*DOCUMENTS[at : at + 2]) for at in range(0, 20, 2)]
    texts.json_lines(tmp_path / "talks.jsonl", talks)
    parquet.write_table(
        arrow.Table.from_pylist([{**talk, "other": 1} for talk in talks]),
        tmp_path / "talks.parquet",
        row_group_size=3,
    )
    by_format = [
        read(place, tmp_path / f"talks.{ending}", chat="chatml", length=128)
        for ending in ("jsonl", "parquet")
    ]
    for lines, rows in zip(*by_format, strict=True):
        assert all(np.array_equal(lines[name], rows[name]) for name in lines)
    with pytest.raises(OptionError, match=r'has no column "mesages".*\n.*did you mean "messages"'):
        read(place, tmp_path / "talks.parquet", chat="chatml", field="mesages")
    parquet.write_table(
        arrow.table({"text": ["a cat", None, "a dog"]}), tmp_path / "a.parquet", row_group_size=2
    )
    with pytest.raises(DataError, match=r'a\.parquet, row 1\n.*field "text" is None'):
        read(place, tmp_path / "a.parquet")


# what cannot be used ------------------------------------------------------------------------------

BAD_LINES = [
    b'{"text": "a cat"}',
    b'{"text": "a cat}',
    b"",
    b'{"txt": "a cat"}',
    b'{"text": 3}',
    b'{"text": ["a"]}',
    b'["text"]',
    b'{"text": "\xff"}',
    b'{"text": "a \\ud800"}',
    b"[" * 100_000,
    b'{"text": "a dog"}',
    b'{"text": "a do',
]


def test_bad_lines_are_all_reported(place, tmp_path, monkeypatch, golden):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(BAD_LINES))
    with pytest.raises(DataError) as caught:
        spmd.data.text("a.jsonl", tokenizer=place / "model", length=16, batch_size=1)
    text = str(caught.value)
    assert len(caught.value.problems) == 9
    golden("text_bad_lines", text)


def test_bad_lines_are_left_out_by_name(place, tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join(BAD_LINES))
    for _ in range(2):  # an index does not hide them
        with caplog.at_level(logging.WARNING, "spmd"):
            data = read(
                place, tmp_path / "a.jsonl", on_error="skip", batch_size=1, index=tmp_path / "index"
            )
        assert (data.lengths > 0).sum() == 2 and "9 documents are left out" in repr(data)
        assert (
            "9 of 11 documents cannot be used and are left out" in caplog.text
            and "a.jsonl, line 2: column" in caplog.text
        )
        caplog.clear()


def test_reading_stops_after_many_bad_lines(place, tmp_path):
    (tmp_path / "a.jsonl").write_text("no\n" * 5000)
    with pytest.raises(DataError, match=r"100 problems \(more may follow\)"):
        read(place, tmp_path / "a.jsonl")


def test_a_document_that_changes_is_an_error(place, tmp_path):
    path = texts.json_lines(
        tmp_path / "a.jsonl", [{"text": "a cat and a dog"}, {"text": "it slept"}]
    )
    data = read(place, path, batch_size=1)
    path.write_text(path.read_text().replace("a dog", "frogs"))
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: it had \d+ tokens, and has \d+"):
        list(data)


TURNS = {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}
CASES = {
    "no such folder": (DOCUMENTS[:1], {"tokenizer": "nowhere"}),
    "folder without a tokenizer": (DOCUMENTS[:1], {"tokenizer": "empty"}),
    "damaged tokenizer": (DOCUMENTS[:1], {"tokenizer": "damaged"}),
    "no end named": (DOCUMENTS[:1], {"tokenizer": "plain"}),
    "unknown end": (DOCUMENTS[:1], {"eos": "<end>"}),
    "no template": ([TALK], {"tokenizer": "plain", "chat": "template"}),
    "template that is none": ([TALK], {"tokenizer": "wrong", "chat": "template"}),
    "template that changes what was said": (
        [TALK],
        {"tokenizer": "changing", "chat": "template", "loss_on": "answers"},
    ),
    "template that refuses": ([TALK], {"tokenizer": "refusing", "chat": "template"}),
    "unknown chat format": ([TALK], {"chat": "chatlm"}),
    "chat format of other tokens": ([TALK], {"chat": "llama3"}),
    "messages that are none": (
        [
            {"messages": "a"},
            {"messages": []},
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": "user", "content": None}]},
            TURNS,
            {"text": "a"},
        ],
        {"chat": "chatml"},
    ),
    "fields of other kinds": ([TALK, {"prompt": "a", "completion": "b"}], {}),
    "special token in a message": ([texts.messages("a", "b<|im_end|>c")], {"chat": "chatml"}),
    "no answer": ([texts.messages("a")], {"chat": "chatml", "loss_on": "answers"}),
    "answers of plain text": (DOCUMENTS[:1], {"loss_on": "answers"}),
    "unknown loss_on": (DOCUMENTS[:1], {"loss_on": "answer"}),
    "unknown long": (DOCUMENTS[:1], {"long": "spilt"}),
    "length of one": (DOCUMENTS[:1], {"length": 1}),
    "too long": (DOCUMENTS[:2], {"length": 4, "long": "error"}),
    "three fields": (DOCUMENTS[:1], {"field": ("a", "b", "c")}),
}


@pytest.mark.parametrize("name", CASES)
def test_invalid_text_raises(name, tmp_path, monkeypatch, golden):
    monkeypatch.chdir(tmp_path)
    documents, options = CASES[name]
    texts.json_lines(
        tmp_path / "a.jsonl", [{"text": one} if isinstance(one, str) else one for one in documents]
    )
    texts.folder(tmp_path / "model")
    templates = {
        "wrong": "{% if %}",
        "changing": "{{ messages | length }}" + texts.CHATML,
        "refusing": "{{ raise_exception('not today') }}",
    }
    if (folder := options.get("tokenizer")) in templates:
        texts.folder(tmp_path / folder, chat_template=templates[folder])
    elif folder in ("plain", "damaged"):
        texts.folder(tmp_path / folder)
        (tmp_path / folder / "tokenizer_config.json").unlink()
        if folder == "damaged":
            (tmp_path / folder / "tokenizer.json").write_text("{")
    elif folder == "empty":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.model").write_text("")
    with pytest.raises(SpmdError) as caught:
        spmd.data.text(
            "a.jsonl", **{"tokenizer": "model", "length": 64, "batch_size": 1, **options}
        )
    message, _, fix = str(caught.value).partition("\n    fix: ")
    if name in ("damaged tokenizer", "template that is none"):  # the rest is another package's
        message = message.partition(":")[0]
    golden(f"text_{name.replace(' ', '_')}", f"{message}\n    fix: {fix}" if fix else message)


HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MACROS = (
    "{% macro f() %}{{ g() }}{{ g() }}{% endmacro %}{% macro g() %}"
    + ENDLESS
    + "{% endmacro %}{{ f() }}"
)
DOUBLES = (
    "{% set n = namespace(t='xxxxxxxx') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% "
    "endfor %}{{ n.t }}"
)
ATTACKS = {  # by name: a template, and what is said of it
    "a number at compile time": (
        "{{ 10 ** (10 ** 10) }}",
        "cannot be read: no end: it has computed for 1 seconds",
    ),
    "a number": (
        "{% set x = messages|length + 9 %}{{ x ** (x ** x) }}",
        "no end: it has computed for 1 seconds",
    ),
    "loops in loops": (ENDLESS, "no end: it has computed for 1 seconds"),
    "macros": (MACROS, "no end: it has computed for 1 seconds"),
    "text at compile time": ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
    "text": ("{{ messages[0].content * 10 ** 9 }}", "MemoryError"),
    "text that doubles": (DOUBLES, "MemoryError"),
    "a width": ("{{ messages[0].content.ljust(10 ** 10) }}", "MemoryError"),
    "a format": ("{{ '%999999999d' % messages|length }}", "MemoryError"),
    "a list": ("{{ (messages * 10 ** 9)|length }}", "MemoryError"),
    "a long text": (
        "{{ messages[0].content * 10 ** 6 }}",
        "its text has 5,000,000 characters; at most 1,000,000 are allowed",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "files": ("{% include '/etc/passwd' %}", "TypeError: no loader for this environment specified"),
    "attributes": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
}


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("name", ATTACKS)
def test_chat_template_is_bounded_in_time_and_memory(name, monkeypatch):
    monkeypatch.setattr(template_client, "SECONDS", 1)
    monkeypatch.setattr(template_client, "MOST_MEMORY", 256 << 20)
    monkeypatch.setattr(template_client, "MOST_TEXT", 1_000_000)
    source, said = ATTACKS[name]
    with pytest.raises((ValueError, DataError)) as caught:
        ChatTemplate(source, {}, False).prompt(HELLO)
    assert said in str(caught.value)


def test_chat_template_serves_after_a_conversation_that_ended_its_process(monkeypatch):
    monkeypatch.setattr(template_client, "SECONDS", 1)
    template = ChatTemplate(
        "{% if messages|length > 1 %}" + ENDLESS + "{% endif %}{{ messages[0].content }}{{ eos }}",
        {"eos": "!"},
        False,
    )
    assert template.prompt(HELLO) == "hello!"
    process = template._renderer._process
    assert template.prompt(HELLO) == "hello!" and template._renderer._process is process
    with pytest.raises(
        ValueError, match="the chat template raises no end: it has computed for 1 seconds"
    ):
        template.prompt(HELLO * 2)
    assert (
        template.prompt(HELLO) == "hello!"
        and template._renderer._process is not process
        and process.returncode is not None
    )


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"sort_keys": True, "ensure_ascii": True}])
def test_chat_template_writes_json_as_python_does(options):
    """As transformers' filter does; jinja2's own escapes for HTML, and sorts keys."""
    call = {"role": "user", "name": "search", "content": "is 1 < 2 & it's \u00e9?"}
    arguments = ", ".join(f"{name}={value}" for name, value in options.items())
    template = ChatTemplate(f"{{{{ messages[0] | tojson({arguments}) }}}}", {}, False)
    assert template.prompt([call]) == json.dumps(call, **{"ensure_ascii": False} | options)


@pytest.mark.parametrize("filters, is_new", [("", False), (" | tojson", True)])
def test_index_of_texts_that_were_written_for_html_is_not_used(filters, is_new):
    """Tokens of other templates are those of earlier versions, whose hash this was."""
    template = ChatTemplate(f"{{{{ messages[0].content{filters} }}}}", {}, False)
    style = tokenize.Conversation(("messages",), template, re.compile("(?!)"))
    tokenizer = SimpleNamespace(hash="abc")
    encoder = tokenize.Encoder(style, tokenizer, answers=False, eos=None)
    earlier = hashlib.sha256(f"abc {style!r} False None".encode()).hexdigest()[:16]
    assert (encoder.hash != earlier) == is_new


def test_process_of_a_chat_template_ends_with_it():
    template = ChatTemplate("{{ messages[0].content }}", {}, False)
    process = template._renderer._process
    assert pickle.loads(pickle.dumps(template)).prompt(HELLO) == "hello" and process.poll() is None
    del template
    gc.collect()
    assert process.returncode is not None


def test_old_jinja2_is_refused(monkeypatch):
    monkeypatch.setattr(template_client.importlib.metadata, "version", lambda _: "3.1.5")
    with pytest.raises(
        MissingExtraError,
        match=r"jinja2 3\.1\.5 is installed, .*\n +fix: .*, which installs 3\.1\.6 or newer\.",
    ):
        ChatTemplate("a", {}, False)


def test_files_of_other_kinds_are_refused(place, tmp_path):
    for name in ("a.json", "a.jsonl", "its data.jsonl", "a-lines.jsonl"):
        (tmp_path / name).write_text('[\n{"text": "a"}]')
        with pytest.raises(
            DataError,
            match=r"is a JSON array, and documents are read by line\.\n    fix: one object a line",
        ) as raised:
            read(place, tmp_path / name)
        command = shlex.split(
            raised.value.fix.partition(", as  ")[2].removesuffix("  writes them.")
        )
        assert command[:4] == ["jq", "-c", ".[]", str(tmp_path / name)] and command[4] == ">"
        assert not (tmp_path / command[5]).exists(), (
            "the shell would empty the data before jq reads them"
        )
    (tmp_path / "a.txt").write_text("a cat")
    with pytest.raises(OptionError, match=r"text of files that end in \.txt"):
        read(place, tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(b"\x1f\x8b\x08...")
    with pytest.raises(DataError, match="is compressed"):
        read(place, tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="has a document"):
        read(place, tmp_path / "a.jsonl")


def test_a_byte_order_mark_is_no_text(place, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b'{"text": "a cat"}\r\n\r\n{"text": "a dog"}'
    )
    assert (
        read(place, tmp_path / "a.jsonl").lengths
        == [len(ids(place, "a cat")), len(ids(place, "a dog"))]
    ).all()


def test_a_missing_package_names_the_extra(place, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(
        MissingExtraError, match=r"tokenizers is not installed\.\n    fix: .*\[text\]"
    ):
        read(place)


def test_bench_reads_text(place, capsys):
    files, model = str(place / "part-*.jsonl"), str(place / "model")
    assert (
        cli.main(
            ["data", "bench", files, "--batch-size", "4", "--tokenizer", model, "--length", "48"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        "60 documents of 2 JSON lines files" in printed
        and "padding" in printed
        and "records/s" in printed
    )
