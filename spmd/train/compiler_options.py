"""Compiler options: each is tried on a trivial function, so that one that XLA refuses is reported
before anything else is compiled; and what to compile with instead, where XLA fails with some.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from spmd.base.fields import as_toml
from spmd.base.log_info import log_info
from spmd.errors import LayoutError, Problem, first_line, raise_problems
from spmd.layout.compiler import TRITON, UNROLLING, XLA_NAMES, Compiler

TRITON_ERROR = "Couldn't find output tile sizes"
BUFFERING, BUFFERING_ERROR = (
    XLA_NAMES["double_buffering"][0],
    "is not scheduled after its control predecessor",
)
# the end of a note on a program that was compiled again
AT_ONCE = "[compiler] double_buffering = false does so at once"
# Errors of XLA:GPU, and the option without which it compiles. Without autotuning, which needs a
# GPU, it may choose a product in Triton that it cannot tile. Two iterations of a loop as one, with
# a loop inside, may get a schedule that it then refuses (jaxlib 0.10.2).
RETRIES = ((TRITON_ERROR, TRITON, False), (BUFFERING_ERROR, BUFFERING, UNROLLING[False]))


def check_compiler_options(options: Mapping[str, Any], source: str, sharding: Any = None) -> None:
    """Compile a trivial function with these options, by XLA's names.

    Args:
      source: the layout, as errors name it.
      sharding: on the device to compile for; None: JAX's default device.

    Raises:
      LayoutError: XLA refuses some of them: every one, with its reason.

    Example:
      >>> check_compiler_options({"xla_cpu_enable_fast_math": True}, "mine.toml")
      >>> try:
      ...     check_compiler_options({"xla_cpu_enable_fast_maths": True}, "mine.toml")
      ... except LayoutError as error:
      ...     print(error.problems[0].where)
      [compiler.options] xla_cpu_enable_fast_maths = true
    """
    if not options or not _refusal(options, sharding):
        return
    keys = {name: key for key, names in XLA_NAMES.items() for name in names}
    problems = []
    for name, value in options.items():
        if why := _refusal({name: value}, sharding):
            where = (
                f"[compiler] {keys[name]}"
                if name in keys
                else f"[compiler.options] {name} = {as_toml(value)}"
            )
            fix = (
                "an option and a value that this jaxlib has "
                "(https://openxla.org/xla/flags_guidance), or leave it out."
            )
            problems.append(
                Problem(
                    where,
                    [f"XLA refuses it: {why} (jaxlib {jaxlib.__version__})."],
                    fix,
                    kind="invalid_value",
                )
            )
    together = Problem(
        "[compiler]",
        [f"XLA refuses these options together: {_refusal(options, sharding)}."],
        "fewer of them.",
    )
    raise_problems(LayoutError, f"{source} cannot be compiled with", problems or [together])


def _refusal(options: Mapping[str, Any], sharding: Any) -> str:
    """Why XLA does not compile with these options; "" if it does."""
    argument = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    try:
        jax.jit(jnp.negative).lower(argument).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        return first_line(error).rpartition("INVALID_ARGUMENT: ")[2].rstrip(".")
    return ""


def other_options(
    error: str, options: Mapping[str, Any], chosen: Collection[str]
) -> dict[str, Any]:
    """What to compile with instead, and why; empty where an error of XLA:GPU is about something
    else, or the option was chosen.

    Args:
      options: what it was compiled with, by XLA's names.
      chosen: the names of those that the layout sets; those in XLA_FLAGS are never changed.
    """
    for text, name, value in RETRIES:
        if (
            text in error
            and name not in os.environ.get("XLA_FLAGS", "")
            and name not in chosen
            and options.get(name) != value
        ):
            return {
                "options": {name: value},
                "retried": error.partition("\n")[0].partition(", metadata=")[0],
            }
    return {}


def check_buffering(error: str, compiler: Compiler, source: str) -> None:
    """Raise if XLA cannot schedule a step with the double buffering that its layout chose.

    Raises:
      LayoutError: names the option.
    """
    if BUFFERING_ERROR in error and BUFFERING in compiler.chosen:
        keyed = "double_buffering" in compiler.keys
        where = "[compiler] double_buffering = true" if keyed else f"[compiler.options] {BUFFERING}"
        line = (
            next(line for line in error.splitlines() if BUFFERING_ERROR in line)
            .rpartition("Error: ")[2]
            .strip()
        )
        why = f"XLA cannot schedule the program with two iterations of a loop as one: {line}."
        fix = (
            "double_buffering = false."
            if keyed
            else "leave it out, and [compiler] double_buffering = false."
        )
        raise_problems(
            LayoutError,
            f"{source} cannot be compiled",
            [Problem(where, [why], fix, kind="conflict")],
        )


def without_buffering(
    error: RuntimeError, options: Mapping[str, Any], compiler: Compiler, source: str
) -> dict[str, Any]:
    """The options with which to compile a program again that XLA cannot schedule with two
    iterations of a loop as one; logs that.

    Raises:
      LayoutError: the layout chose double buffering.
      RuntimeError: the error, if it is about something else, or XLA_FLAGS set the option.
    """
    check_buffering(str(error), compiler, source)
    retry = other_options(str(error), options, compiler.chosen)
    if BUFFERING not in retry.get("options", {}):
        raise error
    log_info(
        f"note: compiled again without double buffering, because XLA failed: {retry['retried']}; "
        f"{AT_ONCE}."
    )
    return {**options, **retry["options"]}
