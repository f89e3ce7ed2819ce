"""Which processes are slower than the others, with a clock of our own."""

from spmd.distributed import stragglers


def test_comparison_names_who_waits_for_data(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stragglers.time, "monotonic", lambda: now[0])
    comparison = stragglers.Comparison()
    assert not comparison.due() and list(comparison.lines({0: {"waited": 0.0}, 1: {"waited": 5.0}})) == []
    now[0] += 31
    assert comparison.due()
    (line,) = comparison.lines({0: {"waited": 0.5}, 1: {"waited": 20.5}})
    assert line == "process 1 waits for data 50% of the time, others do not: all are as slow as it is" and not comparison.due()
