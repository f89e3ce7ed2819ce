"""Generate numbers in words and in digits: data for gnmt.py that needs no download."""

from typing import Any

import jax
import numpy as np

TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
ONES = [*"one two three four five six seven eight nine".split(), *TEENS]
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
WORDS = ["", *ONES, *TENS, "hundred", "thousand", "and"]
END, BEGIN, ZERO = range(3)  # codes of digits: digit d is ZERO + d; END also pads
# steps of time for words and digits, and sizes of their vocabularies, rounded up
SOURCE, TARGET, VOCAB = 12, 8, (32, 16)


def in_words(number: int) -> list[str]:
    """A number from 1.

    >>> " ".join(in_words(1205))
    'one thousand two hundred and five'
    """
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            return [
                *in_words(number // size),
                name,
                *(["and"] if 0 < rest < 100 else []),
                *in_words(rest),
            ]
    if number >= 20:
        return [TENS[number // 10 - 2], *in_words(number % 10)]
    return [ONES[number - 1]] if number else []


def as_number(codes: np.ndarray) -> str:
    """The digits among these codes."""
    return "".join(str(code - ZERO) for code in codes if code >= ZERO)


def load_data(examples: int = 20_000) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers below a million of all lengths, each once; a twentieth is for testing."""
    rng = np.random.default_rng(0)
    numbers = rng.permutation(np.unique((10 ** rng.uniform(0, 6, examples)).astype(int)))
    source, digits = (
        np.zeros((len(numbers), SOURCE), np.int32),
        np.full((len(numbers), TARGET + 1), END, np.int32),
    )
    for row, number in enumerate(numbers.tolist()):
        words = [WORDS.index(word) for word in in_words(number)]
        codes = [BEGIN, *(int(digit) + ZERO for digit in str(number))]
        source[row, : len(words)], digits[row, : len(codes)] = words, codes
    lengths, begun = (source > 0).sum(axis=1, dtype=np.int32), digits[:, :-1]
    data, split = (
        {
            "inputs": {"source": source, "lengths": lengths, "begun": begun},
            "targets": digits[:, 1:],
        },
        len(numbers) // 20,
    )
    return jax.tree.map(lambda x: x[split:], data), jax.tree.map(lambda x: x[:split], data)
