"""Checks of fit that need a program: what all processes share, and local steps that are lost."""

import logging
import tomllib
from collections.abc import Mapping
from typing import Any

import jax

from spmd.distributed.consistency import check_consistency
from spmd.distributed.watchdog import current
from spmd.run.callbacks import Callback
from spmd.train.compiled_step import TrainingProgram
from spmd.train.program_facts import array_facts, leaves_by_name, text_facts
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.sync_schedule import unsynced_steps


def check_processes_agree(
    program: TrainingProgram, hooks: list[Callback], options: Mapping[str, Any]
) -> None:
    """Compare what must be equal in all processes: options, layout, shapes, and the text of the
    step's program.
    """
    if jax.process_count() == 1:
        return
    facts = {"devices of each process": str(jax.local_device_count())}
    for name, value in program.functions.options.items():
        facts[f"compiler option {name}"] = str(value)
    # Only callbacks that run programs on the devices of all processes must be equal in all.
    together = {type(hook).__name__: hook.every for hook in hooks if hook.together}
    layout = tomllib.loads(options["layout"])
    for name, value in {**options, "callbacks": together, "layout": layout}.items():
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
