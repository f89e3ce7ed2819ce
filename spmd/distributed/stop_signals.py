"""Signals that stop a run as SIGTERM does. Without JAX, so that launchers start at once."""

import os
import signal

from spmd.errors import OptionError

VARIABLE = "SPMD_STOP_SIGNALS"
CHOICES = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}


def chosen_stop_signals() -> list[signal.Signals]:
    """The signals of $SPMD_STOP_SIGNALS, such as "USR1" or "USR1,USR2", with which a scheduler asks
    a run to save and exit.

    Raises:
      OptionError: another name is among them.
    """
    names = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    if unknown := [name for name in names if name not in CHOICES]:
        why = (
            f'{VARIABLE}={os.environ[VARIABLE]}: "{unknown[0]}" cannot be chosen; TERM and HUP '
            "stop a run without it."
        )
        raise OptionError(why, fix=f"{VARIABLE}=USR1, {VARIABLE}=USR2, or {VARIABLE}=USR1,USR2.")
    return [CHOICES[name] for name in names]
