"""The order of the tests here: the first case of each, then the second of each, so that a run that
is cut off has tried them all.
"""

import collections
from pathlib import Path

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    cases = collections.Counter()

    def case_number(item):
        if item.path.parent != HERE:
            return 0
        test = (item.path, getattr(item, "originalname", item.name))
        cases[test] += 1
        return cases[test]

    numbers = [case_number(item) for item in items]
    items[:] = [items[index] for index in sorted(range(len(items)), key=numbers.__getitem__)]
