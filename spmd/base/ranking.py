"""The order of scores: of checkpoints, of checks of early stopping, and of the trials of a
sweep.
"""

import math
from collections.abc import Mapping


def rank(score: float, mode: str) -> tuple[bool, float]:
    """Return a key that sorts scores from best to worst; scores that are not finite are the worst.

    >>> sorted([1.0, float("nan"), 5.0, float("inf"), 2.0], key=lambda score: rank(score, "max"))
    [5.0, 2.0, 1.0, nan, inf]
    """
    if not math.isfinite(score):
        return True, 0.0
    if mode != "min":
        score = -score
    return False, score


def best(scores: Mapping[int, float], count: int, mode: str) -> list[int]:
    """Return the numbers with the best scores, such as steps or trials, in the order of their
    scores; of equals the smallest number.

    >>> best({10: 1.0, 20: 5.0, 30: float("nan"), 40: 5.0}, 2, "max")
    [20, 40]
    """
    return sorted(scores, key=lambda number: (*rank(scores[number], mode), number))[:count]
