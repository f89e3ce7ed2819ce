"""Models of public repositories, as they are, on layouts: 6 steps of each against a plain loop of
JAX, flax and optax on one device.

    pip install absl-py augmax beartype clu dacite distrax einops \\
        huggingface_hub jaxtyping==0.2.36 ml_collections safetensors
    # the git commands that fill the folder
    python benchmarks/public_models/run.py --checkouts FOLDER --list
    # writes benchmarks/results/public_models.md
    python benchmarks/public_models/run.py --checkouts FOLDER
    # writes their sections
    python benchmarks/public_models/run.py --checkouts FOLDER --only jimm brax

Each repository's models are tried in a process of their own, on eight devices that the CPU
simulates, in float64 where the repository's code allows it. A cell of the table is the largest
distance of a loss, a parameter or a statistic from the plain loop's, divided by the largest number
of the array that it stands in.
"""

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import reported

REPOSITORIES = {
    "jimm": ("pythoncrazy/jimm", "src"),
    "big_vision": ("google-research/big_vision", "."),
    "openpi": ("Physical-Intelligence/openpi", "src"),
    "s5": ("lindermanlab/S5", "."),
    "xlstm": ("NX-AI/xlstm-jax", "."),
    "algoperf": ("mlcommons/algorithmic-efficiency", "."),
    "maskgit": ("google-research/maskgit", "."),
    "dit": ("kvfrans/jax-diffusion-transformer", "."),
    "jraph": ("google-deepmind/jraph", "."),
    "brax": ("google/brax", "."),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data_parallel": {"mesh": "data=8"},
    "fsdp": {"layout": "fsdp", "mesh": "data=8"},
    "zero1": {"layout": "zero1", "mesh": "data=8"},
    "bfloat16 codec": {"layout": "data_parallel_bf16", "mesh": "data=8"},
    "accumulate=4": {"mesh": "data=2", "accumulate": 4},
}
REPORT = "public_models"  # in benchmarks/results
LIMIT = 1800  # seconds of one repository
CODEC = """
With a codec, of the parameters that SGD trains, in float32: the norm of the difference of all updates, divided by theirs. Each worker's
gradient of two rows is rounded to 8 bits, and so is their mean. The limit is 0.05: one worker of eight that counted twice, or not at all,
would be 0.12 or more.
"""  # noqa: E501


def try_models(name: str, checkouts: Path, layout: str | None) -> None:
    """Train the models of one repository on the layouts; print a line of JSON for each."""
    import jax

    import spmd

    spmd.simulate_devices(8)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    repository, folder = REPOSITORIES[name]
    sys.path.insert(1, str(checkouts / repository.split("/")[1] / folder))
    from benchmarks.public_models.case import cell

    for case in importlib.import_module(f"benchmarks.public_models.models.{name}").cases():
        for of, options in {**LAYOUTS, **case.layouts}.items():
            if layout in (None, of):
                print(
                    json.dumps({"model": case.name, "layout": of, "cell": cell(case, of, options)}),
                    flush=True,
                )


def rows_of(name: str, checkouts: Path, layout: str | None) -> Iterator[dict[str, str]]:
    """Cells of one repository's models, tried in a process of their own."""
    options = [] if layout is None else ["--layout", layout]
    command = [sys.executable, __file__, "--checkouts", str(checkouts), "--try", name, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            print(line, flush=True)
            yield json.loads(line)
    if done.returncode:
        raise SystemExit(f"{name}: exit status {done.returncode}")


def commit_of(checkout: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def section(name: str, checkouts: Path, rows: list[dict[str, str]]) -> str:
    """The report on one repository."""
    models, layouts = (
        list(dict.fromkeys(row["model"] for row in rows)),
        list(dict.fromkeys(row["layout"] for row in rows)),
    )
    cells = {(row["model"], row["layout"]): row["cell"] for row in rows}
    lines = [f"## {title(name)}, {commit_of(checkouts / REPOSITORIES[name][0].split('/')[1])}", ""]
    lines += [f"| layout | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
    lines += [
        f"| {layout} | {' | '.join(cells.get((model, layout), '') for model in models)} |"
        for layout in layouts
    ]
    return "\n".join(lines)


def title(name: str) -> str:
    return f"[{REPOSITORIES[name][0]}](https://github.com/{REPOSITORIES[name][0]})"


def write(new: str, name: str) -> None:
    """Put one repository's section in the place of its former one."""
    path = reported.RESULTS / f"{REPORT}.md"
    former = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
    sections = {
        each: f"## {text.rstrip()}"
        for text in former
        for each in REPOSITORIES
        if text.startswith(title(each))
    } | {name: new}
    command = "python benchmarks/public_models/run.py --checkouts FOLDER"
    head = reported.head(
        "Models of public repositories on layouts", command, "jax", "flax", "optax"
    )
    texts = ["\n".join(head).rstrip(), __doc__.split("\n\n")[-1].strip(), CODEC.strip()]
    reported.write(
        REPORT,
        "\n\n".join(
            [*texts, *(sections[each] for each in REPOSITORIES if each in sections)]
        ).splitlines(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkouts",
        type=Path,
        required=True,
        help="the folder with the repositories, each by its name",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the git commands that fill the folder"
    )
    parser.add_argument(
        "--only",
        choices=REPOSITORIES,
        nargs="+",
        default=list(REPOSITORIES),
        help="some repositories",
    )
    parser.add_argument("--layout", help="one layout; prints, and writes nothing")
    parser.add_argument("--try", dest="tried", choices=REPOSITORIES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for repository, _ in REPOSITORIES.values():
            print(
                f"git clone https://github.com/{repository} "
                f"{args.checkouts / repository.split('/')[1]}"
            )
    elif args.tried:
        try_models(args.tried, args.checkouts, args.layout)
    else:
        for name in args.only:
            rows = list(rows_of(name, args.checkouts, args.layout))
            if not args.layout:
                write(section(name, args.checkouts, rows), name)


if __name__ == "__main__":
    main()
