"""Every exception that spmd raises, and helpers that collect problems and format messages.

    SpmdError
    ├── MeshError            the mesh does not fit the devices, or cannot be read
    ├── LayoutError          a layout cannot be read, or does not fit this model on this mesh
    ├── ModelError           the model cannot be traced abstractly
    ├── LossError            the loss does not return what it should
    ├── OptimizerError       the optimizer is not an optax transformation
    ├── DataError            the data cannot be split into batches for this mesh
    ├── CheckpointError      a checkpoint does not fit, or would be overwritten
    ├── ExportError          a model cannot be exported, or an exported folder cannot be read
    ├── PretrainedError      a folder of weights cannot be read or written, or does not fit
    ├── EnsembleError        members do not match, or none has answered
    ├── CompileError         the compiler fails on a planned step, or takes too long
    ├── DeviceMemoryError    a step needs more memory than a device has
    ├── CodecError           this backend cannot encode gradients as the codec requires
    ├── CommunicationError   a transformation of `spmd.wire` is used where it cannot work
    ├── ClusterError         the processes of a run cannot connect, or their settings differ
    │   └── RendezvousTimeout  some processes did not connect in time; a restart may help
    ├── CallbackError        a callback or a logger raises something else
    ├── ProcessError         a process that a notebook started fails or exits
    ├── DivergedError        a watched metric stopped being finite, or too many updates were skipped
    ├── OptionError          an invalid argument of `fit`, `Trainer` or a callback
    └── MissingExtraError    an optional package is not installed (also an ImportError)

All of them are raised before anything is compiled, except those about a run that has started:
`DivergedError`, `CallbackError`, `ProcessError`, and `EnsembleError` about a request.
"""

import contextlib
import dataclasses
import difflib
import importlib
import numbers
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from spmd.base.deprecated import moved

# Problems listed in full: more than that usually share one cause.
SHOWN = 100
# Problems that differ only in their place and are each listed.
ALIKE = 3
LINE = 1000  # the most characters in one line of an error
TEXT = 40_000  # the most characters in an error
VALUE = 160  # the most characters of a value in an error
FIX = re.compile("^( *)(fix: .*)$", re.MULTILINE)
# names of arguments that the running command has as options; none in Python
_options: frozenset[str] = frozenset()


@contextlib.contextmanager
def options_of_command(names: Iterable[str]) -> Iterator[None]:
    """Let `option` write these arguments as the options of a command, for all threads; none of them
    for a script that it runs.
    """
    global _options
    before, _options = _options, frozenset(names)
    try:
        yield
    finally:
        _options = before


def option(name: str, *values: object) -> str:
    """Return an argument in an error, as its user writes it: in Python, or behind the command that
    is running.

    >>> option("batch_size", 8), option("field", quoted("prompt"), quoted("answer")), option("chat")
    ('batch_size=8', 'field=("prompt", "answer")', 'chat=')
    >>> with options_of_command(["batch_size", "field", "chat", "merge"]):
    ...     (
    ...         option("batch_size", 8),
    ...         option("field", quoted("prompt"), quoted("answer")),
    ...         option("chat"),
    ...         option("merge", True),
    ...     )
    ('--batch-size 8', '--field "prompt" --field "answer"', '--chat', '--merge')
    """
    if name in _options:
        flag = f"--{name.replace('_', '-')}"
        words = [flag if value is True else f"{flag} {value}" for value in values]
        return " ".join(words) or flag
    if len(values) > 1:
        return f"{name}=({', '.join(map(str, values))})"
    return f"{name}={''.join(map(str, values))}"


def quoted(value: object) -> str:
    """Return a value in the quotes that `option` puts around a text."""
    return f'"{value}"'


def in_python(text: str, command: str = "") -> str:
    """Return a part of a fix that only Python can do; `command` instead while a command runs."""
    return command if _options else text


