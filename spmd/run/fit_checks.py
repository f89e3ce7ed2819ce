"""Checks of `fit` that need a program: the metrics that options name, what all processes share, and
local steps that are lost.
"""

import logging
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmd.data.records import Records
from spmd.data.sources import is_arrays
from spmd.distributed.consistency import check_consistency
from spmd.distributed.watchdog import current
from spmd.errors import OptionError, did_you_mean, option
from spmd.run.callback_calls import callback_name, watched_metrics
from spmd.run.config import RunConfig
from spmd.train.compiled_step import TrainingProgram
from spmd.train.histograms import check_countable
from spmd.train.program_facts import array_facts, leaves_by_name, text_facts
from spmd.train.weight_average import average_of
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.schedule import unsynced_steps


def check_metrics(
    config: RunConfig, program: TrainingProgram, trainer: Any, eval_data: Any
) -> None:
    """Check options that concern an evaluation, or a metric by its name; `trainer` is the run's
    `Trainer`.

    Raises:
      OptionError: there is no evaluation, or no metric with this name.
      SpmdError: the loss or a metric fails on the data to evaluate.
    """
    names = [*program.names, *program.static_metrics.names]
    names += [f"eval_{name}" for name in _evaluated(config, program, trainer, eval_data)]
    for hook in config.callbacks:
        for name in watched_metrics(hook):
            _check_name(callback_name(hook), name, names, config)
    if config.checkpoint is not None and config.checkpoint.best is not None:
        _check_name("Checkpoint", config.checkpoint.best, names, config)


def _evaluated(
    config: RunConfig, program: TrainingProgram, trainer: Any, eval_data: Any
) -> tuple[str, ...]:
    """Return the names of the loss and metrics of an evaluation."""
    if not config.evaluates:
        options = {
            "eval_every": config.eval_every,
            "eval_average": config.eval_average or None,
            "Checkpoint(best=...)": config.checkpoint and config.checkpoint.best,
        }
        for name, value in options.items():
            if value is not None:
                raise OptionError(
                    f"{name} is {value!r}, but there is nothing to evaluate.",
                    fix=f"{option('eval_data', '...')}, or leave it out.",
                )
        return ()
    if config.eval_average:
        jax.eval_shape(average_of, trainer.abstract_state.opt, trainer.abstract_state.params)
    if is_arrays(eval_data) or isinstance(eval_data, Records):
        return trainer.check_evaluation(eval_data)
    return program.evaluation.outputs.names


def _check_name(subject: str, name: str, names: Sequence[str], config: RunConfig) -> None:
    """Check that there is a metric that a callback or a checkpoint watches."""
    if name in names:
        return
    if name.startswith("eval_") and not config.evaluates:
        raise OptionError(
            f'{subject}: there is no metric "{name}", since there is no evaluation.',
            fix=f"{option('eval_data', '...')}, which has it.",
        )
    raise OptionError(f'{subject}: there is no metric "{name}".', fix=did_you_mean(name, names))


def check_watch(config: RunConfig, program: TrainingProgram) -> None:
    """Check that a run can be watched.

    Raises:
      OptionError: it has neither loggers nor a folder, workers have gradients of their own, a step
        that `profile` traces would be watched, or an array has too many elements.
    """
    watch, profile = config.watch, config.profile
    if watch is None:
        return
    if not config.loggers and config.checkpoint is None:
        raise OptionError(
            "watch: the run has neither loggers nor a folder, so nothing would record its "
            "histograms.",
            fix="checkpoint=...",
        )
    exchange = program.placed.exchange
    if watch.gradients and (exchange.local or exchange.asynchronous):
        mode = exchange.resolved.layout.parameter_server.mode
        why = (
            f'watch: under a parameter server in mode "{mode}" each worker updates parameters with '
            "its own gradient, so no histogram of a mean gradient can be recorded."
        )
        raise OptionError(why, fix=f"spmd.Watch(every={watch.every}, gradients=False).")
    traced = range(0) if profile is None else range(profile.begin + 1, profile.end + 1)
    traced_and_due = [step for step in traced if watch.is_due(step)]
    if watch.gradients and traced_and_due:
        why = (
            f"watch: step {traced_and_due[0]} counts gradients in another program than that which "
            "profile traces."
        )
        raise OptionError(why, fix="other steps for one of them; or spmd.Watch(gradients=False).")
    check_countable(program.placed.abstract_variables.params, program.placed.given.stacks())


def check_processes_agree(program: TrainingProgram, options: Mapping[str, Any]) -> None:
    """Compare what must be equal in all processes: options, layout, shapes, and the text of the
    step's program.

    Args:
      options: of the run, by the names that errors have for them; with the layout, as TOML.
    """
    if jax.process_count() == 1:
        return
    facts = {"devices of each process": str(jax.local_device_count())}
    for name, value in program.functions.options.items():
        facts[f"compiler option {name}"] = str(value)
    layout = tomllib.loads(options["layout"])
    for name, value in {**options, "layout": layout}.items():
        facts |= leaves_by_name(name, value)
    facts |= array_facts(program.placed)
    init_facts, init_text = program.placed.states.init_facts()
    init_text_facts = text_facts(init_text, "the initial values")
    step_text_facts = text_facts(program.text(), "the step")
    with current().in_phase("compile"):
        check_consistency(facts | init_facts | init_text_facts | step_text_facts)


def warn_of_unsynced_steps(server: ParameterServer | None, steps: int) -> None:
    """Warn of local steps after the last synchronization: they are not in the model."""
    if server is None or not server.local:
        return
    lost = unsynced_steps(server, steps)
    if not lost:
        return
    since = "their last synchronization"
    fix = "Choose a number of steps that `every` divides."
    if server.fragments > 1:
        since = "the last synchronization of some parameters"
        fix = "Fragments synchronize in turns, so a few steps always do; fewer fragments lose less."
    why = (
        "%d of the workers' %d steps came after %s: they are not in the model, nor in what was "
        "evaluated last. %s"
    )
    logging.getLogger("spmd").warning(why, lost, steps, since, fix)
