"""The `spmd` command: what layouts there are, and whether one fits a model on a mesh that need not exist.

    spmd layouts
    spmd layouts show fsdp
    spmd layouts check my.toml --model models:gpt --mesh data=64,model=8
    spmd plan train.py --target 8x8xh100 --layout fsdp
    spmd targets
    spmd launch --processes 2 --simulate 4 train.py
    spmd data bench "train-*.csv" --batch-size 128 --step-ms 20

`check` never asks JAX for a device: it knows the mesh by its sizes and the model by its shapes.
"""

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from spmd.errors import LayoutError, OptionError, SpmdError, did_you_mean, user_line
from spmd.launch import data_command, launch_command, plan_command
from spmd.layout.toml_reader import load, shipped

_LEAF = re.compile(r"\s*([\w/]+)\s*=\s*(\w+)\s*\[([\d,\s]*)\]\s*(?:,|$)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code: 0 when all is well, 2 for an error, which is told without a traceback; `launch` its own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:cut])
    options.rest = given[cut + 1 :]  # for a script that the command runs
    try:
        found = options.run(options)
    except SpmdError as error:
        print(f"{type(error).__name__}: {error}{_line_of(error)}", file=sys.stderr)
        return 2
    if isinstance(found, int):
        return found
    try:
        print(found, flush=True)
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _line_of(error: SpmdError) -> str:
    """Where in the user's own files an error began, when it began as another one: the traceback is not shown."""
    place = user_line(error.__cause__) if error.__cause__ else ""
    return "" if place in str(error) else place


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spmd", description="Train a Flax model over many devices, laid out by a file.")
    top = parser.add_subparsers(required=True, metavar="COMMAND")
    layouts = top.add_parser("layouts", help="list, show and check layouts")
    layouts.set_defaults(run=_list)
    commands = layouts.add_subparsers(metavar="COMMAND")
    show = commands.add_parser("show", help="print a shipped layout", description="Print a shipped layout, to read or to start from.")
    show.add_argument("name", metavar="NAME", help="as `spmd layouts` lists it")
    show.set_defaults(run=_show)
    check = commands.add_parser(
        "check",
        help="apply a layout to a model's shapes",
        description="Print where every parameter of a model would live, and why. Nothing is allocated and no device is used.",
    )
    check.add_argument("layout", metavar="LAYOUT", help="a shipped name or a TOML file")
    check.add_argument("--model", required=True, metavar="MODULE:FACTORY", help="a function that builds the model; imported from here")
    check.add_argument("--mesh", metavar="data=4,model=2", help="axis sizes; the layout's own when it gives them all")
    check.add_argument("--batch", metavar="x=float32[8,28,28,1]", help="arrays of one batch; a linen module shows no shapes without")
    check.set_defaults(run=_check)
    plan_command.add_to(top)
    launch_command.add_to(top)
    data_command.add_to(top)
    return parser


def _list(options: argparse.Namespace) -> str:
    del options
    width = max(map(len, shipped()), default=0)
    return "\n".join(f"{name.ljust(width)}  {load(name).description}" for name in shipped())


def _show(options: argparse.Namespace) -> str:
    known = shipped()
    if options.name not in known:
        raise LayoutError(f'no layout "{options.name}" is shipped.', fix=f"{did_you_mean(options.name, known)}")
    return known[options.name].read_text(encoding="utf-8").rstrip()


def _check(options: argparse.Namespace) -> str:
    # jax takes a second to import, and the other commands do without
    from jax.sharding import AbstractMesh

    from spmd.data.batches import check_batch
    from spmd.layout.check import fit_layout
    from spmd.layout.summary import summary
    from spmd.models.wrap import wrap
    from spmd.tree import flatten
    from spmd.wire.gradient_sync import GradientSync
    from spmd.wire.notes import notes
    from spmd.wire.strategies import MeshAxes

    layout = load(options.layout)
    mesh = _mesh(options.mesh, layout)
    batch = None if options.batch is None else _batch(options.batch)
    model = wrap(_imported(options.model))
    variables, names = _shapes(model, batch)
    resolved = fit_layout(layout, flatten(variables.params), names, mesh, model.stacks())
    if batch is not None:
        check_batch(batch, layout, mesh, 1)
    mesh_axes = MeshAxes(AbstractMesh(tuple(mesh.sizes.values()), tuple(mesh.names)), resolved.data_axes)
    return "\n".join([summary(resolved), *notes(GradientSync(resolved, mesh_axes))])


def _mesh(text: str | None, layout: Any) -> Any:
    """The mesh by its sizes alone: with no devices to count, -1 means nothing."""
    from spmd.mesh import MeshSpec

    if text is None and not layout.mesh:
        raise OptionError(f"{layout.source} names no mesh.", fix="--mesh data=4,model=2.")
    mesh = MeshSpec.parse(text if text is not None else dict(layout.mesh))
    if -1 in mesh.sizes.values():
        example = ",".join(f"{name}={8 if size == -1 else size}" for name, size in mesh.axes)
        raise OptionError(f"mesh {mesh}: -1 takes the devices that are left, and a check has none to count.", fix=f"--mesh {example}.")
    return mesh


def _imported(target: str) -> Any:
    """What `module:attribute` names, the current folder being importable."""
    name, colon, attribute = target.partition(":")
    if not (colon and name and attribute):
        raise OptionError(f'--model "{target}" is not MODULE:FACTORY.', fix="such as  --model models:gpt  for  def gpt()  in models.py.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not, and its traceback says where
        raise OptionError(
            f'--model "{target}": there is no module "{error.name}" in this folder or this Python.\n'
            "    fix: run it from the folder that holds it, or name it with dots: package.module:factory."
        ) from error
    if not hasattr(found, attribute):
        own = [word for word, value in vars(found).items() if not word.startswith("_") and not inspect.ismodule(value)]
        raise OptionError(f'--model "{target}": module "{name}" has no "{attribute}".', fix=f"{did_you_mean(attribute, own)}")
    return getattr(found, attribute)


def _batch(text: str) -> dict[str, Any]:
    """Arrays by name, as shapes.

    >>> _batch("x=float32[8,28,28,1], y=int32[8]")["y"]
    ShapeDtypeStruct(shape=(8,), dtype=int32)
    """
    import jax

    leaves, at = {}, 0
    while at < len(text):
        found = _LEAF.match(text, at)
        if found is None:
            raise OptionError(f'--batch "{text}": "{text[at:].strip()}" is not NAME=DTYPE[SIZES].', fix='such as "x=float32[8,28,28,1]".')
        name, dtype, sizes = found.groups()
        try:
            leaves[name] = jax.ShapeDtypeStruct(tuple(int(size) for size in sizes.split(",") if size.strip()), jax.numpy.dtype(dtype))
        except TypeError as error:
            raise OptionError(f'--batch "{text}": there is no dtype "{dtype}".', fix="such as float32, bfloat16 or int32.") from error
        at = found.end()
    return leaves


def _shapes(model: Any, batch: dict[str, Any] | None) -> tuple[Any, dict[str, tuple]]:
    """A model's variables as shapes, and the logical axis names of its parameters."""
    import jax

    from spmd.models.base import trace_abstractly
    from spmd.models.flax_linen import LinenModel

    inputs = _inputs(batch) if isinstance(model, LinenModel) else None
    names: dict[str, tuple] = {}

    def build(key: Any, inputs: Any) -> Any:
        run = lambda called: called(inputs)
        names.update(model.names(key, run))
        return model.init(key, run)

    key = jax.eval_shape(lambda: jax.random.key(0))
    return trace_abstractly(build, "the model", key, inputs), names


def _inputs(batch: dict[str, Any] | None) -> Any:
    """The array that a linen module, which shows its shapes only when it is called, is called with."""
    from spmd.train.metrics import INPUTS

    if batch is None:
        raise OptionError("a linen module shows its shapes only on data.", fix='--batch "x=float32[8,28,28,1]", the arrays of a batch.')
    known = [name for name in INPUTS if name in batch]
    inputs = known if len(known) == 1 else list(batch)
    if len(inputs) != 1:
        raise OptionError(
            f"--batch: which of {', '.join(batch)} the model is called with cannot be told.\n"
            f"    fix: give that one alone, or name it one of {', '.join(INPUTS)}."
        )
    return batch[inputs[0]]
