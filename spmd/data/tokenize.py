"""From documents to tokens, by the `tokenizers` package and the files of a model's folder."""

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spmd.base.output_files import read_bytes
from spmd.base.user_paths import as_path
from spmd.data.chat import (
    TEMPLATE,
    ChatFormat,
    ChatTemplate,
    Rendered,
    chat_format,
    formats,
    messages_of,
)
from spmd.data.text_files import json_object, text_of
from spmd.errors import (
    DataError,
    OptionError,
    first_line,
    import_extra,
    join_names,
    option,
    quoted,
    short_repr,
    type_name,
)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A document: ids int32[n], and bool[n], True for a token that counts in the loss as a
    prediction from those before it.
    """

    ids: np.ndarray
    counts: np.ndarray


class Tokenizer:
    """A `tokenizer.json`, and the special tokens that its folder names.

    Attributes:
      size: the largest token id, plus 1: the least vocabulary of a model.
      settings: `tokenizer_config.json`, and the template of `chat_template.jinja` if there is one.
      hash: of the file's bytes.
      folder: where the file is, None for a tokenizer from no file.
    """

    def __init__(self, source: Any):
        tokenizers = import_extra("tokenizers", "text")
        self.settings: dict[str, Any] = {}
        self.folder: Path | None = None
        if isinstance(source, tokenizers.Tokenizer):
            self.name, text = "the tokenizer", source.to_str().encode()
        else:
            path = as_path(source, "tokenizer")
            if path.suffix != ".json":
                path = path / "tokenizer.json"
            self.name, text = str(path), _bytes_of(path)
            self.folder, self.settings = path.parent, _settings(path.parent)
        try:
            # a tokenizer of this object's own, since it is changed below
            self.tokens = tokenizers.Tokenizer.from_buffer(text)
        except Exception as error:
            raise DataError(
                f"{self.name} cannot be read: {first_line(error)}.",
                fix="the tokenizer.json as it was written.",
            ) from error
        self.tokens.no_truncation()  # a file may ask for both
        self.tokens.no_padding()
        self.hash = hashlib.sha256(text).hexdigest()[:16]
        vocabulary = self.tokens.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so the number of tokens is no bound of them.
        self.size = max(vocabulary.values(), default=-1) + 1
        self.special = [
            token.content
            for token in self.tokens.get_added_tokens_decoder().values()
            if token.special
        ]

    def special_names(self) -> dict[str, str]:
        """Return special tokens by the name that the folder gives them, such as "eos_token"."""
        texts = {}
        for name, value in self.settings.items():
            if isinstance(value, Mapping) and name.endswith("_token"):
                # Older files have a table of a token's properties in place of its text.
                value = value["content"]
            if isinstance(value, str) and name.endswith("_token"):
                texts[name] = value
        return texts

    def id_of(self, token: str) -> int | None:
        """The id of a token, None if there is none."""
        return self.tokens.token_to_id(token)

    def encode(self, texts: list[str], *, special: bool, offsets: bool) -> list[Any]:
        """Return the encoding of each text by `tokenizers`; `special`: with the tokens that its
        post-processor adds.
        """
        if offsets:
            return self.tokens.encode_batch(texts, add_special_tokens=special)
        # This one is faster because it keeps no offsets (tokenizers 0.23).
        return self.tokens.encode_batch_fast(texts, add_special_tokens=special)


def _bytes_of(path: Path) -> bytes:
    if path.is_file():
        return read_bytes(path)
    folder = path.parent
    if not folder.is_dir():
        raise DataError(
            f"there is no tokenizer: the folder {folder} does not exist.",
            fix="a folder with a tokenizer.json.",
        )
    names = sorted(os.listdir(folder))
    fix = "a folder with a tokenizer.json"
    if {"tokenizer.model", "vocab.json"} & set(names):
        fix = (
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder), which "
            "writes one"
        )
    raise DataError(
        f"there is no tokenizer: {folder} has no {path.name}; it holds "
        f"{join_names(names) or 'nothing'}.",
        fix=f"{fix}.",
    )


def _settings(folder: Path) -> dict[str, Any]:
    settings: Any = {}
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    if path.is_file():
        settings = json_object(path)
    # Newer versions of transformers write the template to a file, which wins over the key.
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    return settings


class Style(Protocol):
    """A transformation of documents to text.

    Attributes:
      special: add the tokens of the tokenizer's post-processor, such as one at the beginning.
    """

    special: bool

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read."""
        ...

    def render(self, document: dict[str, Any]) -> Rendered:
        """Return the text.

        Raises:
          ValueError: the document has none.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PlainText:
    """One field of text."""

    field: str
    special = True

    @property
    def fields(self) -> tuple[str, ...]:
        """The field."""
        return (self.field,)

    def render(self, document: dict[str, Any]) -> Rendered:
        """The text as it is."""
        return Rendered(text_of(document, self.field))


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt and what is to follow it; the text is both, without anything between."""

    fields: tuple[str, ...]
    special = True

    def render(self, document: dict[str, Any]) -> Rendered:
        """Return both texts, with the second as the answer."""
        prompt, completion = (text_of(document, field) for field in self.fields)
        return Rendered(prompt + completion, [(len(prompt), len(prompt) + len(completion))])


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages, or a prompt and a completion as messages of user and assistant."""

    fields: tuple[str, ...]
    form: ChatFormat | ChatTemplate
    reserved: re.Pattern
    special = False  # the format writes them

    def render(self, document: dict[str, Any]) -> Rendered:
        """Return the messages in the format."""
        if len(self.fields) == 2:
            roles = zip(("user", "assistant"), self.fields, strict=True)
            messages: Any = [
                {"role": role, "content": text_of(document, field)} for role, field in roles
            ]
        else:
            messages = document.get(self.fields[0])
            if messages is None:
                text_of(document, self.fields[0])  # raises, as the field is missing or None
        return self.form.render(messages_of(messages, self.fields[0], self.reserved))


def style_of(
    field: str | Sequence[str] | None, chat: str | None, tokenizer: Tokenizer, *, answers: bool
) -> Style:
    """Return the style of documents that the options ask for.

    Raises:
      OptionError: options that contradict each other.
      DataError: an unknown format, one whose special tokens the tokenizer lacks, or a folder
        without a template.
    """
    if chat is not None and not isinstance(chat, str):
        raise OptionError(
            f"{option('chat', short_repr(chat))} is {type_name(chat)}.",
            fix=f"one of {join_names([*formats(), TEMPLATE])}.",
        )
    names: tuple[str, ...] = ()
    if isinstance(field, str):
        names = (field,)
    elif isinstance(field, Sequence):
        names = tuple(field)
    elif field is None and chat:
        names = ("messages",)
    elif field is None:
        names = ("text",)
    are_names = all(isinstance(name, str) and name for name in names)
    if len(names) not in (1, 2) or not are_names or len(set(names)) < len(names):
        raise OptionError(
            f"{option('field', short_repr(field))}.",
            fix='the name of a field, or of two, such as ("prompt", "completion").',
        )
    if chat is None:
        if len(names) == 1 and answers:
            why = f"{option('loss_on', quoted('answers'))}, but plain text has no answers."
            pairs = option("field", quoted("prompt"), quoted("completion"))
            all_tokens = option("loss_on", quoted("all"))
            fix = f"{pairs}, or {option('chat')} for messages; or {all_tokens}."
            raise OptionError(why, fix=fix)
        if len(names) == 1:
            return PlainText(names[0])
        return Pair(names)
    form: ChatFormat | ChatTemplate
    special = set(tokenizer.special)
    if chat == TEMPLATE:
        form = ChatTemplate(_template(tokenizer), tokenizer.special_names(), answers)
    else:
        form = chat_format(chat)
        _check_tokens(chat, tokenizer)
        special.update(form.tokens)
    # the longest first, since `|` takes the first alternative that matches
    reserved = sorted(special, key=len, reverse=True)
    # `(?!)` matches nothing, and an empty pattern would match everywhere.
    pattern = "|".join(map(re.escape, reserved)) or r"(?!)"
    return Conversation(names, form, re.compile(pattern))


def _template(tokenizer: Tokenizer) -> str:
    template = tokenizer.settings.get("chat_template")
    if isinstance(template, list):  # several by name
        tables = [table for table in template if isinstance(table, dict)]
        defaults = [table.get("template") for table in tables if table.get("name") == "default"]
        template = next(iter(defaults), None)
    if not isinstance(template, str):
        fix = "a tokenizer_config.json with chat_template"
        if usable := _formats_of(tokenizer):
            fix = f"{option('chat')} one whose special tokens the tokenizer has: "
            fix += join_names(usable)
        raise DataError(f"{tokenizer.name} has no chat template beside it.", fix=f"{fix}.")
    return template


def _formats_of(tokenizer: Tokenizer) -> list[str]:
    return [name for name in formats() if not _missing_tokens(name, tokenizer)]


def _missing_tokens(chat: str, tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens of a format that the tokenizer lacks."""
    return [token for token in chat_format(chat).tokens if tokenizer.id_of(token) is None]


