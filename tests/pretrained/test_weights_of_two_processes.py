"""Two processes of four devices each: each reads what its devices keep, and process 0 writes what one process would."""

import hashlib
import re
import sys
from pathlib import Path

import pytest
from flax import nnx
from weight_models import Stacked, make_tensors, name_map

import spmd
from spmd.pretrained.safetensors_files import write_file

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launched import launch

JOB = Path(__file__).parent / "weights_job.py"


@pytest.mark.system
def test_two_processes_read_their_shards_and_write_all(tmp_path):
    tensors = make_tensors()
    given = tmp_path / "given"
    given.mkdir()
    write_file(given / "model.safetensors", tensors)
    plain = spmd.pretrained.load(given, model=lambda: Stacked(rngs=nnx.Rngs(0)), name_map=name_map(Stacked))
    one = hashlib.sha256((spmd.pretrained.save(plain, tmp_path / "one") / "model.safetensors").read_bytes()).hexdigest()
    result = launch("--processes", 2, "--simulate", 4, JOB, given, tmp_path)
    assert result.code == 0, result.text
    total = sum(values.nbytes for values in tensors.values())
    read = re.findall(r"READ (\w+) (\d) (\d+) (\d+)", result.text)
    assert len(read) == 6
    for name, process, count, kept in read:
        assert int(kept) <= int(count) <= 1.05 * int(kept), (name, process)
        if name == "fsdp":  # replicated norms and biases are read by both
            assert total / 2 <= int(kept) <= 0.52 * total
    assert re.findall(r"SAVED (\w+) (\w+)", result.text) == [("fsdp", one), ("tensor_parallel", one), ("pipeline", one)]
    assert len(re.findall(r"REFUSED \d .*fsdp is not empty", result.text)) == 2
