"""The best three of a random search answer better together than the best of them alone."""

import pytest

from examples import random_search

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    "split", [2, *(pytest.param(split, marks=pytest.mark.slow) for split in (0, 1, 3))]
)
def test_the_best_three_are_better_together(split, capsys):
    sweep, judged = random_search.main(trials=16, epochs=20, split=split)
    assert sweep.programs == 2 and len(sweep.trials) == 16 and len(judged.members) == 3
    assert judged.ensemble["log loss"] < min(
        member["log loss"] for member in judged.members.values()
    )
    scores = [tried.score for tried in sweep.best]
    assert scores == sorted(scores) and scores[0] == min(tried.score for tried in sweep.trials)
    assert capsys.readouterr().out.count("\n") == 17 + 1 + 5 + 2
