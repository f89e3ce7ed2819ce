"""Hide keys, tokens and passwords in commands and texts that are shown or recorded."""

import re
from collections.abc import Sequence

HIDDEN = "***"
_ANYWHERE = "secret|passw|passphrase|credential"
# "key" and "token" end the names of secrets. In the middle of a name, or as "tokens", they are
# about something else: num_key_value_heads, max-tokens, tokenizer, key-size.
_NAME = re.compile(rf"[\w.+-]*(?:(?:{_ANYWHERE})[\w.+-]*|key|token)", re.IGNORECASE)
# Inside of JSON, of code, and of the query of a URL. Prose has a colon after a name: "no key: 3";
# there only names in one word do, which are those of settings: "api_key: 3".
# The bound on the rest of the name keeps the time linear in the text.
_IN_PROSE = "(?:api|access|auth|private|secret)[_-]?(?:key|token)"
_INNER = re.compile(
    rf"""((?:(?:{_ANYWHERE})[\w.+-]{{0,99}}|key|token)(?:["']\s*:|["']?\s*=)\s*"""
    rf"""|{_IN_PROSE}:[ \t]*)"""
    r"""("[^"]*"|'[^']*'|[^\s"',&}]+)""",
    re.IGNORECASE,
)
# The last "@" before the path ends the password. One with a raw "/" is no valid URL, but is used.
_PASSWORD = re.compile(r"""://(?:[^\s/?#"']+|[^\s/:@"']*:[^\s@"']+)@""")


def redact_text(text: str) -> str:
    """Return a text without the passwords of its URLs, and without values whose names say that
    they are secret.

    >>> redact_text("no answer from https://ann:pa55@host/api?token=abc&page=2")
    'no answer from https://***@host/api?token=***&page=2'
    """
    return _INNER.sub(rf"\g<1>{HIDDEN}", _PASSWORD.sub(f"://{HIDDEN}@", text))


def redact_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command, with the values of secret options hidden, by the names of
    the options. An option of one letter is shown with its value.

    >>> redact_command(["train.py", "--api-key", "abc", "--lr=0.1", "hub.token=abc"])
    ['train.py', '--api-key', '***', '--lr=0.1', 'hub.token=***']
    """
    shown = []
    is_value = False  # of a secret option, which was the word before
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = _NAME.fullmatch(name) is not None
        if is_value and not word.startswith("-"):
            shown.append(HIDDEN)
        elif is_secret and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redact_text(word))
        is_value = is_secret and not equals and word.startswith("-")
    return shown
