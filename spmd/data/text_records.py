"""Text for language models: documents are tokenized and packed into rows of one length, which are
records like any others.
"""

import collections
import dataclasses
import itertools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.base.user_paths import as_path, make_folder
from spmd.data.packing import pack_documents
from spmd.data.record_index import cached_scan
from spmd.data.records import Field, FileFormat, ReadOptions, Records
from spmd.data.text_files import Documents, open_documents
from spmd.data.tokenize import Conversation, Encoder, Tokenizer, Tokens, style_of
from spmd.errors import (
    SHOWN,
    DataError,
    OptionError,
    Problem,
    check_integer,
    did_you_mean,
    option,
    quoted,
    raise_problems,
    short_repr,
)

TOGETHER = 1024  # documents that are tokenized in one call, by threads of `tokenizers`
# tokens of documents longer than a row that are kept, so that each of their rows need not tokenize
# them again
KEPT = 1 << 24
LONG = ("split", "truncate", "error")


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """The options on which rows depend, as `spmd.data.text` documents them."""

    length: int
    field: str | Sequence[str] | None = None
    chat: str | None = None
    loss_on: str = "all"
    pack: bool = True
    long: str = "split"
    eos: bool | str = True

    def __post_init__(self):
        check_integer(self.length, "length", 2)
        object.__setattr__(self, "length", int(self.length))
        for name, values in (("loss_on", ("all", "answers")), ("long", LONG)):
            value = getattr(self, name)
            if value not in values:
                raise OptionError(
                    f"{option(name, short_repr(value))}.", fix=did_you_mean(str(value), values)
                )
        if not isinstance(self.pack, bool):
            raise OptionError(f"pack={short_repr(self.pack)}.", fix="True or False.")
        if not isinstance(self.eos, bool | str) or self.eos == "":
            raise OptionError(f"eos={short_repr(self.eos)}.", fix="True, False, or a token.")


