"""Prompts: text to the tokens that a model is given, and the tokens that it writes to text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.data.chat import messages_of
from spmd.data.generation_config import end_tokens
from spmd.data.text_files import check_text
from spmd.data.tokenize import Conversation, Tokenizer, style_of
from spmd.errors import DataError, first_line, option, short_repr


class Prompts:
    """Encodes prompts and decodes what a model writes, by the files of its folder.

    Args:
      tokenizer: a folder with a tokenizer.json, the path of one, or a `tokenizers.Tokenizer`.
      chat: a prompt is what a user says, in this format (`spmd.data.text`), and the model answers;
        None: a prompt is text to continue.

    Attributes:
      stop: ids of the tokens that end a text: the `eos_token_id` of generation_config.json or
        config.json, else the `eos_token` of tokenizer_config.json; in a chat also the token that
        ends an answer.

    Raises:
      DataError: no tokenizer, an unknown format, or one whose special tokens the tokenizer lacks.

    Example:
      >>> import tokenizers
      >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
      >>> words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
      >>> prompts = Prompts(words)
      >>> prompts.encode("a b a"), prompts.decode([1, 1]), prompts.stop
      ([0, 1, 0], 'b b', ())
    """

    def __init__(self, tokenizer: Any, chat: str | None = None):
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer)
        self.tokenizer: Tokenizer = tokenizer
        self._chat: Conversation | None = None
        if chat is not None:
            style = style_of(None, chat, tokenizer, answers=True)
            if isinstance(style, Conversation):
                self._chat = style
        self.stop = tuple(dict.fromkeys([*self._ends_of_texts(), *self._ends_of_answers()]))

    def _ends_of_texts(self) -> list[int]:
        """Return the tokens that end a text, as the folder's files name them."""
        folder, name = self.tokenizer.folder, self.tokenizer.special_names().get("eos_token")
        ids: list[int | None] = []
        if folder is not None:
            ids += end_tokens(folder)
        if not ids and name is not None:
            ids.append(self.tokenizer.id_of(name))
        return [token for token in ids if token is not None]

    def _ends_of_answers(self) -> list[int]:
        """The special token after an answer."""
        if self._chat is None:
            return []
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            rendered = self._chat.form.render(turns)
        except ValueError as error:
            raise DataError(
                f"{self.tokenizer.name}: {error}.", fix=f"another {option('chat')} format."
            ) from error
        begin, end = rendered.answers[-1]
        tokens = self._chat.reserved.findall(rendered.text[begin:end])
        ids = [self.tokenizer.id_of(token) for token in tokens[:1]]
        return [token for token in ids if token is not None]

    def encode(self, prompt: str) -> list[int]:
        """The token ids of a prompt.

        Raises:
          DataError: it is no text, it has no tokens, or it cannot be said in this chat.
        """
        try:
            text = check_text(prompt, "it")
            if self._chat is not None:
                turns = messages_of(
                    [{"role": "user", "content": text}], "messages", self._chat.reserved
                )
                text = self._chat.form.prompt(turns)
            plain = ids = self._ids(text, special=False)
            if self._chat is None:
                ids = self._ids(text, special=True)
        except ValueError as error:
            raise DataError(
                f"prompt {short_repr(prompt)}: {error}.", fix="another prompt."
            ) from error
        # some tokenizers end every text, which the model is to continue
        adds_end = plain[-1:] != ids[-1:]
        if ids and ids[-1] in self.stop and adds_end:
            ids = ids[:-1]
        if not ids:
            raise DataError(
                f"prompt {short_repr(prompt)} has no tokens.",
                fix="one token at least, such as the one that begins a text.",
            )
        return ids

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            return list(self.tokenizer.encode([text], special=special, offsets=False)[0].ids)
        except Exception as error:
            # such as a word that is in no vocabulary without a token for unknown ones
            raise ValueError(f"it cannot be tokenized: {first_line(error)}") from error

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, without special tokens."""
        return self.tokenizer.tokens.decode([int(token) for token in ids], skip_special_tokens=True)