class SpmdError(Exception):
    """Base of every error that this library raises on purpose. The length of its text is bounded.

    Attributes:
      message: the text without the fix.
      fix: what to do about it; "" if there is none, or if each problem has its own.
      summary: what is wrong, in one line without the fix; of several problems the first.
      problems: one `Problem` for each thing that is wrong, if the error collects several.
      path, rule, line, kind: as in `Problem`, if all problems agree on them; else None.

    Example:
      >>> import spmd
      >>> try:
      ...     spmd.Layout.load("fdsp")
      ... except spmd.SpmdError as error:
      ...     print(error)
      no layout "fdsp" is shipped, and no such file exists.
          fix: did you mean "fsdp"?
    """

    def __init__(
        self,
        message: str = "",
        *,
        fix: str = "",
        summary: str = "",
        problems: Sequence["Problem"] = (),
        **where: Any,
    ):
        text = message
        if fix:
            text += f"\n    fix: {fix}"
        super().__init__(bounded(text))
        self.message = bounded(message)
        self.fix = fix
        self.problems = tuple(problems)
        headline = self.message.partition("\n")[0]
        if self.problems and not summary:
            first = self.problems[0]
            summary = f"{first.path or first.where}: {next(iter(first.why), headline)}"
        self.summary = summary or headline
        self.path = where.pop("path", None)
        self.rule = where.pop("rule", None)
        self.line = where.pop("line", None)
        self.kind = where.pop("kind", None)
        if where:
            raise TypeError(f"an error has no field {', '.join(where)}")

    # IPython calls a method of this name in place of its own
    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of its traceback: the same, with fixes in
        bold where it has colours.
        """
        shell: Any = sys.modules["IPython"].get_ipython()
        lines = shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__)
        if any("\033[" in line for line in lines):
            return [FIX.sub("\\1\033[1m\\2\033[0m", line) for line in lines]
        return lines


class MeshError(SpmdError):
    """The mesh cannot be read, or its axis sizes do not multiply to the number of devices."""


class LayoutError(SpmdError):
    """The layout cannot be read, or does not fit this model on this mesh."""


class ModelError(SpmdError):
    """The model is of an unknown type, or cannot be traced without data."""


class LossError(SpmdError):
    """The loss returns neither a scalar nor one value per example."""


class OptimizerError(SpmdError):
    """The optimizer is not an optax gradient transformation."""


class DataError(SpmdError):
    """The data cannot be split into batches for this mesh."""


class CheckpointError(SpmdError):
    """A checkpoint does not fit the model, or starting would overwrite one."""


class ExportError(SpmdError):
    """A model cannot be exported, or a folder with one is damaged, of another format, or for other
    devices.
    """


class PretrainedError(SpmdError):
    """A folder of weights is damaged or cannot be written, or a name map does not fit its tensors
    or the model.
    """


class EnsembleError(SpmdError):
    """Members of an ensemble do not match, do not support the request, or none of them answered in
    time.
    """


class CompileError(SpmdError):
    """The compiler fails on a planned step, or exceeds the time limit."""


class DeviceMemoryError(SpmdError):
    """A step, or the trials of a sweep, need more memory than a device has, according to the
    compiler.
    """


class CodecError(SpmdError):
    """A codec does not work as specified on this backend."""


class CommunicationError(SpmdError):
    """A transformation of `spmd.wire` is used where it cannot work, or with a state that is not its
    own.
    """


class ClusterError(SpmdError):
    """The processes of a run cannot connect, or their settings differ: names them and both values.
    A restart does not help.
    """


class RendezvousTimeout(ClusterError):
    """Some processes did not connect in time, or could not be reached; a restart may help."""


class CallbackError(SpmdError):
    """A callback or a logger raises; names it, the method and the step. The original exception is
    its `__cause__`.
    """


class ProcessError(SpmdError):
    """A process of `spmd.launch.run` fails, exits, or has a result that cannot be sent; includes
    its rank and traceback.

    Attributes:
      process: its rank; None if there are several.
    """

    def __init__(self, message: str, process: int | None = None, **fields: Any):
        super().__init__(message, **fields)
        self.process = process


class DivergedError(SpmdError):
    """A watched metric is not finite; names the step, the metric and the last good checkpoint."""


class OptionError(SpmdError):
    """An argument is unknown, contradictory or out of range."""


class MissingExtraError(SpmdError, ImportError):
    """An optional package is missing; the message names the extra that installs it."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it is, why (with the numbers), and a verified fix.

    Attributes:
      where: the place: a path, a key of a layout, a line of a file.
      why: lines that say what is wrong there.
      fix: what to do about it; "" if there is nothing.
      also: a line about other places with the same problem; "" if there are none.
      path: the path of the parameter, submodule or batch leaf; None if it is about none, like each
        of the following.
      rule: the rule's number in its table, from 1.
      line: the line of the layout file.
      kind: "unknown_key", "invalid_value", "unread_key", "unknown_axis", "repeated_axis",
        "no_match", "overlap", "no_rule", "wrong_rank", "not_divisible", "unused_axis",
        "too_much_replicated", "conflict" or "unregistered".
    """

    where: str
    why: Sequence[str]
    fix: str = ""
    also: str = ""
    path: str | None = None
    rule: int | None = None
    line: int | None = None
    kind: str | None = None

    def __str__(self) -> str:
        details = [line for line in (self.also, *self.why) if line]
        if self.fix:
            details.append(f"fix: {self.fix}")
        return "\n      ".join([f"  {self.where}", *details])


def problems_text(headline: str, problems: Sequence[Problem], note: str = "") -> str:
    """Return the headline, the count, and every problem below it, separated by blank lines; many
    alike as one, and at most the first `SHOWN`.
    """
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    if note:
        count += f" ({note})"
    groups = group_problems(problems)
    paragraphs = [f"{headline}\n{count}:", *map(str, groups[:SHOWN])]
    if len(groups) > SHOWN:
        paragraphs.append(f"  and {len(groups) - SHOWN} more problems.")
    return "\n\n".join(paragraphs)


def group_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems, of which more than `ALIKE` that differ only in their place become one,
    which names the others by pattern.

    >>> alike = [Problem(f"layers/{number}/w", ["is wrong."]) for number in range(12)]
    >>> print(group_problems(alike)[0])
      layers/0/w
          and 11 more: layers/*/w
          is wrong.
    """
    groups: dict[Any, list[int]] = {}
    for number, problem in enumerate(problems):
        # fixes that name the place are alike apart from it
        fix = problem.fix.replace(problem.path or problem.where, "")
        groups.setdefault((*problem.why, fix, problem.also, problem.kind), []).append(number)
    shown = dict(enumerate(problems))
    for first, *others in groups.values():
        problem = problems[first]
        if len(others) < ALIKE or problem.also:
            continue
        places = [problems[other].path or problems[other].where for other in others]
        patterns = dict.fromkeys(re.sub(r"\d+", "*", place) for place in places)
        also = f"and {len(others)} more: {join_names(patterns, 4)}"
        fix = problem.fix
        if fix != problems[others[0]].fix:
            fix = f"{fix.removesuffix('.')}; and so for the others."
        shown[first] = dataclasses.replace(problem, also=also, fix=fix)
        for other in others:
            del shown[other]
    return list(shown.values())


