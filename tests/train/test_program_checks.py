"""The lists of checks of a program."""

import inspect

from spmd.train import program_checks


def test_every_check_of_a_program_is_in_one_list():
    lists = ("BATCH_CHECKS", "LOSS_CHECKS", "OUTPUT_CHECKS", "STEP_CHECKS")
    listed = [check for name in lists for check in getattr(program_checks, name)]
    defined = {
        function
        for name, function in inspect.getmembers(program_checks, inspect.isfunction)
        if name.startswith("check_") and function.__module__ == program_checks.__name__
    }
    assert len(listed) == len(set(listed))
    # what `trainer.wire` asks, and no program needs
    assert defined - set(listed) == {program_checks.check_collectives_known}
