"""The pages of the documentation, and the blocks of code in them."""

import contextlib
import dataclasses
import doctest
import io
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
_FENCE = re.compile(r"([ ]*)(`{3,}|~{3,})\s*([\w+-]*)[ \t]*(.*)")


@dataclasses.dataclass(frozen=True)
class Block:
    """Code of a page: `line` is the number of its first line, from 1; `note` the text after the
    language on the fence.
    """

    page: str
    line: int
    language: str
    note: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """All code of a page in order: in fences, indented, or in a hidden comment (`<!-- python`)."""
    return blocks_of(PAGES[page].read_text(encoding="utf-8"), page)


def blocks_of(text: str, page: str = "a page") -> list[Block]:
    """The same of a text."""
    lines, blocks, at = text.splitlines(), [], 0
    while at < len(lines):
        fence, begin = _FENCE.fullmatch(lines[at]), at + 1
        if fence:
            language, note = fence[3], fence[4].strip()
        elif lines[at] == "<!-- python":
            language, note = "python", "hidden"
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            begin, language, note = at, "", "indented"
        else:
            at += 1
            continue
        end = begin
        while end < len(lines) and not _closes(lines[end], note, fence[2] if fence else ""):
            end += 1
        if end == len(lines) and note != "indented":
            raise ValueError(f"{page}:{at + 1}: a block that does not end")
        blocks.append(
            Block(
                page,
                begin + 1,
                language,
                note,
                textwrap.dedent("\n".join(lines[begin:end])).rstrip(),
            )
        )
        at = end + (note != "indented")
    return blocks


def _closes(line: str, note: str, mark: str) -> bool:
    """Whether a block of this kind ends before this line; a fence does with at least as many of its
    marks.
    """
    if mark:
        return line.strip().startswith(mark) and not line.strip().strip(mark[0])
    return (
        bool(line.strip()) and not line.startswith("    ") if note == "indented" else line == "-->"
    )


def prose(page: str) -> str:
    """A page without its blocks and comments, line by line."""
    text = re.sub(
        r"^([ ]*)(`{3,})[^\n]*\n.*?^\1\2[ ]*$",
        "",
        PAGES[page].read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


@contextlib.contextmanager
def printing(printed: Callable[[str], None]):
    """Call `printed` with what is printed to standard output inside."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        yield
    printed(written.getvalue())


def is_shown(output: str, shown: str) -> bool:
    """Whether a page shows an output: `...` stands for anything, as in doctest, and spaces at the
    ends of lines do not count.
    """
    actual, expected = (
        "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
        for text in (output, shown)
    )
    return doctest.OutputChecker().check_output(expected, actual, doctest.ELLIPSIS)


def with_outputs(text: str, outputs: dict[int, str]) -> str:
    """A page whose blocks of code that begin at these lines are followed by these outputs; those
    that the page shows as `...` allows stay.

    >>> with_outputs("```python\\nprint(1)\\n```\\nText.\\n", {2: "1\\n"})
    '```python\\nprint(1)\\n```\\n\\n```output\\n1\\n```\\nText.\\n'
    """
    lines, known = text.splitlines(), blocks_of(text)
    for index in reversed(range(len(known))):
        block, following = known[index], known[index + 1] if index + 1 < len(known) else None
        if block.line not in outputs:
            continue
        output = [
            "```output",
            *(line.rstrip() for line in outputs[block.line].strip("\n").splitlines()),
            "```",
        ]
        if following and following.language == "output":
            if not is_shown(outputs[block.line], following.text):
                lines[following.line - 2 : _closed(lines, following.line - 1)] = output
        else:
            end = _closed(lines, block.line - 1)
            lines[end:end] = ["", *output]
    return "\n".join(lines) + "\n"


def _closed(lines: list[str], at: int) -> int:
    """The number of lines up to the end of a block that has begun, with its last line."""
    while lines[at] not in ("```", "-->"):
        at += 1
    return at + 1
