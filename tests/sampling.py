"""Which cases of a sampled test run when."""


def sample(items) -> None:
    """Of the cases of a `sampled(quick=n, system=m)` test every n-th is quick, every m-th of the
    others is `system`, and the rest slow.

    A case that is marked `system` itself is never quick, and one that is marked `slow` is in no
    sample. Where cases are a product, a number that shares no factor with the sizes of its parts
    gives a sample that has every value.
    """
    counts: dict[str, list[int]] = {}
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) and not item.get_closest_marker("slow"):
            # of cases that may be quick, and of those that are not
            count = counts.setdefault(item.nodeid.partition("[")[0], [0, 0])
            quick, may_be_quick = sampled.kwargs.get("quick"), not item.get_closest_marker("system")
            if quick is None or not may_be_quick or count[0] % quick:
                is_system = count[1] % sampled.kwargs.get("system", 1) == 0
                item.add_marker("system" if is_system else "slow")
                count[1] += 1
            count[0] += may_be_quick
