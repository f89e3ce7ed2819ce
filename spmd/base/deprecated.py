"""Names that have changed: an old one still works for one release, with a warning that names the
new one.
"""

import warnings
from typing import Any


def warn(old: str, new: str) -> None:
    """Warn at the line that used the old name: the caller of this function's caller.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("Plan.cures", "Plan.fixes")
    >>> str(caught[0].message)
    'spmd: Plan.cures is now Plan.fixes; the old name will be removed in the next release.'
    """
    warnings.warn(
        f"spmd: {old} is now {new}; the old name will be removed in the next release.",
        # By default Python hides a DeprecationWarning outside of __main__.
        FutureWarning,
        stacklevel=3,
    )


def moved(module: dict[str, Any], names: dict[str, str]) -> Any:
    """A module's `__getattr__` for old names of what it holds: `__getattr__ = moved(globals(),
    {"Old": "New"})`.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        warn(f"{module['__name__']}.{name}", names[name])
        return module[names[name]]

    return find
