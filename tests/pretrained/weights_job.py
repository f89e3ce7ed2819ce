"""Loads a folder and adapters in several processes under each layout, saves them, and prints what
was read and what was written.
"""

import hashlib
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))

from flax import nnx
from weight_models import Stacked, name_map

import spmd
from spmd.errors import PretrainedError
from spmd.pretrained.folders import ORIGIN


def main():
    spmd.join()
    given, adapters, out = map(Path, sys.argv[1:])
    for name, mesh in (
        ("fsdp", "data=8"),
        ("tensor_parallel", "data=4,model=2"),
        ("pipeline", "data=2,stage=4"),
    ):
        module = spmd.pretrained.load(
            given,
            model=lambda: Stacked(rngs=nnx.Rngs(0)),
            name_map=name_map(Stacked),
            mesh=mesh,
            layout=name,
        )
        report = getattr(module, ORIGIN).report
        print(
            f"READ {name} {jax.process_index()} {report.bytes_read} {report.bytes_kept}", flush=True
        )
        spmd.pretrained.save(module, out / name)
        if jax.process_index() == 0:
            print(
                f"SAVED {name} "
                f"{hashlib.sha256((out / name / 'model.safetensors').read_bytes()).hexdigest()}",
                flush=True,
            )
        folder = spmd.pretrained.save_adapters(
            spmd.pretrained.load_adapters(module, adapters), out / f"{name}-adapters"
        )
        spmd.pretrained.save(module, out / f"{name}-merged", merged=True)
        if jax.process_index() == 0:
            content = (folder / "adapter_model.safetensors").read_bytes()
            print(f"ADAPTERS {name} {hashlib.sha256(content).hexdigest()}", flush=True)
    try:
        spmd.pretrained.save(module, out / "fsdp", merged=True)
    except PretrainedError as error:
        print(f"REFUSED {jax.process_index()} {error.summary}", flush=True)


if __name__ == "__main__":
    main()
