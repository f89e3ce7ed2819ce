"""Run a script up to its first call of `spmd.fit`, in whose place something else is done."""

import contextlib
import inspect
import os
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from spmd.errors import OptionError, SpmdError, options_of_command

T = TypeVar("T")


class _FitCalled(BaseException):
    """Ends a script at its call of `fit`, or at a custom loop; a BaseException, so that the
    script's error handlers do not catch it.
    """


def call_at_fit(
    script: str,
    arguments: list[str],
    call: Callable[[Callable[..., Any], dict[str, Any]], T],
    *,
    to: str = "plan",
) -> T:
    """Return the result of `call(fit, arguments)`, at a script's first call of `spmd.fit`: the real
    one, and its arguments by name.

    The script ends there. Its output goes to standard error.

    Args:
      to: what `call` does, as a verb for errors.

    Raises:
      OptionError: there is no such script, it fails, it ends before such a call, or it trains in a
        loop instead.
    """
    from spmd import api
    from spmd.trainer import Trainer

    path = Path(script)
    if path.is_dir():
        raise OptionError(f'"{script}" is a folder.', fix="a Python script that calls spmd.fit.")
    if not path.is_file():
        raise OptionError(
            f'there is no file "{script}".', fix="a Python script that calls spmd.fit."
        )
    public = sys.modules["spmd"]
    real = api.fit
    argv = sys.argv
    paths = sys.path[:]
    folder = Path.cwd()
    steps = contextlib.ExitStack()
    outcome: list[Callable[[], T]] = []
    fix = "a script that calls spmd.fit."
    if to == "plan":
        fix = "call spmd.plan(...) from Python, for a custom training loop."

    def fit(*args: Any, **options: Any) -> Any:
        try:
            fit_arguments = dict(inspect.signature(real).bind(*args, **options).arguments)
        except TypeError as error:
            raise OptionError(
                f"{script} calls spmd.fit with invalid arguments: {error}.",
                fix="correct that call.",
            ) from error
        # The real `fit` may need what was replaced.
        steps.close()
        try:
            result = call(real, fit_arguments)
        except BaseException as error:  # which the script's error handlers must not catch either
            outcome.append(_raising(error))
        else:
            outcome.append(lambda: result)
        raise _FitCalled

    def refuse(name: str) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            del args, options
            why = (
                f"{script} calls Trainer.{name}, in a custom training loop, before it called "
                f"spmd.fit, so there is nothing to {to}."
            )
            outcome.append(_raising(OptionError(why, fix=fix)))
            raise _FitCalled

        return step

    for name in ("step", "steps"):
        steps.callback(setattr, Trainer, name, getattr(Trainer, name))
        setattr(Trainer, name, refuse(name))
    # the script's own arguments are not options of the command
    steps.enter_context(options_of_command(()))
    sys.argv = [script, *arguments]
    sys.path = [str(path.resolve().parent), *paths]
    # `spmd` keeps a public name once it was used, so both modules have the function.
    api.fit = public.fit = fit  # type: ignore[attr-defined]
    try:
        # the command's own output goes to stdout, which another program may read
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(script, run_name="__main__")
    except _FitCalled:
        pass
    except SpmdError:
        raise
    except (Exception, SystemExit) as error:
        # After the call of `fit` the script's code does not matter.
        if not outcome:
            why = f"fails, {type(error).__name__}: {error},"
            if isinstance(error, SystemExit):
                why = f"ended ({error.code})"
            raise OptionError(
                f"{script} {why} before it called spmd.fit.",
                fix=f"python {shlex.quote(script)} shows where.",
            ) from error
    finally:
        sys.argv, sys.path = argv, paths
        os.chdir(folder)
        steps.close()
        api.fit = public.fit = real  # type: ignore[attr-defined]
    if not outcome:
        raise OptionError(f"{script} never called spmd.fit, so there is nothing to {to}.", fix=fix)
    return outcome[0]()


def _raising(error: BaseException) -> Callable[[], Any]:
    def again() -> Any:
        raise error

    return again
