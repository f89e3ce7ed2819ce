"""`spmd finetune FOLDER --data FILES --out FOLDER`: train an open model on text, and write it as it
came.

It calls what `docs/pretrained.md` shows in Python. All that can be checked is checked before
weights are read.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spmd.base.user_paths import as_path, check_free
from spmd.errors import OptionError, PretrainedError, Problem, printable, raise_problems

LENGTH = 2048  # tokens of a row, where the model has as many positions
WARMUP = 0.03  # of all steps
# a low-rank adapter learns at higher rates than the weights beside it
RATE, ADAPTER_RATE = 2e-5, 2e-4
NEEDS = {
    "save_every": "checkpoint",
    "eval_every": "eval_data",
    "sample_every": "sample",
    "max_new_tokens": "sample",
}
INTERRUPTED = 130  # the exit code of a program that Ctrl-C ends


def add_to(commands: Any) -> None:
    """Declare `spmd finetune`."""
    parser = commands.add_parser(
        "finetune",
        help="train an open model on text, and write it as it came",
        description="Train the model of FOLDER (config.json, safetensors files, tokenizer.json) on "
        "text, "
        "sharded by a layout, with AdamW "
        "and a learning rate that rises and then falls as a cosine; then write a folder with the "
        "same names, shapes and dtypes.",
        epilog="Several processes:  spmd launch --processes 8 -m spmd finetune FOLDER --data "
        "my.jsonl "
        "--out tuned",
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="a model as it was published")
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILES",
        help="JSON lines or Parquet files; quote patterns",
    )
    add(
        "--out",
        required=True,
        metavar="FOLDER",
        help="where to write the model; is not there yet, or empty",
    )
    add(
        "--layout",
        default="fsdp",
        metavar="LAYOUT",
        help="a shipped name or a TOML file (default: fsdp)",
    )
    add(
        "--mesh",
        metavar="data=4,model=2",
        help="axis sizes (default: the layout's, or all devices on data)",
    )
    add(
        "--adapters",
        metavar="FILE",
        help="a TOML file with [[adapters]] and [train]: train these alone, and write them as PEFT "
        "does",
    )
    add(
        "--merge",
        action="store_true",
        help="write the model with its adapters merged into its weights instead",
    )
    _add_text_options(parser.add_argument_group("text"))
    _add_run_options(parser.add_argument_group("training"))
    group = parser.add_argument_group("samples, evaluation and checkpoints")
    add = group.add_argument
    add(
        "--sample",
        action="append",
        metavar="PROMPT",
        help="let the model write on from it during training; repeatable",
    )
    add(
        "--sample-every",
        type=int,
        metavar="STEPS",
        help="steps between samples (default: a tenth of the run)",
    )
    add("--max-new-tokens", type=int, metavar="TOKENS", help="of a sample (default: 50)")
    add(
        "--eval-data",
        nargs="+",
        metavar="FILES",
        help="evaluate on these, at the end of each epoch",
    )
    add("--eval-every", type=int, metavar="N", help="evaluate every N steps instead")
    add(
        "--checkpoint",
        metavar="FOLDER",
        help="save here; the same command resumes from the newest checkpoint",
    )
    add(
        "--save-every",
        type=int,
        metavar="STEPS",
        help="steps between checkpoints (default: once per epoch)",
    )
    parser.set_defaults(run=_finetune)


def _add_text_options(group: Any) -> None:
    add = group.add_argument
    add(
        "--length",
        type=int,
        metavar="TOKENS",
        help=f"of a row (default: {LENGTH}, or the model's positions if they are fewer)",
    )
    add(
        "--field",
        action="append",
        metavar="NAME",
        help="what to read, or twice: prompt and answer (default: text; messages with --chat)",
    )
    add(
        "--chat",
        metavar="FORMAT",
        help="the format of conversations: chatml, llama3, mistral, gemma; template: the folder's "
        "own",
    )
    add(
        "--on-error",
        default="stop",
        metavar="stop|skip",
        help="what happens to documents that cannot be used (default: stop)",
    )
    add(
        "--loss-on",
        default="all",
        metavar="all|answers",
        help="which tokens count in the loss (default: all)",
    )


def _add_run_options(group: Any) -> None:
    add = group.add_argument
    add(
        "--batch-size",
        type=int,
        default=8,
        metavar="ROWS",
        help="rows of an update, over all devices (default: 8)",
    )
    add("--epochs", type=int, metavar="N", help="how often to read the data (default: once)")
    add("--steps", type=int, metavar="N", help="updates, in place of --epochs")
    rates = f"the highest one (default: {RATE:g}, with adapters {ADAPTER_RATE:g})"
    add("--learning-rate", type=float, metavar="RATE", help=rates)
    add(
        "--warmup",
        type=int,
        metavar="STEPS",
        help=f"steps until it is reached (default: {WARMUP:.0%} of all)".replace("%", "%%"),
    )
    add(
        "--weight-decay",
        type=float,
        default=0.0,
        metavar="RATE",
        help="of matrices and adapters, not of norms and biases (default: 0)",
    )
    add(
        "--clip-norm",
        type=float,
        default=1.0,
        metavar="NORM",
        help="the largest global norm of a gradient (default: 1)",
    )
    add(
        "--precision",
        default="bfloat16",
        metavar="DTYPE",
        help="of forward and backward pass (default: bfloat16)",
    )
    add(
        "--dtype",
        default="float32",
        metavar="DTYPE",
        help="of the parameters in training (default: float32)",
    )
    add(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="microbatches of an update (default: 1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the order of the data (default: 0)")


def _finetune(options: argparse.Namespace) -> str | int:
    out = as_path(options.out, "out")
    _check_options(options)
    check_free(out, PretrainedError)

    import jax  # takes a second, and wrong options are found without it

    from spmd import pretrained
    from spmd.api import fit
    from spmd.distributed.initialize import join
    from spmd.layout.schema import Layout
    from spmd.losses import next_token
    from spmd.run.checkpoint import Checkpoint

    # Before anything asks for devices: JAX connects processes only before it has looked for them.
    join()
    layout = _with_adapters(options, Layout.load(options.layout))
    if options.learning_rate is None:
        options.learning_rate = ADAPTER_RATE if layout.adapters else RATE
    length = _check_folder(options, layout)
    data = _data(options, options.data, length, shuffle=True)
    eval_data = None
    if options.eval_data is not None:
        eval_data = _data(options, options.eval_data, length, shuffle=False)
    checkpoint = None
    if options.checkpoint is not None:
        checkpoint = Checkpoint(options.checkpoint, every=options.save_every)
    steps = options.steps or data.steps_per_epoch * (options.epochs or 1)
    if options.warmup is not None and options.warmup >= steps:
        raise OptionError(
            f"--warmup {options.warmup} of {steps} steps leaves no step to learn.",
            fix=f"--warmup {steps // 10}.",
        )
    samples = _samples(options, steps)  # which encodes the prompts
    if jax.process_index() == 0:
        print(f"{data!r}\n{steps:,} steps", flush=True)
    model = pretrained.load(options.folder, mesh=options.mesh, layout=layout, dtype=options.dtype)
    result = fit(
        model,
        data,
        loss=next_token,
        optimizer=_optimizer(options, steps),
        mesh=options.mesh,
        layout=layout,
        steps=options.steps,
        epochs=options.epochs,
        eval_data=eval_data,
        eval_every=options.eval_every,
        precision=options.precision,
        accumulate=options.accumulate,
        seed=options.seed,
        callbacks=samples,
        checkpoint=checkpoint,
        resume=checkpoint is not None,
    )
    if result.stop_reason is not None:
        again = "nothing was saved" if checkpoint is None else "the same command resumes"
        print(
            f"stopped at step {int(result.state.step)}: {result.stop_reason}; {out} is not "
            f"written, {again}",
            file=sys.stderr,
        )
        return INTERRUPTED
    if layout.adapters and not options.merge:
        pretrained.save_adapters(
            result, out, base_model=str(as_path(options.folder, "FOLDER").absolute())
        )
    else:
        pretrained.save(result, out, merged=options.merge)
    if jax.process_index() != 0:
        return 0
    return f"{out}: {_summary(result)}"


def _with_adapters(options: argparse.Namespace, layout: Any) -> Any:
    """The layout with the two tables of `--adapters`.

    Raises:
      OptionError: the file has other tables or no adapter, the layout has such tables as well, or
        there is nothing to merge.
    """
    from spmd.layout.schema import Layout

    if options.adapters is not None:
        path = as_path(options.adapters, "adapters")
        tables = Layout.load(path)
        two_tables = Layout(
            tables.description,
            train=tables.train,
            adapters=tables.adapters,
            use_when=tables.use_when,
        )
        why = ""
        if not tables.adapters:
            why = "it has no [[adapters]]."
        elif tables != two_tables:
            why = "it has other tables than [train] and [[adapters]]."
        if why:
            raise OptionError(
                f"--adapters {path}: {why}",
                fix="[[adapters]] and [train] here, and all other tables in that of --layout.",
            )
        if layout.adapters or layout.train != Layout().train:
            raise OptionError(
                f"--adapters {path}: {layout.source} has [train] or [[adapters]] as well.",
                fix="one of the two files.",
            )
        source = f"{layout.source} with {tables.source}"
        layout = dataclasses.replace(
            layout, train=tables.train, adapters=tables.adapters, source=source
        )
    if options.merge and not layout.adapters:
        raise OptionError("--merge without adapters.", fix="--adapters FILE, or leave it out.")
    return layout


def _summary(result: Any) -> str:
    step = int(result.state.step)
    parts = [f"step {step}"]
    losses = []
    if len(result.history):
        losses = result.history["loss"]
    if len(losses) < step:
        parts.append(f"resumed from step {step - len(losses)}")
    if losses:
        parts.append(f"loss {losses[0]:.4g} to {losses[-1]:.4g}")
    for evaluation in result.history.evaluations[-1:]:
        for name, value in evaluation.items():
            if name.startswith("eval_"):
                parts.append(f"{name} {value:.4g}")
    return ", ".join(parts)


def _check_options(options: argparse.Namespace) -> None:
    """Numbers and options that need one another; all problems at once."""
    problems = []
    for name, needed in NEEDS.items():
        if getattr(options, name) is not None and getattr(options, needed) is None:
            problems.append(
                Problem(
                    _flag(name),
                    [f"it does nothing without {_flag(needed)}."],
                    f"{_flag(needed)}, or leave it out.",
                )
            )
    if options.epochs is not None and options.steps is not None:
        problems.append(
            Problem("--epochs and --steps", ["both set the length of the run."], "one of them.")
        )
    least = {"batch_size": 1, "accumulate": 1, "seed": 0, "warmup": 0, "length": 2}
    for name in ("batch_size", "accumulate", "seed", "length", "epochs", "steps", "warmup", *NEEDS):
        value = getattr(options, name)
        if value is not None and value < least.get(name, 1):
            problems.append(
                Problem(f"{_flag(name)} {value}", [], f"a whole number from {least.get(name, 1)}.")
            )
    for name, smallest in (
        ("learning_rate", "above 0"),
        ("clip_norm", "above 0"),
        ("weight_decay", "from 0"),
    ):
        value = getattr(options, name)
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and smallest == "above 0"):
            problems.append(Problem(f"{_flag(name)} {value:g}", [], f"a number {smallest}."))
    raise_problems(OptionError, "spmd finetune", [*problems, *_overlaps(options)])


def _overlaps(options: argparse.Namespace) -> Iterator[Problem]:
    """Folders to be written that are in the model's folder, or a file that is read; and a
    checkpoint in --out.
    """
    folder = as_path(options.folder, "FOLDER").resolve()
    out = as_path(options.out, "out").resolve()
    inputs = {
        "data": options.data,
        "eval_data": options.eval_data or [],
        "adapters": filter(None, [options.adapters]),
    }
    files = {}
    for name, texts in inputs.items():
        for text in texts:
            files[as_path(text, name).resolve()] = _flag(name)
    for name, text in (("out", options.out), ("checkpoint", options.checkpoint)):
        if text is None:
            continue
        path = as_path(text, name).resolve()
        flag = _flag(name)
        if folder in (path, *path.parents):
            yield Problem(
                f"{flag} {text}",
                [f"it is in the model's folder, {options.folder}, which stays as it is."],
                "another folder.",
            )
        elif path in files:
            yield Problem(f"{flag} {text}", [f"it is a file of {files[path]}."], "another folder.")
        elif flag == "--checkpoint" and out in (path, *path.parents):
            yield Problem(
                f"{flag} {text}",
                ["it is in --out, which is empty until the model is written."],
                "another folder.",
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_folder(options: argparse.Namespace, layout: Any) -> int:
    """Compare config, headers, tokenizer, layout, mesh and batch with one another; returns the
    length of rows.

    Raises:
      SpmdError: they do not fit.
    """
    import jax
    import numpy as np
    from flax import nnx

    from spmd.data.batches import check_batch
    from spmd.losses import next_token
    from spmd.mesh import MeshSpec, make_mesh
    from spmd.models.lora import add_adapters
    from spmd.pretrained.adapters import adapted_modules, check_only_adapters
    from spmd.pretrained.architectures import find
    from spmd.pretrained.outline import Outline, read_config
    from spmd.pretrained.safetensors_files import open_files
    from spmd.train.model_setup import PlacedModel, TrainConfig, check_numbers

    check_numbers(options.precision, options.accumulate, options.seed)
    path = as_path(options.folder, "FOLDER")
    _check_has_model(path)
    mesh_sizes = options.mesh
    if mesh_sizes is None:
        mesh_sizes = dict(layout.mesh) or None
    mesh = make_mesh(mesh_sizes)
    outline = Outline.of(path, mesh=mesh, layout=layout)
    config = read_config(path)
    length = _check_length(options, path, config)
    row = jax.ShapeDtypeStruct((options.batch_size, length), np.dtype("int32"))
    fields = ("tokens", "targets", "segment_ids", "positions", "mask")
    check_batch(
        dict.fromkeys(fields, row),
        outline.layout or layout,
        MeshSpec.parse(mesh),
        options.accumulate,
    )
    outline.match(open_files(path))
    train_config = TrainConfig(
        outline.model,
        next_token,
        _optimizer(options, 100),
        precision=options.precision,
        seed=options.seed,
    )
    placed = PlacedModel(train_config, mesh, layout)
    placed.resolved  # noqa: B018  # compares adapters, and what trains, with the model
    if layout.adapters and not options.merge:
        check_only_adapters(
            placed.abstract_variables.params,
            "--merge writes all weights; or a [train] that leaves these out.",
        )

        def adapted() -> nnx.Module:
            module = find(config, path).factory()
            add_adapters(module, layout.adapters, nnx.Rngs(0))
            return module

        adapted_modules(outline.name_map, nnx.eval_shape(adapted), "--merge")
    return length


def _check_has_model(path: Path) -> None:
    """Raise PretrainedError if a folder has adapters alone."""
    from spmd.pretrained.adapter_config import AdapterConfig
    from spmd.pretrained.outline import ADAPTER_CONFIG, has_adapters_alone, read_config

    if has_adapters_alone(path):
        base_model = printable(AdapterConfig(read_config(path, ADAPTER_CONFIG)).base_model, 200)
        of_model = base_model and f", {base_model}"
        fix = (
            f"spmd finetune MODEL, with the model that they are for{of_model}; "
            "load_adapters in Python trains them on."
        )
        raise PretrainedError(f"{path} has adapters and no model.", fix=fix)


def _check_length(options: argparse.Namespace, path: Path, config: Any) -> int:
    """Return the length of rows, after a comparison of it and the tokenizer with the model."""
    from spmd.data.tokenize import Tokenizer
    from spmd.pretrained.decoder_config import DecoderConfig
    from spmd.pretrained.outline import CONFIG

    decoder = DecoderConfig.from_config(config, str(path / CONFIG))
    positions = decoder.learned_positions or decoder.max_positions
    length = options.length
    if length is None:
        length = min(LENGTH, positions or LENGTH)
    if positions is not None and length > positions:
        why = f"--length {length}: {path / CONFIG} says that the model has {positions} positions."
        raise OptionError(why, fix=f"--length {positions}; longer texts continue in other rows.")
    size = Tokenizer(path).size
    if size > decoder.vocab:
        why = (
            f"{path / 'tokenizer.json'} has ids up to {size - 1}, and the model {decoder.vocab} "
            "tokens, from 0."
        )
        raise PretrainedError(why, fix="the tokenizer of this model.")
    return length


def _data(options: argparse.Namespace, files: Sequence[str], length: int, *, shuffle: bool) -> Any:
    from spmd.data import text

    return text(
        files,
        tokenizer=options.folder,
        length=length,
        batch_size=options.batch_size,
        field=options.field,
        chat=options.chat,
        loss_on=options.loss_on,
        on_error=options.on_error,
        shuffle=shuffle,
        seed=options.seed,
    )


def _optimizer(options: argparse.Namespace, steps: int) -> Any:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with clipping, under a warm-up and a cosine
    that ends at 0.
    """
    import optax

    warmup = options.warmup
    if warmup is None:
        # a run of one step has no warmup: its only step would have a rate of 0
        warmup = 0
        if steps > 1:
            warmup = math.ceil(WARMUP * steps)
    first_rate = options.learning_rate
    if warmup:
        first_rate = 0.0
    rate = optax.warmup_cosine_decay_schedule(first_rate, options.learning_rate, warmup, steps)
    decays = None
    if options.weight_decay:
        decays = _decays
    adamw = optax.adamw(rate, weight_decay=options.weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(options.clip_norm), adamw)


def _decays(params: Any) -> Any:
    """A tree of booleans: True for the parameters that decay, which are kernels, embeddings and
    adapters.
    """
    from spmd.base.tree import map_paths

    return map_paths(
        lambda path, _: path.rpartition("/")[2] in ("kernel", "embedding", "lora_a", "lora_b"),
        params,
    )


def _samples(options: argparse.Namespace, steps: int) -> list[Any]:
    from spmd.callbacks import Samples

    if options.sample is None:
        return []
    every = options.sample_every or max(1, steps // 10)
    most = options.max_new_tokens or 50
    return [
        Samples(
            options.sample,
            every=every,
            max_new_tokens=most,
            tokenizer=options.folder,
            chat=options.chat,
        )
    ]