def raise_problems(
    error: type[SpmdError],
    headline: str,
    problems: Sequence[Problem],
    note: str = "",
    fix: str = "",
) -> None:
    """Raise `error` with all problems at once, and a fix for all of them together; do nothing when
    there are none.
    """
    if not problems:
        return
    common = {}
    for field in ("path", "rule", "line", "kind"):
        distinct = {getattr(problem, field) for problem in problems}
        if len(distinct) == 1:
            common[field] = distinct.pop()
    text = problems_text(headline, problems, note)
    if fix:
        # a blank line, so that the common fix is not read as that of the last problem
        text += "\n"
    raise error(text, problems=problems, fix=fix, **common)


def bounded(text: str) -> str:
    """Return the text, truncated to at most `LINE` characters a line and about `TEXT` in all.

    >>> len(bounded("x" * 38_400)), bounded("short")
    (1018, 'short')
    """
    text = "\n".join(_clipped(line, LINE) for line in str(text).split("\n"))
    if len(text) <= TEXT + LINE:
        return text
    half = TEXT // 2
    return f"{text[:half]}\n  ... ({len(text) - TEXT:,} more characters)\n{text[-half:]}"


def _clipped(text: str, most: int) -> str:
    """Return at most `most` characters of a text, with the number of the others."""
    # truncation would not make a text shorter that exceeds `most` by less than the remark
    if len(text) <= most + 30:
        return text
    return f"{text[:most]} ... ({len(text) - most:,} more)"


class _Short(reprlib.Repr):
    """`repr` of small values, and the beginning of the `repr` of large ones."""

    def __init__(self):
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 8
        self.maxstring = self.maxother = self.maxlong = VALUE
        self.maxlevel = 3

    def repr1(self, x: Any, level: int) -> str:
        """Return one value; an array as its type, dtype and shape."""
        # the `repr` of an array shows its entries, and of one on devices waits for it
        shape = getattr(x, "shape", None)
        if isinstance(shape, tuple) and hasattr(x, "dtype") and shape:
            return f"{type(x).__name__} {x.dtype}{list(shape)}"
        if not callable(x) or not hasattr(x, "__qualname__"):
            return super().repr1(x, level)
        if x.__name__ == "<lambda>":
            return "a lambda"
        return x.__qualname__.rpartition("<locals>.")[2]


