"""The program of `make demo`: train a CNN on real digits over eight simulated devices with a layout
file, in half a minute.

    python examples/demo.py --layout layouts/fsdp.toml --mesh data=8

Checkpoints, metrics, the loss curve and a report are in runs/demo (or runs/demo-2, ...: a new run
never overwrites another).
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import optax
from digits_cnn import load_data, make_model

import spmd
from spmd import viz

GOAL = 0.98
EPOCHS, BATCH = 15, 128


def fresh_folder(parent: Path) -> Path:
    """`parent`/demo, or the first of demo-2, demo-3, ... that does not exist."""
    names = (f"demo-{number}" if number > 1 else "demo" for number in itertools.count(1))
    folder = next(parent / name for name in names if not (parent / name).exists())
    folder.mkdir(parents=True)
    return folder


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train a CNN on real digits over simulated devices and show what comes of it."
    )
    parser.add_argument(
        "--layout",
        default="fsdp_tensor_parallel",
        help="a shipped layout's name, or a path to a TOML file",
    )
    parser.add_argument("--mesh", default="data=4,model=2", help="axis names and sizes")
    parser.add_argument("--devices", type=int, default=8, help="CPU devices to simulate")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs"),
        help="the folder that gets a new folder for this run",
    )
    args = parser.parse_args(argv)

    started = time.monotonic()
    spmd.simulate_devices(args.devices)
    train, test = load_data()
    steps = EPOCHS * -(-len(train["label"]) // BATCH)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    loss, metrics = spmd.losses.cross_entropy, {"accuracy": spmd.metrics.accuracy}
    trainer = spmd.Trainer(
        make_model, loss=loss, optimizer=optimizer, mesh=args.mesh, layout=args.layout
    )
    table, _, _ = trainer.summary().rpartition("\n\n")  # how many parameters there are, `fit` says
    print(
        f"A CNN learns {len(train['label'])} real images of digits on {args.devices} simulated "
        "devices, each with a part of it:\n"
    )
    print(f"{table}\n", flush=True)

    folder = fresh_folder(args.runs)
    result = spmd.fit(
        make_model,
        train,
        loss=loss,
        optimizer=optimizer,
        mesh=args.mesh,
        layout=args.layout,
        batch_size=BATCH,
        steps=steps,
        eval_data=test,
        metrics=metrics,
        checkpoint=spmd.Checkpoint(folder, every=steps // 4),
        progress=True,  # plain lines where there is no terminal
    )
    accuracy = result.evaluate(test)["accuracy"]
    viz.curve(result.history, folder / "curve.png")
    viz.report(
        result, folder / "report.html", title="Digits on a simulated mesh", checkpoint=folder
    )
    print(f"\n{result.history}\n")
    print(
        f"test accuracy {accuracy:.4f}, of {len(test['label'])} images that it was not trained on"
    )
    print(
        f"trained at {result.samples_per_second:,.0f} images per second; "
        f"{time.monotonic() - started:.0f} s from start to end\n"
    )
    print(f"next: {folder / 'report.html'}   this run: curves, layout, where the time went")
    print("      examples/digits_cnn.py   the model; --layout and --mesh choose another layout")
    print("      docs/tour.md   the library in ten minutes")
    if accuracy < GOAL:
        print(f"demo: test accuracy {accuracy:.4f} is below {GOAL}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
