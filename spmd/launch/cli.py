"""The `spmd` command: layouts, plans, search, profiles, calibration, processes, benchmarks of data,
fine-tuning, generation, a doctor.

    spmd layouts
    spmd layouts show fsdp
    spmd layouts check my.toml --model models:gpt --mesh data=64,model=8
    spmd plan train.py --target 8x8xh100 --layout fsdp
    spmd targets
    spmd calibrate --devices 8 --out mine.toml
    spmd profile train.py --steps 10:15
    spmd launch --processes 2 --simulate 4 train.py
    spmd data bench "train-*.csv" --batch-size 128 --step-ms 20
    spmd finetune llama --data my.jsonl --layout fsdp --out tuned
    spmd generate tuned --prompt "Once upon a time"
    spmd doctor

`check` uses no device: it needs only the sizes of the mesh and the shapes of the model.
"""

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

from spmd.base.tracebacks import failing_line
from spmd.errors import (
    LayoutError,
    OptionError,
    SpmdError,
    did_you_mean,
    options_of_command,
)
from spmd.launch import doctor_command
from spmd.launch.doctor_checks import spmd_version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 for success, 2 for an error, without a traceback;
    `launch` returns that of the job.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    argv = list(arguments)
    words, script_arguments = argv, []
    # argparse would take what follows "--" for positional arguments of the command.
    if "--" in argv:
        separator = argv.index("--")
        words, script_arguments = argv[:separator], argv[separator + 1 :]
    options = _parser(argv[:1]).parse_args(words or ["--help"])
    options.script_arguments = script_arguments
    try:
        with options_of_command(options.flags):
            result = options.run(options)
    except SpmdError as error:
        print(f"{type(error).__name__}: {error}{_line_of(error)}", file=sys.stderr)
        return 2
    if isinstance(result, int):
        return result
    if not isinstance(result, tuple):
        result = result, 0
    text, code = result
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader, such as `head`, has exited; without this, Python's flush at exit would fail
        # again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _line_of(error: SpmdError) -> str:
    """The line in the user's files where the cause of an error was raised, since no traceback is
    shown.
    """
    if error.__cause__ is None:
        return ""
    place = failing_line(error.__cause__)
    return "" if place in str(error) else place


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest command for one that there is not, and gives the names of its options in
    `flags`.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unparsed = super().parse_known_args(args, namespace)
        flags = {action.dest for action in self._actions if action.option_strings}
        # The subcommand's parser has run already, and left its own flags.
        parsed.flags = flags | getattr(parsed, "flags", set())
        return parsed, unparsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action.choices, dict) and value not in action.choices:
            raise argparse.ArgumentError(
                None, f'there is no command "{value}": {did_you_mean(str(value), action.choices)}'
            )
        super()._check_value(action, value)


