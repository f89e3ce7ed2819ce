"""Put the programs in docstrings into fences, so that the site shows them as code."""

import re
import textwrap

import griffe

_EXAMPLE = re.compile(r"^(Example:\n)((?:[ ]+\S[^\n]*\n?|\n)+)", re.MULTILINE)
_PROMPT = re.compile(r"^(?:>>> [^\n]*\n?)(?:(?!\n)[^\n]+\n?)*", re.MULTILINE)
_TREE = re.compile(r"(?:^    \S[^\n]*\n?)(?:^    [^\n]*\n?)*", re.MULTILINE)


def as_shown(text: str) -> str:
    r"""Return a docstring with its programs in fences.

    >>> print(as_shown("Adds.\n\nExample:\n  >>> 1 + 1\n  2"))
    Adds.
    <BLANKLINE>
    Example:
      ```pycon
      >>> 1 + 1
      2
      ```
    <BLANKLINE>
    """

    def example(match):
        code = textwrap.dedent(match[2]).strip("\n")
        language = "pycon" if code.startswith(">>>") else "python"
        return match[1] + textwrap.indent(f"```{language}\n{code}\n```\n", "  ")

    fenced = _EXAMPLE.sub(example, text.replace("][", "]&#8203;["))  # no link
    return _PROMPT.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", fenced)


class Programs(griffe.Extension):
    """Applies `as_shown` to every docstring."""

    def on_instance(self, *, obj, **kwargs):
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = as_shown(obj.docstring.value)
