"""One training run in a process of its own, which tests interrupt or kill. `python job.py
'{"checkpoint": ..., ...}'`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import spmd
from spmd.run.checkpoint import CheckpointStore
from tests.processes import environment

ROOT = Path(__file__).resolve().parents[2]


class Report(spmd.callbacks.Callback):
    """Prints each event as a line; kills its own process at one of them, like a power failure."""

    def __init__(self, kill=None, folder=None):
        self.kill, self.folder = kill, folder and Path(folder)

    def _event(self, name, info):
        print(name, info.step, flush=True)
        if self.kill == f"{name} {info.step}":
            until = time.monotonic() + 120
            # a thread begins to write it
            while name == "checkpoint" and not list(self.folder.glob(f"checkpoints/{info.step}*")):
                if time.monotonic() > until:
                    os._exit(3)
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step(self, info):
        self._event("step", info)

    def on_checkpoint(self, info):
        self._event("checkpoint", info)


def kill_before_seal(step, folder=None):
    """Die when all of a checkpoint, of a store in this folder, is written, but not committed
    yet.
    """
    write_manifest = CheckpointStore._seal

    def sealed(store):
        if store._writing == step and folder in (None, store.folder):
            os.kill(os.getpid(), signal.SIGKILL)
        write_manifest(store)

    CheckpointStore._seal = sealed


def train(*, checkpoint=None, every=None, resume=False, kill=None, epochs=4, wide=0, callbacks=()):
    """The run: batch statistics, dropout, shuffling, a short last batch. `wide` makes the state
    large.
    """
    from small import Net, fit_net, labelled

    if kill and kill.startswith("seal "):
        kill_before_seal(int(kill.removeprefix("seal ")))
    options = (
        {}
        if checkpoint is None
        else {"checkpoint": spmd.Checkpoint(checkpoint, every=every), "resume": resume}
    )
    if wide:
        import optax
        from flax import nnx

        return spmd.fit(
            lambda: Net(nnx.Rngs(0), width=wide),
            labelled(80),
            loss=spmd.losses.cross_entropy,
            optimizer=optax.adam(1e-2),
            batch_size=32,
            epochs=epochs,
            callbacks=[Report(kill, checkpoint), *callbacks],
            **options,
        )
    return fit_net(
        labelled(80), epochs=epochs, callbacks=[Report(kill, checkpoint), *callbacks], **options
    )


def small_steps(count):
    """Many steps with next to nothing in each: the host runs ahead of eight devices as far as it is
    allowed to.
    """
    from small import fit, numbers

    result = fit(numbers(64), batch_size=8, steps=count)
    print("done", int(result.state.step), len(result.history), flush=True)


@contextlib.contextmanager
def started(*, timeout, **options):
    """The run in a process of its own; killed (by its id) and reaped on leaving, and after
    `timeout` seconds whatever happens.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(options)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    alarm = threading.Timer(timeout, process.kill)
    alarm.start()
    try:
        yield process
    finally:
        alarm.cancel()
        if process.poll() is None:
            process.kill()
        process.communicate()


if __name__ == "__main__":
    spmd.simulate_devices(8)
    options = json.loads(sys.argv[1])
    if "small_steps" in options:
        small_steps(options["small_steps"])
    else:
        result = train(**options)
        print("done", int(result.state.step), result.stop_reason, flush=True)