def short_repr(value: Any) -> str:
    """Return a user's value as errors show it: at most one line.

    >>> short_repr("fdsp"), short_repr(list(range(100))), short_repr(len)
    ("'fdsp'", '[0, 1, 2, 3, 4, 5, 6, 7, ...]', 'len')
    """
    line = " ".join(_Short().repr(value).split("\n"))
    # without addresses, so that two runs have the same text
    return _clipped(re.sub(r" at 0x[0-9a-f]+", "", line), VALUE)


def check_integer(
    value: Any, name: str, least: int = 1, most: int | None = None, *, optional: bool = False
) -> None:
    """Raise `OptionError` unless `value` is an integer from `least` (to `most`), or None if it is
    optional.
    """
    if optional and value is None:
        return
    # Python's bool is an integer
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and not value <= most):
        fix = f"a whole number from {least}"
        if most is not None:
            fix += f" to {most}"
        raise OptionError(f"{option(name, short_repr(value))}.", fix=f"{fix}.")


def join_names(names: Iterable[str], most: int = 8) -> str:
    """Return names separated by commas; if there are many, the first and their number.

    >>> join_names(["a", "b"]), join_names(map(str, range(100)), most=3)
    ('a, b', '0, 1, 2, ... (100 in all)')
    """
    names = list(names)
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f", ... ({len(names)} in all)"
    return text


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message.

    >>> first_line(ValueError("boom"))
    'ValueError: boom'
    """
    # an exception may have no message
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}".rstrip(": ")


@contextlib.contextmanager
def raise_callback_errors(who: Callable[[], str]) -> Iterator[None]:
    """Raise exceptions of a user's callback or logger as a `CallbackError` that names it;
    `SpmdError`s pass unchanged.
    """
    try:
        yield
    except SpmdError:
        raise
    except Exception as error:
        raise CallbackError(
            f"{who()} raises {first_line(error)}",
            fix="correct the line at which its traceback, above, ends.",
        ) from error


@contextlib.contextmanager
def note_second_error(error: BaseException, failure: str) -> Iterator[None]:
    """While `error` is handled, add a further exception to it as a note instead of raising it."""
    try:
        yield
    except Exception as second:
        error.add_note(
            f"spmd: and {failure}: {type(second).__name__}: {getattr(second, 'message', second)}"
        )


def printable(text: str, most: int = 2000) -> str:
    r"""Return text of another process, safe for a terminal: control characters escaped, at most
    `most` characters.

    >>> printable("a\x1b[31mred\nline")
    'a\\x1b[31mred\\nline'
    """
    letters = [letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:most]]
    if len(text) > most:
        letters.append(f"… ({len(text) - most} more)")
    return "".join(letters)


def type_name(value: object) -> str:
    """Return the type of a value, with its article.

    >>> type_name(3), type_name("x"), type_name(None)
    ('an int', 'a str', 'None')
    """
    if value is None:
        return "None"
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return a name with its article.

    >>> with_article("Attention"), with_article("Remat")
    ('an Attention', 'a Remat')
    """
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return f"{article} {name}"


def closest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `word`, or None if none is similar.

    >>> closest("modle", ["data", "model"])
    'model'
    >>> closest("async", ["softsync", "asynchronous"])
    'asynchronous'
    """
    names = list(names)
    # an abbreviation, which `difflib` may find less similar than another name
    if len(word) > 2:
        longer = [name for name in names if name.startswith(word)]
        if len(longer) == 1:
            return longer[0]
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.6)), None)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return a fix for a misspelt name: the most similar one, or the list of all.

    >>> did_you_mean("modle", ["data", "model"])
    'did you mean "model"?'
    """
    names = list(names)
    nearest = closest(word, names)
    if nearest:
        return f'did you mean "{nearest}"?'
    return f"known: {', '.join(names) or 'none'}."


def import_extra(module: str, extra: str):
    """Import an optional module; when it is missing, name the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is not installed.", fix=f"{how_to_install(extra)}."
        ) from error


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, from a checkout: the package is not published
    under this name.

    >>> how_to_install("export")
    "in the checkout of spmd: pip install '.[export]'"
    """
    return f"in the checkout of spmd: {pip_install(extra)}"


def pip_install(extra: str) -> str:
    """Return the command alone, for a text that names the checkout."""
    return f"pip install '.[{extra}]'"


__getattr__ = moved(
    globals(), {"RoomError": "DeviceMemoryError", "AbsentError": "RendezvousTimeout"}
)
