"""Functions that are compiled for the devices of a placed model at their first call, or loaded from
the compilation cache; and a step as StableHLO for a platform that need not be present.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export

from spmd.base.xla import compiled_count
from spmd.layout.compiler import xla_options
from spmd.program_cache.records import watch
from spmd.train.compiler_options import without_buffering
from spmd.train.model_setup import PlacedModel
from spmd.train.program_facts import facts_of_program, text_facts

PROGRAMS = {  # by kind: what users call them, and what JAX does
    "step": ("the step", "jit_train_step"),
    "watched_step": ("the step that counts its gradients", "jit_watched_step"),
    "scan_steps": ("the steps of a call", "jit_scan_steps"),
    "evaluate": ("the evaluation", "jit__evaluate"),
    "predict": ("the prediction", "jit__predict"),
}


# for which `jax.export` promises no compatibility over years: JAX's own, Pallas's, cuDNN's
KERNELS = (
    "cu_threefry2x32",
    "cu_threefry2x32_ffi",
    "__gpu$xla.gpu.triton",
    "mosaic_gpu_v2",
    "tpu_custom_call",
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaSoftmaxDropout",
    "__cudnn$fmhaSoftmaxDropoutBackward",
    "__cudnn$fmhaScaleBiasSoftmax",
    "__cudnn$fmhaScaleBiasSoftmaxBackward",
    "__cudnn$fmhaScaleBiasSoftmaxDropout",
    "__cudnn$fmhaScaleBiasSoftmaxDropoutBackward",
    "cudnn_rnn_ffi",
    "cudnn_rnn_bwd_ffi",
)


class FunctionKey(NamedTuple):
    """A compiled function of a program.

    Attributes:
      kind: such as "step" or "evaluate".
      rows: of a batch, for functions that train.
      split: whether each worker gets its own rows, for functions that train.
    """

    kind: str
    rows: int = 0
    split: bool = True


class CompiledFunctions:
    """The compiled functions of a program for full batches of `rows` rows.

    Attributes:
      builders: by kind, the function that makes the jitted function of a key.
      options: those of XLA, by its names.
      say: gets a line on each large program that is loaded instead of compiled.
    """

    def __init__(self, placed: PlacedModel, rows: int, *, layerwise: bool):
        self.builders: dict[str, Callable[[FunctionKey], Callable]] = {}
        layout = placed.resolved.layout
        self.options = xla_options(
            layout.compiler, placed.platform, devices=placed.mesh.size, layerwise=layerwise
        )
        self.say: Callable[[str], None] = lambda line: None
        self._placed = placed
        self._rows = rows
        self._jitted: dict[FunctionKey, Callable] = {}
        # those that were compiled or loaded
        self._ready: set[FunctionKey] = set()

    def jit(self, function: Callable, **options: Any) -> Callable:
        """Return `function`, jitted with the options of XLA."""
        return jax.jit(function, compiler_options=self.options, **options)

    def jitted(self, key: FunctionKey) -> Any:
        """Return the jitted function of a key, which a call or `lower` compiles."""
        if key not in self._jitted:
            self._jitted[key] = self._build(key)
        return self._jitted[key]

    def is_ready(self, key: FunctionKey) -> bool:
        """Return whether a function was compiled or loaded."""
        return key in self._ready

    def dispatch(self, key: FunctionKey, *arguments: Any) -> Any:
        """Return the results of a function, which the devices may still compute."""
        if key in self._ready:
            return self.jitted(key)(*arguments)
        return self.compile_by(key, arguments, lambda: self.jitted(key)(*arguments))

    def compile_by(self, key: FunctionKey, arguments: tuple, compile_it: Callable[[], Any]) -> Any:
        """Return `compile_it()`, which compiles the function of a key for these arguments, or loads
        it from the compilation cache.
        """
        if key.kind in PROGRAMS:
            return self._compile_recorded(key, arguments, compile_it)
        with self._placed.compiling():
            result = compile_it()
        self._ready.add(key)
        return result

    def compilations(self) -> int:
        """Return how many programs have been compiled so far."""
        return sum(map(compiled_count, self._jitted.values()))

    def _build(self, key: FunctionKey) -> Callable:
        return self.builders[key.kind](key)

    def _compile_recorded(
        self, key: FunctionKey, arguments: tuple, compile_it: Callable[[], Any]
    ) -> Any:
        name, module = PROGRAMS[key.kind]
        trains = key.kind in ("step", "watched_step", "scan_steps")
        if trains and key[1:] != (self._rows, True):
            name = f"{name} on a short batch"
        batch = arguments[1]
        if key.kind == "scan_steps":
            batch = {"resident": arguments[1], "rows": arguments[2]}
        with (
            self._placed.compiling(),
            watch(
                name,
                module,
                lambda: facts_of_program(self._placed, batch, self.options),
                lambda: text_facts(self.jitted(key).lower(*arguments).as_text(), name),
                records=jax.process_index() == 0,
            ) as watched,
        ):
            result = self._retried(compile_it)
        self._ready.add(key)
        if watched.line:
            self.say(watched.line)
        return result

    def _retried(self, compile_it: Callable[[], Any]) -> Any:
        """Return `compile_it()`; once more with other options, if XLA fails as `without_buffering`
        says. No argument is donated before.
        """
        try:
            return compile_it()
        except RuntimeError as error:
            layout = self._placed.resolved.layout
            self.options = without_buffering(error, self.options, layout.compiler, layout.source)
            # A jitted function keeps the options that it was made with.
            self._jitted.clear()
            self._ready.clear()
        return compile_it()


def export_step(
    update: Callable, arguments: Any, out_shardings: Any, platform: str
) -> jax.export.Exported:
    """`update(*arguments)` exported as a function of flat arguments and results."""
    # Flat: the pickled program then names no types of users, such as the state of an optimizer,
    # which the compile server would have to import.
    leaves, tree = jax.tree.flatten(arguments)

    def flat_update(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(update(*jax.tree.unflatten(tree, leaves)))

    jitted = jax.jit(flat_update, out_shardings=jax.tree.leaves(out_shardings))
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNELS]
    export = jax.export.export(jitted, platforms=(platform,), disabled_checks=unchecked)
    frames = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
    # the text of a step does not depend on the caller
    jax.config.update("jax_traceback_in_locations_limit", 1)
    try:
        return export(*leaves)
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)
