"""The facts that a program is compiled for, in the words of layouts and batches: recorded beside a
cached program, to explain the next miss.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import re
import tomllib
from typing import Any

import jax
import jaxlib
from jax.tree_util import keystr, tree_leaves_with_path

from spmd.base.specs import spec_text
from spmd.base.tree import Tree, describe, flatten
from spmd.mesh import MeshSpec
from spmd.train.model_setup import PlacedModel

# of XLA's flags, those that do not change programs
IGNORED = ("--xla_dump_", "--xla_force_host_platform_device_count")


def leaves_by_name(name: str, value: Any) -> dict[str, str]:
    """The leaves of nested dicts as text, each by `name` and its keys.

    >>> leaves_by_name("layout", {"gradients": {"codec": "int8"}, "mesh": {}})
    {'layout gradients.codec': 'int8'}
    """
    leaves = tree_leaves_with_path(value, is_leaf=lambda node: not isinstance(node, dict))
    return {
        f"{name} {keystr(keys, simple=True, separator='.')}".strip(): str(leaf)
        for keys, leaf in leaves
    }


def array_facts(placed: PlacedModel) -> dict[str, str]:
    """Shape, dtype and spec of every array of the state."""
    arrays = flatten(placed.abstract_state)
    return {
        f"array {path}": f"{describe(leaf)} {spec_text(leaf.sharding.spec)}"
        for path, leaf in arrays.items()
    }


def text_facts(text: str, name: str) -> dict[str, str]:
    """Facts about a program's text: its hash, and the scalar constants in it, which reveal a
    differing learning rate or seed.

    >>> list(
    ...     text_facts("stablehlo.constant dense<1.000000e-01> : tensor<f32>", "the step").items()
    ... )[0]
    ('number 1 in the step', '1.000000e-01 (f32)')
    """
    constants = re.findall(r"constant dense<([^<>\"]{1,40})> : tensor<(\w+)>", text)
    numbers = {
        f"number {index} in {name}": f"{value} ({dtype})"
        for index, (value, dtype) in enumerate(constants, 1)
    }
    return numbers | {f"the program of {name}": hashlib.sha256(text.encode()).hexdigest()[:16]}


def facts_of_program(
    placed: PlacedModel, batch: Tree, compiler_options: dict[str, Any]
) -> dict[str, str]:
    """Return the facts that a program on such a batch is compiled for."""
    config = placed.config
    layout = tomllib.loads(placed.resolved.layout.to_toml())
    for words in ("description", "use_when"):
        layout.pop(words, None)
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a checkout on the path
        versions["spmd"] = importlib.metadata.version("spmd")
    facts = {f"batch {path}".strip(): describe(leaf) for path, leaf in flatten(batch).items()}
    facts["mesh"] = str(MeshSpec.parse(placed.mesh))
    facts["precision"] = config.precision
    facts["accumulate"] = str(config.accumulate)
    facts |= leaves_by_name("layout", layout)
    facts |= {f"compiler option {name}": str(value) for name, value in compiler_options.items()}
    for flag in sorted(os.environ.get("XLA_FLAGS", "").split()):
        if not flag.startswith(IGNORED):
            name, _, value = flag.partition("=")
            facts[f"flag {name}"] = value or "set"
    facts["the kind of device"] = placed.mesh.devices.flat[0].device_kind
    facts["the number of processes"] = str(jax.process_count())
    facts |= {f"the version of {package}": version for package, version in versions.items()}
    return facts | array_facts(placed)