class TextRows(FileFormat):
    """Rows of tokens; the documents of a row are tokenized when it is read.

    Attributes:
      rows: the documents of each row.
      lengths: int64[documents], tokens of each; -1 if it cannot be read.
      counted: int64[documents], tokens that count in the loss.
    """

    file_kind, record_kind = "file", "row"

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder,
        options: TextOptions,
        reading: ReadOptions,
        index: str | Path | None,
    ):
        self.documents, self.encoder, self.options = documents, encoder, options
        self.file_kind = documents.file_kind
        self.paths, self.sizes = documents.paths, documents.sizes
        self._problems: list[Problem] = []
        self._skip = reading.on_error == "skip"
        self.lengths, self.counted = self._measured(index)
        self._report()
        packed_lengths = np.maximum(self.lengths, 0)
        if options.long == "truncate":
            packed_lengths = np.minimum(packed_lengths, options.length)
        rows = pack_documents(packed_lengths, options.length, pack=options.pack)
        self.rows = rows.filled_up(reading.batch_size)
        self.counts = [len(self.rows)]
        row, ids = (options.length,), np.dtype(np.int32)
        self.fields = dict.fromkeys(
            ("tokens", "targets", "segment_ids", "positions"), Field(row, ids)
        )
        self.fields["mask"] = Field(row, np.dtype(np.float32))
        self._long_documents = _LongDocuments()

    def _measured(self, index: str | Path | None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each document, and those that count; from the folder `index` if they are
        there.
        """
        ends = np.cumsum([0, *self.documents.counts]).tolist()
        measured = []
        for path, first, end in zip(self.paths, ends, ends[1:], strict=False):

            def scan(_: str, first: int = first, end: int = end) -> tuple[np.ndarray, np.ndarray]:
                return self._scan(first, end)

            measured.append(
                cached_scan(path, index, f"text 1 {self.encoder.hash}", scan, _all_read)
            )
        lengths, counted = (np.concatenate(parts) for parts in zip(*measured, strict=True))
        if self.options.long == "error":
            fix = 'long="split" or long="truncate", or longer rows.'
            for number in np.flatnonzero(lengths > self.options.length).tolist():
                why = f"it has {lengths[number]:,} tokens, and a row has {self.options.length:,}."
                self._add_problem(number, why, fix)
                lengths[number] = -1
        if not self._skip:
            note = ""
            if len(self._problems) >= SHOWN:
                note = "more may follow"
            skip = option("on_error", quoted("skip"))
            raise_problems(
                DataError,
                "documents cannot be used",
                self._problems,
                note,
                fix=f"correct them, or {skip}, which leaves them out.",
            )
        return lengths, counted

    def _scan(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of each document of one file, and the tokens that count; after `SHOWN`
        that cannot be used the remaining ones are not read, unless such documents are skipped.
        """
        count = end - first
        lengths = np.full(count, -1, np.int64)
        counted = np.zeros(count, np.int64)
        for begin in range(first, end, TOGETHER):
            numbers = np.arange(begin, min(begin + TOGETHER, end))
            documents = self.documents.read_documents(numbers)
            encoded = self.encoder.encode(documents)
            for number, tokens in zip(numbers.tolist(), encoded, strict=True):
                if isinstance(tokens, ValueError):
                    self._add_problem(number, f"{tokens}.")
                else:
                    lengths[number - first] = len(tokens.ids)
                    counted[number - first] = tokens.counts[1:].sum()
            if len(self._problems) >= SHOWN and not self._skip:
                break
        return lengths, counted

    def _add_problem(self, number: int, why: str, fix: str = "") -> None:
        if len(self._problems) < SHOWN:
            self._problems.append(Problem(self.documents.where(number), [why], fix))

    def _report(self) -> None:
        """Warn of documents and tokens that no row holds."""
        log, unread = logging.getLogger("spmd"), int((self.lengths < 0).sum())
        if unread:
            shown = "; ".join(
                f"{problem.where}: {problem.why[0]}" for problem in self._problems[:3]
            )
            text = (
                "%d of %d documents cannot be used and are left out "
                f"({option('on_error', quoted('skip'))}): %s"
            )
            log.warning(text, unread, len(self.lengths), shown)
        if self.truncated_tokens:
            text = (
                'long="truncate": %d of %d tokens, of %d documents, are beyond %d tokens and are '
                "left out."
            )
            total = int(self.lengths[self.lengths > 0].sum())
            log.warning(
                text,
                self.truncated_tokens,
                total,
                int((self.lengths > self.options.length).sum()),
                self.options.length,
            )

    @property
    def truncated_tokens(self) -> int:
        """Tokens that no row holds."""
        if self.options.long != "truncate":
            return 0
        return int(np.maximum(self.lengths - self.options.length, 0).sum())

    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Tokenize all documents of these rows in one call."""
        del bad  # documents that cannot be read are in no row
        rows = self.rows
        ranges = [range(rows.first[row], rows.first[row + 1]) for row in records.tolist()]
        pieces = np.fromiter(itertools.chain.from_iterable(ranges), np.int64)
        tokens = self._tokens(np.unique(rows.document[pieces]))
        for at, of_row in enumerate(ranges):
            begin = 0
            for segment, piece in enumerate(of_row, 1):
                end = begin + int(rows.size[piece])
                place = {name: leaf[at, begin:end] for name, leaf in leaves.items()}
                _fill(place, tokens[rows.document[piece]], rows.start[piece])
                place["segment_ids"][:] = segment
                begin = end

    def _tokens(self, documents: np.ndarray) -> dict[int, Tokens]:
        """The tokens of documents int64[n], ascending."""
        by_number = self._long_documents.get(documents.tolist())
        missing = documents[~np.isin(documents, list(by_number))]
        if not len(missing):
            return by_number
        encoded = self.encoder.encode(self.documents.read_documents(missing))
        for number, tokens in zip(missing.tolist(), encoded, strict=True):
            if isinstance(tokens, ValueError):
                raise self._changed(number, str(tokens))
            size = len(tokens.ids)
            if size != self.lengths[number]:
                raise self._changed(number, f"it had {self.lengths[number]} tokens, and has {size}")
            if self.options.long == "truncate":
                length = self.options.length
                tokens = Tokens(tokens.ids[:length], tokens.counts[:length])
            by_number[number] = tokens
            if len(tokens.ids) > self.options.length:
                self._long_documents.add(number, tokens)
        return by_number

    def _changed(self, number: int, why: str) -> DataError:
        return DataError(
            f"{self.documents.where(number)}: {why}.",
            fix="files and a tokenizer that do not change.",
        )


def _all_read(path: str, lengths: np.ndarray, counted: np.ndarray) -> bool:
    """Return True if all documents could be used; others are read each time, to warn each time."""
    del path, counted
    return bool((lengths >= 0).all())


def _fill(leaves: dict[str, np.ndarray], document: Tokens, start: int) -> None:
    """Write one piece of a document. A piece that continues in another row has a target for its
    last token too.
    """
    size = len(leaves["tokens"])
    end, next_start = start + size, start + 1
    following = document.ids[next_start : end + 1]
    leaves["tokens"][:] = document.ids[start:end]
    leaves["targets"][: len(following)] = following
    leaves["mask"][: len(following)] = document.counts[next_start : end + 1]
    leaves["positions"][:] = np.arange(size)


class _LongDocuments:
    """The tokens of documents that were used last, `KEPT` at most; a copy for another process is
    empty.
    """

    def __init__(self):
        self._documents: collections.OrderedDict[int, Tokens] = collections.OrderedDict()
        self._lock, self._size = threading.Lock(), 0

    def __reduce__(self) -> tuple:
        return _LongDocuments, ()

    def get(self, numbers: list[int]) -> dict[int, Tokens]:
        """Return the tokens of those of the documents that are kept."""
        by_number = {}
        with self._lock:
            for number in numbers:
                if number in self._documents:
                    by_number[number] = self._documents[number]
                    self._documents.move_to_end(number)
        return by_number

    def add(self, number: int, tokens: Tokens) -> None:
        """Keep one, in place of those that were not used for long."""
        with self._lock:
            if number not in self._documents:
                self._documents[number] = tokens
                self._size += len(tokens.ids)
            while self._size > KEPT and len(self._documents) > 1:
                _, oldest = self._documents.popitem(last=False)
                self._size -= len(oldest.ids)


class TextRecords(Records):
    """Batches of rows of tokens; made by `spmd.data.text`.

    Attributes:
      rows: the pieces of documents in each row (`spmd.data.packing.Rows`).
      lengths: int64[documents], tokens of each; -1 of one that was left out, as it cannot be read.
      padding: the share of positions without a token.
      truncated_tokens: how many tokens are in no row, under `long="truncate"`.
      vocabulary: the largest token id of the tokenizer, plus 1; a model needs as many embeddings at
        least.
    """

    format: TextRows

    def __init__(self, rows: TextRows, reading: ReadOptions):
        if not (rows.lengths > 0).any():
            raise DataError(
                f"no {rows.file_kind} has a document: {', '.join(rows.paths[:3])}.",
                fix="look at what they were written from.",
            )
        super().__init__(rows, reading)
        self.rows, self.lengths = rows.rows, rows.lengths
        self.padding, self.truncated_tokens = rows.rows.padding, rows.truncated_tokens
        self.vocabulary = rows.encoder.tokenizer.size

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be equal to resume: also the tokenizer, and the options of
        rows.
        """
        options = dataclasses.asdict(self.format.options)
        options["field"] = list(self.format.encoder.style.fields)
        facts = {
            "documents": len(self.lengths),
            "tokens": int(self.rows.size.sum()),
            "tokenizer and format": self.format.encoder.hash,
        }
        return {**super().facts(), **facts, **options}

    def __repr__(self) -> str:
        options, files = self.format.options, len(self.format.paths)
        used = self.lengths > 0
        longer = int((self.lengths > options.length).sum())
        total = int(self.lengths[used].sum())
        kind = self.format.file_kind
        if files > 1:
            kind += "s"
        documents = f"{int(used.sum()):,} documents of {files} {kind}, {total:,} tokens"
        rows = f"{len(self.rows):,} rows of {options.length:,}"
        batches = f"{self.steps_per_epoch:,} batches of {self.batch_size}"
        counted_share = self.format.counted[used].sum() / total
        counted = f"{counted_share:.1%} of the tokens count in the loss"
        lines = [
            f"{documents}, in {rows} and {batches}",
            f"    padding {self.padding:.1%}; {counted}",
        ]
        if longer:
            beyond = "they continue in other rows"
            if options.long == "truncate":
                beyond = f"{self.truncated_tokens:,} tokens are left out"
            lines.append(f"    {longer:,} documents are longer than a row: {beyond}")
        if not used.all():
            lines.append(f"    {int((~used).sum()):,} documents are left out, which cannot be used")
        width = max(map(len, self.fields))
        for name, field in self.fields.items():
            lines.append(f"    {name.ljust(width)}  {field}")
        return "\n".join(lines)


def text(
    files: str | Path | Sequence[str | Path],
    *,
    tokenizer: Any,
    length: int,
    batch_size: int,
    field: str | Sequence[str] | None = None,
    chat: str | None = None,
    loss_on: str = "all",
    pack: bool = True,
    long: str = "split",
    eos: bool | str = True,
    shuffle: bool | int = True,
    seed: int = 0,
    workers: int = 0,
    on_error: str = "stop",
    index: str | Path | None = None,
) -> TextRecords:
    """Batches of tokens of documents in JSON lines or Parquet files, packed into rows of `length`.
    Needs the extra `text`.

    A batch has "tokens", "targets" (the next token of the same document), "segment_ids" (from 1 in
    each row, 0 on padding) and "positions" (from 0 in each document), int32[rows, length], and
    "mask" float32[rows, length], 1 where a target counts: for a model `model(tokens, positions=,
    segment_ids=)` and `spmd.losses.next_token`. A document never sees another one, and its last
    token has no target, unless the document continues in another row.

    All documents are read and tokenized once when the files are opened, to pack them and to report
    all that cannot be used. They are tokenized again when rows are read, so tokens take no memory.
    Rows are the same in all epochs, in another order in each, for any number of processes. The last
    batch is filled up with rows of padding.

    Args:
      files: a pattern, a path, or several of them, of .jsonl (or .json, .ndjson: one object a line)
        or .parquet files.
      tokenizer: a folder with a tokenizer.json, the path of one, or a `tokenizers.Tokenizer`.
      length: tokens of a row.
      batch_size: rows of a batch, over all processes.
      field: of text, or two, such as ("prompt", "completion"); None: "text", or with `chat`
        "messages", a list of {"role", "content"}.
      chat: the format of conversations, "chatml", "llama3", "mistral" or "gemma"; "template": that
        of the tokenizer's folder. Of two fields they make a message of the user and one of the
        assistant.
      loss_on: "all", or "answers": only the completion, or what the assistant says and the token
        that ends it.
      pack: several documents in a row (best fit); False: each has its own.
      long: for documents of more tokens than a row: "split", which continues them in other rows,
        "truncate", or "error".
      eos: True: documents other than conversations end in the folder's `eos_token`; or the token
        that they end in.
      shuffle: of rows: True, False, or the size of a window.
      seed, workers, on_error: as in `spmd.data.csv`.
      index: a folder that stores where documents are and how many tokens they have, so that the
        next run need not tokenize all first.

    Returns:
      Batches of rows, as `spmd.data.Records`; `print` shows documents, tokens and rows, and
      `padding` is the share of positions without a token.

    Raises:
      DataError: no file or tokenizer; documents that cannot be used, with file, line and reason; an
        unknown chat format, or one whose special tokens the tokenizer lacks.
      OptionError: an option out of range.
      MissingExtraError: `tokenizers`, jinja2 or pyarrow is not installed.

    Example:
      >>> import pathlib, spmd, tempfile, tokenizers
      >>> words = tokenizers.Tokenizer(
      ...     tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3})
      ... )
      >>> words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
      >>> _ = file.write_text('{"text": "a b c"}\\n{"text": "c b"}\\n')
      >>> batch = next(
      ...     iter(spmd.data.text(file, tokenizer=words, length=8, batch_size=1, eos="<eos>"))
      ... )
      >>> batch["tokens"].tolist(), batch["segment_ids"].tolist()
      ([[1, 2, 3, 0, 3, 2, 0, 0]], [[1, 1, 1, 1, 2, 2, 2, 0]])
      >>> batch["targets"].tolist(), batch["mask"].astype(int).tolist()
      ([[2, 3, 0, 0, 2, 0, 0, 0]], [[1, 1, 1, 0, 1, 1, 0, 0]])
    """
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    options = TextOptions(length, field, chat, loss_on, pack, long, eos)
    if index is not None:
        make_folder(as_path(index, "index"), OptionError)
    reader, answers = Tokenizer(tokenizer), loss_on == "answers"
    style = style_of(field, chat, reader, answers=answers)
    end = _eos(eos, reader, isinstance(style, Conversation))
    encoder = Encoder(style, reader, answers=answers, eos=end)
    documents = open_documents(files, style.fields, index)
    return TextRecords(TextRows(documents, encoder, options, reading, index), reading)


def _eos(eos: bool | str, tokenizer: Tokenizer, conversation: bool) -> str | None:
    """The token that documents end in."""
    if isinstance(eos, str):
        return eos
    if not eos or conversation:
        return None
    token = tokenizer.special_names().get("eos_token")
    if token is None:
        fix = 'eos="</s>" or what it is called; eos=False if documents are to have no end.'
        raise DataError(
            f"{tokenizer.name}: no tokenizer_config.json beside it names an eos_token, in which "
            "documents end.",
            fix=fix,
        )
    return token
