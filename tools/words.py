"""List the words of `words.toml` wherever they still stand: in names, docs, docstrings, comments, errors and help.

    python tools/words.py [PATH ...]

Exit status 1 if there are any. Without paths: the whole repository, except what quotes other people's words (`SKIPPED`).
"""

import argparse
import dataclasses
import io
import keyword
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READ = (".py", ".md", ".toml", ".ipynb", ".yml", ".yaml", ".css", ".txt", ".sh", "Makefile")
SKIPPED = ("tools/words.toml", "docs/renamed.md", "docs/glossary.md")  # they hold the old words beside the new ones


@dataclasses.dataclass(frozen=True)
class Word:
    """One retired word or phrase: where it is found, and what to write instead."""

    pattern: re.Pattern[str]
    allowed: re.Pattern[str] | None
    say: str

    def in_text(self, text: str) -> Iterator[int]:
        """Offsets in prose; what is allowed does not count."""
        spared = [match.span() for match in self.allowed.finditer(text)] if self.allowed else []
        for match in self.pattern.finditer(text):
            if not any(start <= match.start() and match.end() <= end for start, end in spared):
                yield match.start()

    def in_name(self, name: str) -> bool:
        """Whether the parts of an identifier, read as words, contain it."""
        return any(True for _ in self.in_text(" ".join(parts(name))))


def parts(name: str) -> list[str]:
    """The words of an identifier.

    >>> parts("cut_rows"), parts("ShardLayout")
    (['cut', 'rows'], ['Shard', 'Layout'])
    """
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)


def words(path: Path) -> list[Word]:
    """The list, compiled."""
    compiled = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["word"]:
        allowed = "|".join(entry.get("allow", ()))
        spaced = entry["pattern"].replace(" ", r"\s+")
        compiled.append(
            Word(
                re.compile(rf"(?<![\w-])(?:{spaced})(?![\w-])", re.IGNORECASE),
                re.compile(rf"\b(?:{allowed})\b".replace(" ", r"\s+"), re.IGNORECASE) if allowed else None,
                entry["say"],
            )
        )
    return compiled


def in_python(text: str, known: list[Word]) -> Iterator[tuple[int, str, Word]]:
    """(line, what is written there, word) for names, strings and comments."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            yield from ((line, token.string, word) for word in known if word.in_name(token.string))
        elif token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield from in_prose(token.string, known, line)


def in_prose(text: str, known: list[Word], line: int = 1) -> Iterator[tuple[int, str, Word]]:
    """(line, the line's text, word) in text; identifiers in it count by their parts."""
    for word in known:
        for at in word.in_text(re.sub(r"_(?=[a-z])", " ", text)):
            row = text.count("\n", 0, at)
            yield line + row, text.splitlines()[row].strip(), word


def main() -> int:
    """Print what is found; 1 if there is anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--count", action="store_true", help="numbers by file only")
    options = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", *options.paths], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known, total = words(ROOT / "tools" / "words.toml"), 0
    for name in listed:
        path = ROOT / name
        if name in SKIPPED or not name.endswith(READ) or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        found = sorted((in_python if name.endswith(".py") else in_prose)(text, known), key=lambda entry: entry[0])
        total += len(found)
        if options.count:
            print(f"{len(found):5} {name}") if found else None
            continue
        for line, shown, word in found:
            print(f"{name}:{line}: {shown[:100]!r}: write {word.say}")
    print(f"{total} retired words" if total else "no retired word")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