def _parser(first: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all commands; `first` is the one that was given: the doctor does not need the
    others, which import jax.
    """
    parser = _Parser(
        prog="spmd", description="Train Flax models on many devices, sharded by a layout file."
    )
    parser.add_argument("--version", action="version", version=f"spmd {spmd_version()}")
    top = parser.add_subparsers(required=True, metavar="COMMAND")
    # The modules of the other commands import jax, and the doctor must examine an installation
    # whose jax does not import.
    if list(first) != ["doctor"]:
        _add_commands(top)
    doctor_command.add_to(top)
    return parser


def _add_commands(top: Any) -> None:
    from spmd.launch import (
        calibrate_command,
        data_command,
        finetune_command,
        generate_command,
        launch_command,
        plan_command,
        profile_command,
    )

    layouts = top.add_parser("layouts", help="list, show and check layouts")
    layouts.set_defaults(run=_list)
    commands = layouts.add_subparsers(metavar="COMMAND")
    show = commands.add_parser(
        "show",
        help="print a shipped layout",
        description="Print a shipped layout, to read or to copy.",
    )
    show.add_argument("name", metavar="NAME", help="a name that `spmd layouts` lists")
    show.set_defaults(run=_show)
    check = commands.add_parser(
        "check",
        help="apply a layout to a model's shapes",
        description="Print how every parameter of a model would be sharded, and by which rule. "
        "Nothing is "
        "allocated.",
    )
    check.add_argument("layout", metavar="LAYOUT", help="a shipped name or a TOML file")
    check.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FACTORY",
        help="a function that makes the model, imported from here",
    )
    check.add_argument(
        "--mesh", metavar="data=4,model=2", help="axis sizes (default: the layout's)"
    )
    check.add_argument(
        "--batch",
        metavar="x=float32[8,28,28,1]",
        help="arrays of one batch; required for a linen module",
    )
    check.set_defaults(run=_check)
    for command in (
        plan_command,
        calibrate_command,
        profile_command,
        launch_command,
        data_command,
        finetune_command,
        generate_command,
    ):
        command.add_to(top)


def _list(options: argparse.Namespace) -> str:
    from spmd.layout.layout_files import load, shipped
    from spmd.render.html import aligned

    del options
    return "\n".join(aligned([(name, load(name).description) for name in shipped()]))


def _show(options: argparse.Namespace) -> str:
    from spmd.layout.layout_files import shipped, shipped_layout_hint

    paths = shipped()
    if options.name not in paths:
        raise LayoutError(
            f'no layout "{options.name}" is shipped.', fix=shipped_layout_hint(options.name)
        )
    return paths[options.name].read_text(encoding="utf-8").rstrip()


def _check(options: argparse.Namespace) -> str:
    from jax.sharding import AbstractMesh

    from spmd.base.tree import flatten
    from spmd.data.batches import check_batch
    from spmd.layout.check import fit_layout
    from spmd.layout.layout_files import load_registered
    from spmd.layout.summary import summary
    from spmd.models.wrap import wrap
    from spmd.sync.gradient_sync import GradientSync
    from spmd.sync.mesh_axes import MeshAxes
    from spmd.sync.notes import notes
    from spmd.train.choose_frozen import choose_frozen, with_adapters

    layout, model = load_registered(options.layout, lambda: wrap(_imported(options.model)))
    mesh = _mesh(options.mesh, layout)
    batch = None
    if options.batch is not None:
        batch = _batch(options.batch)
    model = with_adapters(model, layout, 0)
    variables, names = _shapes(model, batch)
    frozen = choose_frozen(layout, model, flatten(variables.params)).arrays(variables.params)
    resolved = fit_layout(layout, flatten(variables.params), names, mesh, model.stacks(), frozen)
    if batch is not None:
        check_batch(batch, layout, mesh, 1)
    mesh_axes = MeshAxes(
        AbstractMesh(tuple(mesh.sizes.values()), tuple(mesh.names)), resolved.data_axes
    )
    return "\n".join([summary(resolved), *notes(GradientSync(resolved, mesh_axes))])


def _mesh(text: str | None, layout: Any) -> Any:
    """The mesh, from its sizes alone; -1 is refused, since there are no devices to count."""
    from spmd.mesh import MeshSpec

    if text is None and not layout.mesh:
        raise OptionError(f"{layout.source} names no mesh.", fix="--mesh data=4,model=2.")
    sizes: Any = text
    if text is None:
        sizes = dict(layout.mesh)
    mesh = MeshSpec.parse(sizes)
    if -1 in mesh.sizes.values():
        example = ",".join(f"{name}={size}" for name, size in mesh.axes).replace("=-1", "=8")
        raise OptionError(
            f"mesh {mesh}: -1 stands for the remaining devices, and a check uses none.",
            fix=f"--mesh {example}.",
        )
    return mesh


def _imported(target: str) -> Any:
    """Import `module:attribute`, also from the current folder."""
    name, colon, attribute = target.partition(":")
    if not (colon and name and attribute):
        raise OptionError(
            f'--model "{target}" is not MODULE:FACTORY.',
            fix="such as  --model models:gpt  for  def gpt()  in models.py.",
        )
    # An installed command has the folder of its script on the import path, not the working folder
    # as `python -m` has.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            # The module exists, but one of its imports fails: the traceback says where.
            raise
        raise OptionError(
            f'--model "{target}": there is no module "{error.name}" in this folder or this Python.',
            fix="run it from the folder that holds it, or use its full name: "
            "package.module:factory.",
        ) from error
    if not hasattr(module, attribute):
        names = [
            word
            for word, value in vars(module).items()
            if not word.startswith("_") and not inspect.ismodule(value)
        ]
        raise OptionError(
            f'--model "{target}": module "{name}" has no "{attribute}".',
            fix=f"{did_you_mean(attribute, names)}",
        )
    return getattr(module, attribute)


def _batch(text: str) -> dict[str, Any]:
    """The arrays of a batch by name, as shapes.

    >>> _batch("x=float32[8,28,28,1], y=int32[8]")["y"]
    ShapeDtypeStruct(shape=(8,), dtype=int32)
    """
    import jax

    from spmd.launch.data_command import declared_arrays

    leaves = {}
    for name, dtype, shape in declared_arrays("--batch", text, '"x=float32[8,28,28,1]"'):
        try:
            leaves[name] = jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))
        except TypeError as error:
            raise OptionError(
                f'--batch "{text}": there is no dtype "{dtype}".',
                fix="such as float32, bfloat16 or int32.",
            ) from error
    return leaves


def _shapes(model: Any, batch: dict[str, Any] | None) -> tuple[Any, dict[str, tuple]]:
    """The shapes of a model's variables, and the logical axis names of its parameters."""
    import jax

    from spmd.models.base import trace_abstractly
    from spmd.models.flax_linen import LinenModel

    inputs = _inputs(batch) if isinstance(model, LinenModel) else None
    names: dict[str, tuple] = {}

    def build(key: Any, inputs: Any) -> Any:
        def call_with_inputs(module: Any) -> Any:
            return module(inputs)

        names.update(model.names(key, call_with_inputs))
        return model.make_variables(key, call_with_inputs)

    # A concrete key would make JAX look for devices, which a check must not use.
    key = jax.eval_shape(lambda: jax.random.key(0))
    return trace_abstractly(build, "the model", key, inputs), names


def _inputs(batch: dict[str, Any] | None) -> Any:
    """The input array of a linen module, whose shapes are only known when it is called."""
    from spmd.train.metrics import INPUTS

    if batch is None:
        raise OptionError(
            "the shapes of a linen module depend on its input.",
            fix='--batch "x=float32[8,28,28,1]", the arrays of a batch.',
        )
    inputs = [name for name in INPUTS if name in batch]
    if len(inputs) != 1:
        inputs = list(batch)
    if len(inputs) != 1:
        raise OptionError(
            f"--batch: the model's input may be any of {', '.join(batch)}.",
            fix=f"give only the input, or name it one of {', '.join(INPUTS)}.",
        )
    return batch[inputs[0]]
