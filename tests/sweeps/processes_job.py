"""Sweeps, one after the other, in each of several processes: `processes_job.py FOLDER '{"name":
{...}, ...}' [RANK CALLS [SIGNAL]]`.

Each writes FOLDER/name/RANK: the table as a process has it, and the arrays of its best trials. With
a rank and a number of calls, that process of the first attempt kills itself, or sends itself
another signal, at this call of steps.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

import spmd
from spmd.base.tree import flatten
from spmd.distributed import watchdog
from spmd.errors import SpmdError
from spmd.sweeps.vmapped_trials import VmappedTrials
from tests.sweeps.swept import RATES, labelled, sweep


def scalar(model, batch):
    """One number for all rows, so that a trial over several devices is compared with one on the
    whole batch first.
    """
    return spmd.losses.cross_entropy(model, batch).mean()


MORE = {
    "scalar": {"loss": scalar},
    "halving": {"search": spmd.Halving(factor=3), "space": RATES},
    "large": {"space": {**RATES, "seed": range(100)}},
}


def count_calls(fatal, number):
    """A list that grows by one with each call of steps; a signal when it has this length."""
    steps, calls = VmappedTrials.steps, []

    def counting(self, *given):
        calls.append(None)
        if len(calls) == fatal:
            print("FAULT", flush=True)
            os.kill(os.getpid(), number)
            # so that a fast process does not train on until the watchdog has seen it
            while not watchdog.current().stop_reason:
                time.sleep(0.01)
        return steps(self, *given)

    VmappedTrials.steps = counting
    return calls


def main(folder, cases, *kill):
    """Run the cases; an error is printed, and the next one runs."""
    dies = kill and os.environ["SPMD_ATTEMPT"] == "0" and jax.process_index() == int(kill[0])
    calls = count_calls(
        int(kill[1]) if dies else 0, getattr(signal, kill[2] if kill[2:] else "SIGKILL")
    )
    for name, case in json.loads(cases).items():
        case |= MORE.get(case.pop("more", ""), {})
        if case.pop("differ", False):
            case["space"] = {"learning_rate": [0.1, 0.2 + jax.process_index()]}
        again, options = (
            case.pop("again", False),
            {
                "checkpoint": spmd.Checkpoint(Path(folder, name, "sweep"), every=2),
                "steps_per_call": 2,
            },
        )
        try:
            found = sweep(**case, **options)
            # now from what is on disk
            found = sweep(**case, **options, resume=True) if again else found
        except SpmdError as error:
            print(f"REFUSED {name}: {' '.join(str(error).split())}", flush=True)
            continue
        best = Path(folder, name, "sweep", "best")
        assert all((best / f"trial-{tried.number:04d}").is_dir() for tried in found.best), (
            "there when the sweep returns, in every process"
        )
        print(f"CALLS {name} {len(calls)}", flush=True)
        place = Path(folder, name, str(jax.process_index()))
        place.mkdir()
        found.to_csv(place / "table.csv")
        (place / "shown.txt").write_text(str(found))
        for tried in found.best:
            result = tried.result()
            arrays = {path: np.asarray(leaf) for path, leaf in flatten(result.state).items()}
            measured = np.array(sorted(result.evaluate(labelled(50, 1)).items()))
            np.savez(
                place / f"{tried.number}.npz",
                measured=measured,
                losses=np.array(tried.history["loss"]),
                **arrays,
            )
            restored = result.trainer.restore(best / f"trial-{tried.number:04d}")
            assert all(
                np.asarray(leaf).tobytes() == arrays[path].tobytes()
                for path, leaf in flatten(restored).items()
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
