"""Three ways to train one model: model parallelism gives the synchronous losses; asynchronous
training has stale gradients.
"""

import re

import numpy as np
import pytest

from examples import async_sync_split

pytestmark = pytest.mark.system


def test_the_three_ways(capsys):
    runs = async_sync_split.main(["--epochs", "2", "--rows", "512", "--width", "32"])
    shown = capsys.readouterr().out
    history = {name: run.result.history for name, run in runs.items()}
    together, late, split = (history[name] for name in ("synchronous", "asynchronous", "split"))
    # the same rows in the same order; sums are taken in another order
    np.testing.assert_allclose(split["loss"], together["loss"], rtol=1e-4)
    np.testing.assert_allclose(split["eval_loss"], together["eval_loss"], rtol=1e-4)
    # every gradient of 8 rows is an update, applied to weights that have changed since
    assert (
        sum(together["updates"]) == 16
        and sum(late["updates"]) == 8 * 16
        and max(late["staleness"]) > 4
    )
    assert np.abs(late["eval_loss"][-1] - together["eval_loss"][-1]) > 1e-3
    assert late["simulated_seconds"][-1] < together["simulated_seconds"][-1]
    assert min(one_history["eval_accuracy"][-1] for one_history in history.values()) > 0.5
    assert (
        runs["split"].result.trainer.schedules and not runs["synchronous"].result.trainer.schedules
    )
    lines = shown.splitlines()
    assert lines[0].split()[-2:] == ["loss", "accuracy"] and [
        line.split()[0] for line in lines[1:]
    ] == list(runs)
    assert len({re.split(r"\s+", line)[1] for line in lines[1:]}) == 1, "all saw as many examples"
    assert all(run.steps_per_second > 0 for run in runs.values())
