"""Put the programs in docstrings into fences, so that the site shows them as code."""

import re
import textwrap

import griffe

_EXAMPLE = re.compile(r"^(Example:\n)((?:[ ]+\S[^\n]*\n?|\n)+)", re.MULTILINE)
_PROMPT = re.compile(r"^(?:>>> [^\n]*\n?)(?:(?!\n)[^\n]+\n?)*", re.MULTILINE)
_CODE = re.compile(r"(```.*?```|`[^`]*`)", re.DOTALL)


def as_shown(text: str) -> str:
    r"""Return a docstring with its programs in fences.

    >>> as_shown("Adds.\n\nExample:\n  >>> 1 + 1\n  2")
    'Adds.\n\nExample:\n  ```pycon\n  >>> 1 + 1\n  2\n  ```\n'
    >>> as_shown("Of rows [n][m], as in `x[0][1]`.")
    'Of rows [n]&#8203;[m], as in `x[0][1]`.'
    """

    def example(match):
        code = textwrap.dedent(match[2]).strip("\n")
        language = "pycon" if code.startswith(">>>") else "python"
        return match[1] + textwrap.indent(f"```{language}\n{code}\n```\n", "  ")

    fenced = _PROMPT.sub(
        lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", _EXAMPLE.sub(example, text)
    )
    parts = _CODE.split(fenced)
    parts[::2] = [prose.replace("][", "]&#8203;[") for prose in parts[::2]]  # not a link
    return "".join(parts)


class Programs(griffe.Extension):
    """Applies `as_shown` to every docstring."""

    def on_instance(self, *, obj, **kwargs):
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = as_shown(obj.docstring.value)