def _check_tokens(chat: str, tokenizer: Tokenizer) -> None:
    """Refuse a format whose special tokens would be read as ordinary text."""
    missing = _missing_tokens(chat, tokenizer)
    if missing:
        fix = "a tokenizer to which they were added"
        if usable := _formats_of(tokenizer):
            fix = f"{option('chat')} one whose tokens it has: {join_names(usable)}"
        raise DataError(
            f"{option('chat', quoted(chat))}: {tokenizer.name} has no token {join_names(missing)}.",
            fix=f"{fix}.",
        )


class Encoder:
    """Documents to tokens.

    Args:
      style: makes text of a document.
      tokenizer: makes tokens of text.
      answers: only tokens of answers count.
      eos: a token that ends each document; None: none is added. It counts.
    """

    def __init__(self, style: Style, tokenizer: Tokenizer, *, answers: bool, eos: str | None):
        self.style, self.tokenizer, self.answers, self.eos = style, tokenizer, answers, eos
        self._eos: int | None = None
        if eos is not None:
            self._eos = tokenizer.id_of(eos)
            if self._eos is None:
                raise DataError(
                    f'{tokenizer.name} has no token "{eos}".', fix="one that it has, or eos=False."
                )

    @functools.cached_property
    def hash(self) -> str:
        """A hash of everything that the tokens of a document depend on."""
        facts = f"{self.tokenizer.hash} {self.style!r} {self.answers} {self.eos}"
        form = self.style.form if isinstance(self.style, Conversation) else None
        if isinstance(form, ChatTemplate) and "tojson" in form.source:
            # Earlier versions wrote other texts for such a template, with "<" as \u003c.
            facts += " plain json"
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def encode(self, documents: list[dict[str, Any] | ValueError]) -> list[Tokens | ValueError]:
        """Return the tokens of each document; in place of one that cannot be encoded, the
        reason.
        """
        rendered = [self._render(document) for document in documents]
        texts = [result.text for result in rendered if isinstance(result, Rendered)]
        encodings = iter(self._encode(texts))
        results: list[Tokens | ValueError] = []
        for result in rendered:
            if isinstance(result, Rendered):
                results.append(self._tokens(result, next(encodings)))
            else:
                results.append(result)
        return results

    def _encode(self, texts: list[str]) -> list[Any]:
        """The encoding of each text, or a `ValueError`."""
        try:
            return self.tokenizer.encode(texts, special=self.style.special, offsets=self.answers)
        except Exception as error:
            # such as a word that is in no vocabulary without a token for unknown ones
            if len(texts) == 1:
                return [ValueError(f"it cannot be tokenized: {first_line(error)}")]
            return [self._encode([text])[0] for text in texts]

    def _render(self, document: dict[str, Any] | ValueError) -> Rendered | ValueError:
        if isinstance(document, ValueError):
            return document
        try:
            rendered = self.style.render(document)
        except ValueError as error:
            return error
        if self.answers and not any(begin < end for begin, end in rendered.answers):
            return ValueError(
                "it has no answer, so nothing of it counts under "
                f"{option('loss_on', quoted('answers'))}"
            )
        return rendered

    def _tokens(self, rendered: Rendered, encoding: Any) -> Tokens | ValueError:
        if isinstance(encoding, ValueError):
            return encoding
        ids = np.asarray(encoding.ids, np.int32)
        counts = np.ones(len(ids), bool)
        if self.answers:
            begins, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
            # some tokenizers leave white space out of offsets, and tokens of one letter's bytes
            # have the same ones
            ends_before = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1]
            begins = np.minimum(begins, ends_before)
            counts = np.zeros(len(ids), bool)
            for begin, end in rendered.answers:
                # a token that also holds the end of the prompt is of the answer, whose beginning
                # would else not count
                counts |= (begins < end) & (ends > begin)
        # A post-processor of the tokenizer may have added the end token already.
        if self._eos is not None and (not len(ids) or ids[-1] != self._eos):
            ids_with_end = np.append(ids, np.int32(self._eos))
            return Tokens(ids_with_end, np.append(counts, True))
        if self._eos is not None:
            counts[-1] = True
        if not len(ids):
            return ValueError("it has no tokens")
        return Tokens(ids, counts)
