"""Which processes are slower than the others, with a fake clock."""

from spmd.distributed import stragglers


def test_process_that_waits_for_data_is_reported(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stragglers.time, "monotonic", lambda: now[0])
    monitor = stragglers.StragglerMonitor()
    assert (
        not monitor.due() and list(monitor.warnings({0: {"waited": 0.0}, 1: {"waited": 5.0}})) == []
    )
    now[0] += 31
    assert monitor.due()
    (line,) = monitor.warnings({0: {"waited": 0.5}, 1: {"waited": 20.5}})
    assert (
        line == "process 1 waits for data 50% of the time and slows down the others, which do not"
        and not monitor.due()
    )
