"""Old names: they work, and warn with the new one."""

import pytest

import spmd
from spmd.launch.cli import main
from spmd.planner.planning import Plan


@pytest.mark.parametrize(
    ("old", "new"), [("RoomError", "DeviceMemoryError"), ("AbsentError", "RendezvousTimeout")]
)
def test_old_name_of_error_is_the_new_class(old, new):
    with pytest.warns(FutureWarning, match=f"spmd.errors.{old} is now {new}"):
        assert getattr(spmd.errors, old) is getattr(spmd.errors, new)


def test_unknown_name_of_error_is_no_old_one():
    with pytest.raises(AttributeError, match="no attribute 'RoomErrors'"):
        _ = spmd.errors.RoomErrors


def test_old_name_of_plan_fixes_warns(monkeypatch):
    monkeypatch.setattr(Plan, "fixes", lambda self, **options: (options,))
    with pytest.warns(FutureWarning, match=r"Plan.cures is now Plan.fixes"):
        assert Plan.cures(object.__new__(Plan), timeout=3.0) == ({"timeout": 3.0},)


def test_old_name_of_option_fixes_warns(capsys):
    with pytest.warns(FutureWarning, match="--cures is now --fixes"):
        assert main(["plan", "absent.py", "--target", "8xh100", "--cures", "--json"]) != 0
    assert "--fixes adds to the report" in capsys.readouterr().err
