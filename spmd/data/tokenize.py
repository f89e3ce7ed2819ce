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
from spmd.output_files import read_bytes
from spmd.user_paths import as_path


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A document: ids int32[n], and bool[n], whether a token counts in the loss as a prediction
    from those before it.
    """

    ids: np.ndarray
    counts: np.ndarray


class Tokenizer:
    """A `tokenizer.json` and what its folder says about special tokens.

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
            path = path if path.suffix == ".json" else path / "tokenizer.json"
            self.name, text = str(path), _bytes_of(path)
            self.folder, self.settings = path.parent, _settings(path.parent)
        try:
            # of one's own, since it is changed below
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
        self.size = max(vocabulary.values(), default=-1) + 1
        self.special = [
            token.content
            for token in self.tokens.get_added_tokens_decoder().values()
            if token.special
        ]

    def named(self) -> dict[str, str]:
        """Special tokens that the folder names, such as "eos_token"."""
        texts = {
            name: value["content"] if isinstance(value, Mapping) else value
            for name, value in self.settings.items()
            if name.endswith("_token") and isinstance(value, Mapping | str)
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def id_of(self, token: str) -> int | None:
        """The id of a token, None if there is none."""
        return self.tokens.token_to_id(token)

    def encode(self, texts: list[str], *, special: bool, offsets: bool) -> list[Any]:
        """What `tokenizers` returns for each text; `special`: with the tokens that its
        post-processor adds.
        """
        encode = self.tokens.encode_batch if offsets else self.tokens.encode_batch_fast
        return encode(texts, add_special_tokens=special)


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
    return (
        {**settings, "chat_template": template.read_text(encoding="utf-8")}
        if template.is_file()
        else settings
    )


class Style(Protocol):
    """How a document becomes text.

    Attributes:
      special: whether the tokens that the tokenizer's post-processor adds are wanted, such as one
        at the beginning.
    """

    special: bool

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read."""
        ...

    def render(self, document: dict[str, Any]) -> Rendered:
        """The text; raises `ValueError`."""
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
        """The second is the answer."""
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
        """By the format."""
        if len(self.fields) == 2:
            roles = zip(("user", "assistant"), self.fields, strict=True)
            messages: Any = [
                {"role": role, "content": text_of(document, field)} for role, field in roles
            ]
        else:
            messages = document.get(self.fields[0])
            if messages is None:
                text_of(document, self.fields[0])  # which says that it is missing, or None
        return self.form.render(messages_of(messages, self.fields[0], self.reserved))


def style_of(
    field: str | Sequence[str] | None, chat: str | None, tokenizer: Tokenizer, *, answers: bool
) -> Style:
    """What documents are, as the options say.

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
    named = ("messages" if chat else "text") if field is None else field
    names = (
        (named,) if isinstance(named, str) else tuple(named) if isinstance(named, Sequence) else ()
    )
    if (
        len(names) not in (1, 2)
        or not all(isinstance(name, str) and name for name in names)
        or len(set(names)) < len(names)
    ):
        raise OptionError(
            f"{option('field', short_repr(field))}.",
            fix='the name of a field, or of two, such as ("prompt", "completion").',
        )
    if chat is None:
        if len(names) == 1 and answers:
            why = f"{option('loss_on', quoted('answers'))}, but plain text has no answers."
            raise OptionError(
                why,
                fix=f"{option('field', quoted('prompt'), quoted('completion'))}, or "
                f"{option('chat')} for messages; "
                f"or {option('loss_on', quoted('all'))}.",
            )
        return PlainText(names[0]) if len(names) == 1 else Pair(names)
    if chat == TEMPLATE:
        form: ChatFormat | ChatTemplate = ChatTemplate(
            _template(tokenizer), tokenizer.named(), answers
        )
    else:
        form = chat_format(chat)
        _check_tokens(chat, tokenizer)
    own = form.tokens if isinstance(form, ChatFormat) else ()
    reserved = sorted({*own, *tokenizer.special}, key=len, reverse=True)
    return Conversation(names, form, re.compile("|".join(map(re.escape, reserved)) or r"(?!)"))


def _template(tokenizer: Tokenizer) -> str:
    template = tokenizer.settings.get("chat_template")
    if isinstance(template, list):  # of several by name
        template = next(
            (
                one.get("template")
                for one in template
                if isinstance(one, dict) and one.get("name") == "default"
            ),
            None,
        )
    if not isinstance(template, str):
        has = _formats_of(tokenizer)
        fix = (
            f"{option('chat')} one whose special tokens the tokenizer has: {join_names(has)}"
            if has
            else "a tokenizer_config.json with chat_template"
        )
        raise DataError(f"{tokenizer.name} has no chat template beside it.", fix=f"{fix}.")
    return template


def _formats_of(tokenizer: Tokenizer) -> list[str]:
    return [
        name
        for name, one in formats().items()
        if all(tokenizer.id_of(token) is not None for token in one.tokens)
    ]


def _check_tokens(chat: str, tokenizer: Tokenizer) -> None:
    """Refuse a format whose special tokens would be read as ordinary text."""
    missing = [token for token in chat_format(chat).tokens if tokenizer.id_of(token) is None]
    if missing:
        has = _formats_of(tokenizer)
        fix = (
            f"{option('chat')} one whose tokens it has: {join_names(has)}"
            if has
            else "a tokenizer to which they were added"
        )
        raise DataError(
            f"{option('chat', quoted(chat))}: {tokenizer.name} has no token {join_names(missing)}.",
            fix=f"{fix}.",
        )


class Encoder:
    """Documents to tokens.

    Args:
      style: how a document becomes text.
      tokenizer: from text to tokens.
      answers: whether only tokens of answers count.
      eos: a token that ends each document; None: none is added. It counts.
    """

    def __init__(self, style: Style, tokenizer: Tokenizer, *, answers: bool, eos: str | None):
        self.style, self.tokenizer, self.answers, self.eos = style, tokenizer, answers, eos
        self._eos = None if eos is None else tokenizer.id_of(eos)
        if eos is not None and self._eos is None:
            raise DataError(
                f'{tokenizer.name} has no token "{eos}".', fix="one that it has, or eos=False."
            )

    @functools.cached_property
    def hash(self) -> str:
        """Of all that decides which tokens a document becomes."""
        return hashlib.sha256(
            f"{self.tokenizer.hash} {self.style!r} {self.answers} {self.eos}".encode()
        ).hexdigest()[:16]

    def encode(self, documents: list[dict[str, Any] | ValueError]) -> list[Tokens | ValueError]:
        """The tokens of each document; in place of one that cannot be encoded, why."""
        results: list[Tokens | ValueError] = []
        rendered: list[Rendered | ValueError] = [self._render(document) for document in documents]
        texts = [one.text for one in rendered if isinstance(one, Rendered)]
        encodings = iter(self._encode(texts))
        for one in rendered:
            results.append(self._tokens(one, next(encodings)) if isinstance(one, Rendered) else one)
        return results

    def _encode(self, texts: list[str]) -> list[Any]:
        """The encoding of each text, or a `ValueError`."""
        try:
            return self.tokenizer.encode(texts, special=self.style.special, offsets=self.answers)
        except Exception as error:
            # such as a word that is in no vocabulary without a token for unknown ones
            return (
                [ValueError(f"it cannot be tokenized: {first_line(error)}")]
                if len(texts) == 1
                else [self._encode([one])[0] for one in texts]
            )

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
            begins = np.minimum(begins, np.concatenate([[0], np.maximum.accumulate(ends)])[:-1])
            counts = np.zeros(len(ids), bool)
            for begin, end in rendered.answers:
                # a token that also holds the end of the prompt is of the answer, whose beginning
                # would else not count
                counts |= (begins < end) & (ends > begin)
        if self._eos is not None and (not len(ids) or ids[-1] != self._eos):
            return Tokens(np.append(ids, np.int32(self._eos)), np.append(counts, True))
        if self._eos is not None:
            counts[-1] = True
        return Tokens(ids, counts) if len(ids) else ValueError("it has no tokens")
