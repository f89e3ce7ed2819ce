"""Conversations as text: by a format of `chat_formats.toml`, or by the tokenizer's own template;
with the answers in it.
"""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from spmd.data.template_client import Renderer
from spmd.data.text_files import check_text
from spmd.errors import DataError, did_you_mean, join_names, option, quoted, type_name

Message = dict[str, str]
TEMPLATE = "template"  # the name that stands for the folder's template
ROLES = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A document as text, and the positions at which its answers begin and end."""

    text: str
    answers: Sequence[tuple[int, int]] = ()


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """A format of `chat_formats.toml`, which says what the fields are.

    Example:
      >>> rendered = formats()["chatml"].render(
      ...     [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
      ... )
      >>> rendered.text
      '<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>\\n'
      >>> rendered.answers
      [(54, 65)]
    """

    start: str
    user: str
    assistant: tuple[str, str, str]
    tokens: tuple[str, ...]
    system: str | None = None
    strip: bool = False
    alternate: bool = False
    join_system: str | None = None

    def render(self, messages: list[Message]) -> Rendered:
        """The text of a conversation.

        Raises:
          ValueError: it has a turn that the format has not.
        """
        text, answers = self.start, []
        for role, content in self._turns(messages):
            if role == "assistant":
                before, written, after = self.assistant
            elif role == "system" and self.system is not None:
                before, written, after = self.system, "", ""
            else:
                before, written, after = self.user, "", ""
            text += before.replace("{content}", content)
            if written:
                begin, text = len(text), text + written.replace("{content}", content)
                answers.append((begin, len(text)))
            text += after
        return Rendered(text, answers)

    def prompt(self, messages: list[Message]) -> str:
        """The text of a conversation up to where the assistant is to answer."""
        return self.render(messages).text + self.assistant[0]

    def _turns(self, messages: list[Message]) -> list[tuple[str, str]]:
        turns = []
        for number, message in enumerate(messages, 1):
            role, content = message["role"], message["content"]
            if role not in ROLES:
                raise ValueError(
                    f'message {number} has the role "{role}"; known roles: {join_names(ROLES)}'
                )
            if self.strip:
                content = content.strip()
            turns.append((role, content))
        if turns[0][0] == "system" and self.join_system is not None and len(turns) > 1:
            (_, system), (role, content) = turns[:2]
            turns[:2] = [(role, f"{system}{self.join_system}{content}")]
        roles = [role for role, _ in turns]
        if "system" in roles and self.system is None:
            where = "at all"
            if self.join_system is not None:
                where = "other than before the first user's"
            raise ValueError(f"the format has no system message {where}")
        in_turn = [("user", "assistant")[number % 2] for number in range(len(turns))]
        if self.alternate and roles != in_turn:
            raise ValueError(
                f"the format has user and assistant in turn, and the roles are {join_names(roles)}"
            )
        return turns


@functools.cache
def formats() -> dict[str, ChatFormat]:
    """The known formats by name."""
    text = resources.files("spmd.data").joinpath("chat_formats.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    chat_formats = {}
    for name, table in tables.items():
        # TOML has lists, which are not hashable
        lists = {"assistant": tuple(table["assistant"]), "tokens": tuple(table["tokens"])}
        chat_formats[name] = ChatFormat(**{**table, **lists})
    return chat_formats


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer's folder, rendered by jinja2 in its sandbox, in a process with
    little memory and time.

    `strftime_now` is not defined, so that a text does not depend on the day; templates then take a
    date of their own.

    Attributes:
      source: the template.
      names: variables of the template, such as "bos_token".
      answers: look for answers, for which the template is rendered up to each of them.
    """

    source: str
    names: dict[str, str]
    answers: bool

    def __post_init__(self):
        self._renderer  # noqa: B018  compiled now, for its errors

    @functools.cached_property
    def _renderer(self) -> Renderer:
        try:
            return Renderer(self.source)
        except ValueError as error:
            fix = f"a template of jinja2, or {option('chat')} one of {join_names(formats())}."
            raise DataError(
                f"the tokenizer's chat template cannot be read: {error}.", fix=fix
            ) from error

    # a process cannot be pickled; a copy starts its own
    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_renderer"}

    def render(self, messages: list[Message]) -> Rendered:
        """The text of a conversation.

        Raises:
          ValueError: the template refuses it, takes too long, or the text up to an answer is no
            beginning of the complete text.
        """
        places, parts = [], []
        for at, message in enumerate(messages):
            if self.answers and message["role"] == "assistant":
                places.append(at)
                parts += [(messages[:at], True), (messages[: at + 1], False)]
        # One request to the renderer's process, and not one for each text.
        text, *texts = self._texts((messages, False), *parts)
        answers = []
        for at, begin, end in zip(places, texts[::2], texts[1::2], strict=True):
            # Some templates write an earlier answer differently once a turn follows it: Qwen3's
            # leaves out its reasoning.
            if not (text.startswith(end) and end.startswith(begin)):
                why = (
                    f"the template writes the conversation up to message {at + 1} in another way "
                    "than in the complete text"
                )
                raise ValueError(f"{why}, so the answer cannot be found in it")
            answers.append((len(begin), len(end)))
        return Rendered(text, answers)

    def prompt(self, messages: list[Message]) -> str:
        """The text of a conversation up to where the assistant is to answer."""
        return self._texts((messages, True))[0]

    def _texts(self, *parts: tuple[list[Message], bool]) -> list[str]:
        return self._renderer(
            [
                {**self.names, "messages": messages, "add_generation_prompt": prompt}
                for messages, prompt in parts
            ]
        )


def messages_of(value: Any, field: str, special: re.Pattern) -> list[Message]:
    """A list of messages, each with a role and a content, without special tokens, which would end a
    turn where none ends.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(value, list) or not value:
        kind = type_name(value)
        if value == []:
            kind = "an empty list"
        raise ValueError(f'field "{field}" is {kind}, and should be a list of messages')
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            problem = f"is {type_name(message)}"
            if isinstance(message, dict):
                problem = f"has {join_names(message, 5) or 'nothing'}"
            raise ValueError(
                f'message {number} of "{field}" {problem}, and should have "role" and "content"'
            )
        for key in ("role", "content"):
            check_text(message[key], f'"{key}" of message {number}')
            if (token := special.search(message[key])) is not None:
                raise ValueError(
                    f'"{key}" of message {number} holds "{token[0]}", which would be read as a '
                    "special token"
                )
    return value


def chat_format(name: str) -> ChatFormat:
    """A known format.

    Raises:
      DataError: there is none of this name.
    """
    if name not in formats():
        raise DataError(
            f"{option('chat', quoted(name))}.", fix=did_you_mean(str(name), [*formats(), TEMPLATE])
        )
    return formats()[name]
