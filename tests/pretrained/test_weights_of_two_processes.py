"""Two processes of four devices each: each reads what its devices keep, and process 0 writes what
one process would.
"""

import hashlib
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from weight_models import LAYERS, WIDTH, Stacked, make_tensors, name_map

import spmd
from spmd.models.lora import add_adapters
from spmd.pretrained.safetensors_files import open_files, write_file

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launched import launch

JOB = Path(__file__).parent / "weights_job.py"


def tensors_of(folder):
    with (folder / "model.safetensors").open("rb") as file:
        return {
            name: read_tensor(file, tensor) for name, tensor in open_files(folder).tensors.items()
        }


def read_tensor(file, tensor):
    file.seek(tensor.offset)
    return np.frombuffer(file.read(tensor.nbytes), tensor.dtype).reshape(tensor.shape)


@pytest.mark.system
def test_two_processes_read_their_shards_and_write_all(tmp_path):
    tensors = make_tensors()
    given = tmp_path / "given"
    given.mkdir()
    write_file(given / "model.safetensors", tensors)
    plain = spmd.pretrained.load(
        given, model=lambda: Stacked(rngs=nnx.Rngs(0)), name_map=name_map(Stacked)
    )
    one = hashlib.sha256(
        (spmd.pretrained.save(plain, tmp_path / "one") / "model.safetensors").read_bytes()
    ).hexdigest()
    add_adapters(plain, [spmd.Adapter("**/down", rank=2)], nnx.Rngs(1))
    plain.stack.layers.down.lora_b.set_value(jnp.ones((LAYERS, 2, WIDTH)))
    adapters = spmd.pretrained.save_adapters(plain, tmp_path / "adapters")
    result = launch("--processes", 2, "--simulate", 4, JOB, given, adapters, tmp_path)
    assert result.code == 0, result.text
    total = sum(values.nbytes for values in tensors.values())
    read = re.findall(r"READ (\w+) (\d) (\d+) (\d+)", result.text)
    assert len(read) == 6
    for name, process, count, kept in read:
        assert int(kept) <= int(count) <= 1.05 * int(kept), (name, process)
        if name == "fsdp":  # replicated norms and biases are read by both
            assert total / 2 <= int(kept) <= 0.52 * total
    assert re.findall(r"SAVED (\w+) (\w+)", result.text) == [
        ("fsdp", one),
        ("tensor_parallel", one),
        ("pipeline", one),
    ]
    of_adapters = hashlib.sha256((adapters / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert [found[1] for found in re.findall(r"ADAPTERS (\w+) (\w+)", result.text)] == [
        of_adapters
    ] * 3
    merged = tensors_of(spmd.pretrained.save(plain, tmp_path / "merged", merged=True))
    for name in ("fsdp", "tensor_parallel", "pipeline"):
        for key, values in tensors_of(tmp_path / f"{name}-merged").items():
            np.testing.assert_allclose(values, merged[key], rtol=1e-6, atol=1e-7)
            assert np.array_equal(values, tensors[key]) == ("down" not in key)
    assert len(re.findall(r"REFUSED \d .*fsdp is not empty", result.text)) == 2
