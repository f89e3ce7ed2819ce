"""Compiler options: each is tried on a trivial function, so that one that XLA refuses is reported
before anything else is compiled; and other options for programs on which XLA fails.
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
BUFFERING = XLA_NAMES["double_buffering"][0]
BUFFERING_ERROR = "is not scheduled after its control predecessor"
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
    fix = (
        "an option and a value that this jaxlib has "
        "(https://openxla.org/xla/flags_guidance), or leave it out."
    )
    for name, value in options.items():
        refusal = _refusal({name: value}, sharding)
        if refusal:
            where = f"[compiler.options] {name} = {as_toml(value)}"
            if name in keys:
                where = f"[compiler] {keys[name]}"
            why = f"XLA refuses it: {refusal} (jaxlib {jaxlib.__version__})."
            problems.append(Problem(where, [why], fix, kind="invalid_value"))
    if not problems:
        why = f"XLA refuses these options together: {_refusal(options, sharding)}."
        problems.append(Problem("[compiler]", [why], "fewer of them."))
    raise_problems(LayoutError, f"{source} cannot be compiled with", problems)


def _refusal(options: Mapping[str, Any], sharding: Any) -> str:
    """Return why XLA does not compile with these options; "" if it does."""
    argument = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    try:
        jax.jit(jnp.negative).lower(argument).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        return first_line(error).rpartition("INVALID_ARGUMENT: ")[2].rstrip(".")
    return ""


def other_options(
    error: str, options: Mapping[str, Any], chosen: Collection[str]
) -> dict[str, Any]:
    """Return `options` to compile with instead and the error as `retried`; empty where an error of
    XLA:GPU is about something else, or the option was chosen.

    Args:
      error: the text of an error of XLA.
      options: the options of the program that failed, by XLA's names.
      chosen: the names of options that the layout sets; options in XLA_FLAGS are never changed.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for text, name, value in RETRIES:
        is_chosen = name in flags or name in chosen
        if text in error and not is_chosen and options.get(name) != value:
            retried = error.partition("\n")[0].partition(", metadata=")[0]
            return {"options": {name: value}, "retried": retried}
    return {}


def check_buffering(error: str, compiler: Compiler, source: str) -> None:
    """Raise if XLA cannot schedule a step with the double buffering that its layout chose.

    Raises:
      LayoutError: names the option.
    """
    if BUFFERING_ERROR not in error or BUFFERING not in compiler.chosen:
        return
    lines = [line for line in error.splitlines() if BUFFERING_ERROR in line]
    text = lines[0].rpartition("Error: ")[2].strip()
    why = f"XLA cannot schedule the program with two iterations of a loop as one: {text}."
    where = f"[compiler.options] {BUFFERING}"
    fix = "leave it out, and [compiler] double_buffering = false."
    if "double_buffering" in compiler.keys:
        where = "[compiler] double_buffering = true"
        fix = "double_buffering = false."
    problem = Problem(where, [why], fix, kind="conflict")
    raise_problems(LayoutError, f"{source} cannot be compiled", [problem])


def without_buffering(
    error: RuntimeError, options: Mapping[str, Any], compiler: Compiler, source: str
) -> dict[str, Any]:
    """Return the options with which to compile a program again that XLA cannot schedule with two
    iterations of a loop as one, and log that.

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
