"""Loggers and progress of a run, begun before its first step, and the facts that loggers get."""

import logging
from collections.abc import Mapping
from typing import Any

import jax

from spmd.base.user_paths import run_file, write_text
from spmd.errors import CheckpointError
from spmd.run.checkpoint import CheckpointStore
from spmd.run.config import RunConfig, StartPoint
from spmd.run.loggers import JsonLines, Logger, begin_loggers, write_record
from spmd.run.progress import NoProgress
from spmd.run.run_facts import ID_FILE, RunFacts, environment, run_id


def begin_outputs(
    config: RunConfig,
    store: CheckpointStore | None,
    trainer: Any,
    display: Any,
    start_point: StartPoint,
    meta: Mapping[str, Any],
    rows: int,
    room: str | None,
    chosen: str | None = None,
) -> tuple[list[Logger], Any]:
    """Return loggers and progress, on process 0 only; write the layout, and report notes.

    Args:
      trainer: the run's `Trainer`.
      meta: describes the run in its checkpoints.
      rows: of a full batch.
      room: a line on the memory that is left; None: nothing to say.
      chosen: the layout as TOML, where another one was asked for.
    """
    if jax.process_index() != 0:
        return [], NoProgress()
    loggers = list(config.loggers)
    began_before = store is not None and (store.folder / "metrics.jsonl").exists()
    if store is not None:
        # first: what a failed save has left may fill the disk
        store.remove_leftovers()
        write_text(
            run_file(store.folder, "layout.toml"),
            chosen or trainer.layout.to_toml(),
            CheckpointError,
        )
        loggers.append(JsonLines(run_file(store.folder, "metrics.jsonl")))
    if store is not None and not config.resumes:
        # The id is that of an abandoned run; a tracker that is added later would take it for this
        # one's.
        (store.folder / ID_FILE).unlink(missing_ok=True)

    def describe() -> RunFacts:
        lengths = {"batch_size": rows, **config.lengths()}
        seed = trainer.placed.config.seed
        facts = _logged_config(meta, lengths, seed, start_point)
        folder = None if store is None else store.folder
        step = int(start_point.state.step)
        identity = run_id(folder, resumes=config.resumes)
        return RunFacts(facts, folder, step, config.resumes, began_before, *identity)

    lines = begin_loggers(loggers, describe)
    step = int(start_point.state.step)
    beginning = ""
    if step:
        beginning = _record_resumption(loggers, store, start_point, step)
    elif began_before and store is not None:
        # A reader of the records sees that those before this one belong to the interrupted run.
        write_record(loggers, {"step": 0, "event": "started again"})
        if config.resumes:
            logging.getLogger("spmd").warning(
                "the run in %s has no checkpoint: training starts again at step 0", store.folder
            )
    elif config.resumes and store is not None:
        # Perhaps another folder was meant.
        beginning = f"{store.folder} holds no run to resume: a new one begins"
    if beginning:
        display.note(beginning)
    lines = [*lines, *trainer.notes()]
    if room:
        lines.append(room)
    for line in lines:
        if line.startswith("note:"):
            display.note(line)
        else:
            display.say(line)
    return loggers, display


def _logged_config(
    meta: Mapping[str, Any], lengths: Mapping[str, int], seed: int, start_point: StartPoint
) -> dict[str, Any]:
    """Return the configuration that loggers get, by name."""
    return {
        "layout": meta["layout"],
        "mesh": meta["mesh"],
        **lengths,
        **meta["options"],
        "seed": seed,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(start_point.state.params)),
        **environment(),
    }


def _record_resumption(
    loggers: list[Logger], store: CheckpointStore | None, start_point: StartPoint, step: int
) -> str:
    """Write the record of a run that resumes; return the line that says so."""
    # A reader of the records sees that earlier ones of a later step belong to the interrupted run.
    record: dict[str, Any] = {"step": step, "event": "resumed"}
    if start_point.changes:
        record["changed"] = start_point.changes
    if start_point.source:
        record["source"] = start_point.source
    write_record(loggers, record)
    if start_point.source:
        text = f"resumed step {step} from {start_point.source}"
    else:
        folder = None if store is None else store.folder
        text = f"resumed from step {step} of {folder}"
    return "; ".join([text, *start_point.changes])
