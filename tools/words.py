"""List the retired words of `words.toml` in names, docs, docstrings, comments, errors and help.

    python tools/words.py [PATH ...]

Exit status 1 if there are any. Without paths it reads every file of the repository except
`SKIPPED`.
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
SKIPPED = (
    "tools/words.toml",
    "docs/renamed.md",
    "docs/glossary.md",
    "tests/base/test_deprecated.py",
)  # they show the old words beside the new ones
# begins the comment of a line of Python that keeps a retired word, with the reason
KEPT = "# words: "


@dataclasses.dataclass(frozen=True)
class Word:
    """One retired word or phrase: how to find it, and what to write instead."""

    pattern: re.Pattern[str]
    allowed: re.Pattern[str] | None
    say: str

    def in_text(self, text: str) -> Iterator[int]:
        """Offsets in prose, without those inside an allowed phrase."""
        allowed_spans = (
            [match.span() for match in self.allowed.finditer(text)] if self.allowed else []
        )
        for match in self.pattern.finditer(text):
            if not any(
                start <= match.start() and match.end() <= end for start, end in allowed_spans
            ):
                yield match.start()

    def in_name(self, name: str) -> bool:
        """Whether the parts of an identifier, read as words, contain it."""
        return any(True for _ in self.in_text(" ".join(parts(name))))


def parts(name: str) -> list[str]:
    """The words of an identifier.

    >>> parts("gather_rows"), parts("ShardLayout")
    (['gather', 'rows'], ['Shard', 'Layout'])
    """
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)


def words(path: Path) -> list[Word]:
    """Read and compile the list."""
    compiled = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["word"]:
        allowed = "|".join(entry.get("allow", ()))
        spaced = entry["pattern"].replace(" ", r"\s+")
        compiled.append(
            Word(
                re.compile(rf"(?<![\w-])(?:{spaced})(?![\w-])", re.IGNORECASE),
                re.compile(rf"\b(?:{allowed})\b".replace(" ", r"\s+"), re.IGNORECASE)
                if allowed
                else None,
                entry["say"],
            )
        )
    return compiled


def in_python(text: str, known: list[Word]) -> Iterator[tuple[int, str, Word]]:
    """(line, what is written there, word) for names, strings and comments; lines with a comment `#
    words: ...` say why they keep one.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    kept = {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and token.string.startswith(KEPT)
    }
    for token in tokens:
        line = token.start[0]
        if line in kept:
            continue
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            yield from ((line, token.string, word) for word in known if word.in_name(token.string))
        elif token.type in (
            tokenize.STRING,
            tokenize.COMMENT,
            getattr(tokenize, "FSTRING_MIDDLE", -1),
        ):
            yield from in_prose(token.string, known, line)


def in_prose(text: str, known: list[Word], line: int = 1) -> Iterator[tuple[int, str, Word]]:
    """(line, its text, word) for each hit in prose; identifiers in it are matched by their
    parts.
    """
    for word in known:
        for at in word.in_text(re.sub(r"_(?=[a-z])", " ", text)):
            row = text.count("\n", 0, at)
            yield line + row, text.splitlines()[row].strip(), word


def main() -> int:
    """Print all hits; return 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*")
    parser.add_argument(
        "--count", action="store_true", help="print only the number of hits per file"
    )
    options = parser.parse_args()
    listed = subprocess.run(
        ["git", "ls-files", *options.paths], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    known, total = words(ROOT / "tools" / "words.toml"), 0
    for name in listed:
        path = ROOT / name
        if name in SKIPPED or not name.endswith(READ) or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        hits = sorted(
            (in_python if name.endswith(".py") else in_prose)(text, known), key=lambda hit: hit[0]
        )
        total += len(hits)
        if options.count and hits:
            print(f"{len(hits):5} {name}")
        for line, shown, word in hits if not options.count else ():
            print(f"{name}:{line}: {shown[:100]!r}: write {word.say}")
    print(f"{total} retired words" if total else "no retired word")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
