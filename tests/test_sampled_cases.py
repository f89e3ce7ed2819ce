"""Tests that are sampled have the cases that their marks promise."""

import pytest

from tests.sampling import sample


class Case:
    def __init__(self, nodeid, marks):
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, name):
        self.marks.append(getattr(pytest.mark, name).mark)


def kind(item):
    return next((name for name in ("slow", "system") if item.get_closest_marker(name)), "quick")


def test_sampled_tests_have_quick_and_system_cases(collected):
    """Of the files of this run, which are all files in `make test`."""
    promised, found = set(), set()
    for item in collected:
        if sampled := item.get_closest_marker("sampled"):
            function = item.nodeid.partition("[")[0]
            promised |= {(function, name) for name in sampled.kwargs}
            found.add((function, kind(item)))
    assert sorted(promised - found) == []


def test_cases_with_a_mark_take_no_place_of_a_quick_one():
    def kinds(*marks, **numbers):
        cases = [Case("test_it[]", [pytest.mark.sampled(**numbers).mark, *each]) for each in marks]
        sample(cases)
        return [kind(case) for case in cases]

    plain, system, slow = (), (pytest.mark.system.mark,), (pytest.mark.slow.mark,)
    assert kinds(plain, plain, plain, plain, quick=3, system=2) == [
        "quick",
        "system",
        "slow",
        "quick",
    ]
    assert kinds(system, slow, plain, plain, system, plain, quick=2) == [
        "system",
        "slow",
        "quick",
        "system",
        "system",
        "quick",
    ]
    assert kinds(plain, slow, plain, plain, system=2) == ["system", "slow", "slow", "system"]
