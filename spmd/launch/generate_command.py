"""`spmd generate FOLDER --prompt TEXT`: let an open model write on from prompts."""

import argparse
import logging
from pathlib import Path
from typing import Any

from spmd.base.user_paths import as_path
from spmd.errors import DataError, OptionError

FOLDERS = "(default: as generation_config.json says)"
CHOICE = ("temperature", "top_k", "top_p", "repetition_penalty")
STARTS = ("prompt", "prompt_file", "tokens")


def add_to(commands: Any) -> None:
    """Declare `spmd generate`."""
    parser = commands.add_parser(
        "generate",
        help="let an open model write on from prompts",
        description="Let the model of FOLDER (config.json, safetensors files, tokenizer.json) "
        "write on "
        "from prompts, and print what it "
        "writes; all prompts at once.",
    )
    add = parser.add_argument
    add(
        "folder",
        metavar="FOLDER",
        help="a model as it was published, or as spmd finetune has written it",
    )
    add("--prompt", action="append", metavar="TEXT", help="repeatable")
    add(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="a file whose text is a prompt; repeatable",
    )
    add(
        "--tokens",
        action="append",
        metavar="1,15,7",
        help="token ids in place of a text; prints token ids; repeatable",
    )
    add(
        "--chat",
        metavar="FORMAT",
        help="prompts are what a user says: chatml, llama3, mistral, gemma; template: the folder's "
        "own",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=100,
        metavar="TOKENS",
        help="write at most so many (default: 100)",
    )
    add(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 takes the most likely token; above, tokens are drawn {FOLDERS}",
    )
    add("--top-k", type=int, metavar="K", help=f"draw from the K most likely tokens only {FOLDERS}")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help=f"draw from the most likely tokens that have this probability together {FOLDERS}",
    )
    add(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help=f"above 1, tokens that the text has already are less likely {FOLDERS}",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    add(
        "--stop",
        action="append",
        metavar="TOKEN",
        help="a token or its id that ends a text; repeatable (default: those the folder names)",
    )
    add(
        "--adapters",
        metavar="FOLDER",
        help="adapters of this model, as spmd finetune --adapters or PEFT has written them",
    )
    add(
        "--mesh",
        metavar="data=4,model=2",
        help="axis sizes (default: the layout's; one device without a layout)",
    )
    add("--layout", metavar="LAYOUT", help="a shipped name or a TOML file")
    add(
        "--dtype",
        default="file",
        metavar="DTYPE",
        help="of the parameters (default: as the files have them)",
    )
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> str | int:
    kinds = [name for name in STARTS if getattr(options, name)]
    if not kinds:
        raise OptionError(
            "there is no prompt.",
            fix='--prompt "Once upon a time", --prompt-file FILE or --tokens 1,15,7.',
        )
    if options.tokens and (len(kinds) > 1 or options.chat is not None):
        raise OptionError(
            "--tokens beside text.", fix="only --tokens, or --prompt and --prompt-file."
        )
    import jax

    from spmd import pretrained
    from spmd.data.prompts import Prompts
    from spmd.distributed.initialize import join
    from spmd.inference.generation import generate
    from spmd.pretrained.architectures import find
    from spmd.pretrained.outline import has_adapters_alone, read_config

    # Before anything asks for devices: JAX connects processes only before it has looked for them.
    join()
    folder = as_path(options.folder, "FOLDER")
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}.",
            fix="check the path; a model's name must be downloaded to a folder first.",
        )
    if has_adapters_alone(folder):
        raise DataError(
            f"{folder} has adapters and no model.",
            fix=f"spmd generate MODEL --adapters {folder}, with the model they are for.",
        )
    find(read_config(folder), folder)
    sampling = _sampling(options, folder)
    if options.tokens:
        coder = None
        texts = options.tokens
        prompts = [_ids(text) for text in texts]
    else:
        coder = Prompts(folder, options.chat)
        texts = [*(options.prompt or []), *(_text(path) for path in options.prompt_file or [])]
        prompts = [coder.encode(text) for text in texts]
    stop = _stop(options, folder, coder)
    layout = options.layout
    if layout is None and options.mesh is not None:
        layout = "data_parallel"
    model = pretrained.load(folder, mesh=options.mesh, layout=layout, dtype=options.dtype)
    if options.adapters is not None:
        pretrained.load_adapters(model, options.adapters)
    limits = {"max_new_tokens": options.max_new_tokens, "stop": stop, "seed": options.seed}
    written = generate(model, prompts, layout=layout, **limits, **sampling)
    if jax.process_index() != 0:
        return 0
    if coder is None:
        lines = [",".join(map(str, tokens)) for tokens in written]
    else:
        lines = [coder.decode(tokens) for tokens in written]
    if len(lines) == 1:
        return lines[0]
    pairs = zip(texts, lines, strict=True)
    return "\n\n".join(f"> {prompt}\n{line}" for prompt, line in pairs)


def _text(path: str) -> str:
    file = as_path(path, "prompt_file")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8"
        if isinstance(error, OSError):
            why = error.strerror
        raise DataError(
            f"--prompt-file {path} cannot be read: {why}.", fix="a file of text."
        ) from error


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise OptionError(
            f'--tokens "{text}".', fix="token ids with commas between, such as 1,15,7."
        ) from None


def _stop(options: argparse.Namespace, folder: Path, coder: Any) -> list[int]:
    """The ids of --stop, or those that the folder names."""
    from spmd.data.generation_config import end_tokens

    if options.stop is None:
        return list(end_tokens(folder) if coder is None else coder.stop)
    ids = []
    for word in options.stop:
        token = None
        if coder is not None:
            token = coder.tokenizer.id_of(word)
        if token is None and word.isdecimal():
            token = int(word)
        if token is None:
            raise OptionError(
                f'--stop "{word}" is no token of this model.',
                fix="a token as its tokenizer.json writes it, or its id.",
            )
        ids.append(token)
    return ids


def _sampling(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The arguments of `generate` that choose tokens: as the options say, else as the folder
    asks.
    """
    from spmd.data.generation_config import asked_sampling
    from spmd.inference.generation import Sampling

    asked = asked_sampling(folder)
    chosen = {name: getattr(options, name) for name in CHOICE if getattr(options, name) is not None}
    excluded = set(chosen)
    if chosen.get("temperature") == 0:
        excluded |= {"top_k", "top_p"}
    defaults = {name: value for name, value in asked.options.items() if name not in excluded}
    if defaults:
        shown = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logging.getLogger("spmd").warning(
            "%s, as %s says; options say otherwise.", shown, asked.where
        )
    # Raises its errors here, before weights are read.
    Sampling(**defaults | chosen)
    return defaults | chosen
