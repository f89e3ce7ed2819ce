"""Compiler options are tried on a trivial function, so that one that XLA refuses is reported before anything else is compiled."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from spmd.errors import LayoutError, Problem, first_line, raise_problems
from spmd.fields import as_toml
from spmd.layout.compiler import XLA_NAMES


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
            where = f"[compiler] {keys[name]}" if name in keys else f"[compiler.options] {name} = {as_toml(value)}"
            fix = "an option and a value that this jaxlib has (https://openxla.org/xla/flags_guidance), or leave it out."
            problems.append(Problem(where, [f"XLA refuses it: {why} (jaxlib {jaxlib.__version__})."], fix, kind="invalid_value"))
    together = Problem("[compiler]", [f"XLA refuses these options together: {_refusal(options, sharding)}."], "fewer of them.")
    raise_problems(LayoutError, f"{source} cannot be compiled with", problems or [together])


def _refusal(options: Mapping[str, Any], sharding: Any) -> str:
    """Why XLA does not compile with these options; "" if it does."""
    argument = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    try:
        jax.jit(jnp.negative).lower(argument).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        return first_line(error).rpartition("INVALID_ARGUMENT: ")[2].rstrip(".")
    return ""
