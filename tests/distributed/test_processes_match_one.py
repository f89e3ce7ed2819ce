"""Two processes of four devices train as one process of eight does: every way to reduce, shard,
compress and send gradients.

What may differ is the order in which numbers of eight workers are added up. In one process XLA adds
in the devices' order. In several every device is a rank of Gloo: all_reduce goes around a ring, and
each part of an array begins at another device; reduce_scatter adds neighbours, then neighbours of
neighbours. All other collectives only carry: all_gather, all_to_all (codecs add what has come, in
the workers' order) and ppermute (pipelines), and a sum of two numbers has one order (axes of two
devices).

So two kinds of proof. The exact ones train a model whose gradients and losses are multiples of
2**-10 before they are sent, and small: then every order gives the same bits, and all arrays and
losses must be equal bit for bit. The others train as users do, and may differ by rounding: 1e-5 of
the largest number in an array, as in `tests/train/test_equivalence.py`. Most differ by 1e-7, and by
1e-6 the bias in front of the batch statistics, whose gradients cancel.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from launched import launch

pytestmark = pytest.mark.system

SLOW, JOB = pytest.mark.slow, Path(__file__).parent / "equal_job.py"
SERVED = """
[batch]
spec = ["data"]
[gradients]
reduction = "parameter_server"
[parameter_server]
"""
OWN = {  # half of the workers are spare: four take part, a number that divides exactly
    "spares": SERVED + 'mode = "synchronous"\nspares = 4\ncompute_time = "exponential(1.0)"\n',
    "asynchronous": SERVED + 'mode = "asynchronous"\ncompute_time = "lognormal(1.0, 0.3)"\n',
    "int8 between nodes": (
        '[batch]\nspec = [["node", "data"]]\n[gradients]\nreduction = "all_reduce"\ncodec = '
        '"int8"\nexact_axes = ["data"]\n'
    ),
    "local": SERVED + 'mode = "local"\nevery = 3\n',
}
CROSSED = "data=2,stage=4 crossed"  # neighbours in different processes, along both axes
STALE = {"rate": 2.0**-6}  # of gradients that are old a larger rate makes NaN

FAST = {
    "bfloat16": {"layout": "fsdp_bf16", "data": "grain", "steps": 6},
    "1f1b": {"layout": "pipeline_1f1b", "mesh": CROSSED, "epochs": 1},
    "server": {"layout": "parameter_server_async", **STALE, "epochs": 1},
    # of the second process, in step 4 of 4
    "spike": {"layout": "fsdp", "data": "iterable", "skip": {"window": 2}, "spike": 3 * 32 + 27},
    "float16": {
        "layout": "data_parallel",
        "data": "iterable",
        "precision": "float16",
        "exact": False,
        "spike": 2 * 32 + 5,
    },
}
# the updates of two epochs that are skipped
SKIPPING = {"spike": [0, 0, 0, 1, 0, 0, 0, 1], "float16": [1, 1, 1, 1, 0, 1, 1, 0]}
MORE = {
    "all_reduce": {"layout": "data_parallel", "evaluate": 50},
    "reduce_scatter": {"layout": "fsdp", "data": "iterable"},
    "synchronous server": {"layout": "parameter_server"},
    "spare replicas": {"layout": "spares", **STALE},
    "asynchronous server": {"layout": "asynchronous", **STALE},
    "bfloat16 all_reduce": {"layout": "data_parallel_bf16"},
    "int8": {"layout": "int8 between nodes", "mesh": "node=2,data=4"},
    "gpipe": {"layout": "pipeline", "mesh": CROSSED},
    "gpipe, stages cross": {"layout": "pipeline", "mesh": "stage=4,data=2"},
    "tensor parallel": {"layout": "tensor_parallel", "mesh": "data=4,model=2"},
    "tensor parallel, model crosses": {"layout": "tensor_parallel", "mesh": "model=2,data=4"},
    "three axes": {"layout": "fsdp_pipeline_tensor"},
    "microbatches": {"layout": "fsdp", "accumulate": 2},
}
ROUNDED = {  # 141 rows: the last batch has 13, which no number of workers divides
    "real fsdp": {"layout": "fsdp", "exact": False, "count": 141, "evaluate": 50},
    "real all_reduce": {"layout": "data_parallel", "exact": False, "count": 141},
    "real tensor parallel": {
        "layout": "tensor_parallel",
        "mesh": "data=4,model=2",
        "exact": False,
        "count": 141,
    },
    "real gpipe": {"layout": "pipeline", "mesh": CROSSED, "exact": False},
    "real local": {"layout": "local", "exact": False, "data": "iterable", **STALE},
}


def trained(folder, processes, cases):
    """Train all cases in one group of processes; the arrays of each that process 0 wrote."""
    layouts = {name: folder / f"{name}.toml" for name in OWN}
    for name, path in layouts.items():
        path.write_text(OWN[name])
    (place := folder / f"{processes}").mkdir(exist_ok=True)
    message = {
        name: {**case, "layout": str(layouts.get(case["layout"], case["layout"]))}
        for name, case in cases.items()
    }
    run = launch(
        "--processes",
        processes,
        "--simulate",
        8 // processes,
        JOB,
        place,
        json.dumps(message),
        seconds=500,
    )
    assert run.code == 0, run.text
    return {name: dict(np.load(place / f"{name}.npz")) for name in cases}


def relative_differences(one, two):
    """By array: the largest difference by the largest number; 0 where both have the same bits. Both
    have the same arrays.
    """
    assert {key: (leaf.shape, leaf.dtype) for key, leaf in one.items()} == {
        key: (leaf.shape, leaf.dtype) for key, leaf in two.items()
    }
    unequal = {
        key: (np.float64(leaf), np.float64(two[key]))
        for key, leaf in one.items()
        if leaf.tobytes() != two[key].tobytes()
    }
    return {
        key: float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30))
        for key, (a, b) in unequal.items()
    }


def state(arrays):
    """The final state, without the metrics."""
    return {key: leaf for key, leaf in arrays.items() if key.startswith(".")}


def check(one, two, tolerance=0.0):
    """The arms are what they should be, and what they came to is equal."""
    assert (int(one.pop("processes")), int(two.pop("processes"))) == (1, 2)
    owners = one.pop("owners"), two.pop("owners")
    assert [set(ranks.reshape(-1).tolist()) for ranks in owners] == [{0}, {0, 1}]
    moved = [
        np.abs(leaf - one[f".params{key.removeprefix('began ')}"]).max()
        for key, leaf in one.items()
        if key.startswith("began ")
    ]
    assert moved and min(moved) > 1e-3, (
        "every parameter has changed: two trainings that differ would show"
    )
    assert {
        key: far for key, far in relative_differences(one, two).items() if not far <= tolerance
    } == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("equal")


@pytest.fixture(scope="module")
def fast(folder):
    """The cases of the fast suite; two processes save two of them, one after 3 and 6 steps, and one
    process resumes from the third.
    """
    saved = {**FAST["bfloat16"], "checkpoint": str(folder / "run")}
    replicated = {**FAST["float16"], "checkpoint": str(folder / "replicated")}
    two = trained(folder, 2, {**FAST, "bfloat16": {**saved, "every": 3}, "float16": replicated})
    shutil.rmtree(folder / "run" / "checkpoints" / "6")
    one = trained(folder, 1, {**FAST, "resumed": {**saved, "resume": True}})
    return one, two


@pytest.mark.parametrize("name", [name for name in FAST if name not in SKIPPING])
def test_two_processes_equal_one_bit_for_bit(fast, name):
    check(*(dict(arm[name]) for arm in fast))


@pytest.mark.parametrize("name", SKIPPING)
def test_two_processes_skip_the_same_updates(fast, name):
    one, two = (dict(arm[name]) for arm in fast)
    assert one["history skipped"].tolist() == two["history skipped"].tolist() == SKIPPING[name]
    # the same bits in all but the norms, whose terms are no multiples of 2**-10
    if name == "spike":
        norms = [
            key
            for key in relative_differences(one, two)
            if re.fullmatch(r"\.opt\.(window|seen|limits)|history loss", key)
        ]
        assert set(relative_differences(one, two)) == {*norms, "owners", "processes"}
    check(one, two, 1e-5)


def test_resume_with_another_number_of_processes(fast):
    one, two = fast
    reference, rest = two["bfloat16"], one["resumed"]
    assert (len(reference["history loss"]), len(rest["history loss"])) == (6, 3)
    np.testing.assert_array_equal(rest["history loss"], reference["history loss"][3:])
    assert relative_differences(state(rest), state(reference)) == {}


@pytest.mark.parametrize("step", [4, 8])
def test_each_process_writes_a_part_of_replicated_arrays(fast, folder, step):
    """Half of what the checkpoint has in the end. A process may write a file again, which depends
    on the time that the disk takes.
    """

    def written(part):
        return sum(
            file.stat().st_size
            for file in (
                folder / "replicated" / "checkpoints" / str(step) / "state" / part / "d"
            ).iterdir()
        )

    assert min(written("ocdbt.process_0"), written("ocdbt.process_1")) > 0.45 * written("") > 5000


@SLOW
def test_two_processes_equal_one_in_more_cases(tmp_path):
    one, two = (trained(tmp_path, processes, MORE) for processes in (1, 2))
    for name in MORE:
        check(one[name], two[name])


@SLOW
def test_inexact_sums_differ_by_rounding_only(tmp_path):
    one, two = (trained(tmp_path, processes, ROUNDED) for processes in (1, 2))
    for name in ROUNDED:
        assert relative_differences(one[name], two[name]), (
            "another order of additions: otherwise nothing would have to be allowed"
        )
        check(one[name], two[name], tolerance=1e-5)


@SLOW
@pytest.mark.parametrize("data", ["arrays", "iterable"])
def test_checkpoint_of_two_resumes_in_one_and_four(tmp_path, data):
    case = {"layout": "fsdp", "data": data, "checkpoint": str(tmp_path / "run")}
    reference = trained(
        tmp_path, 1, {"reference": {**case, "checkpoint": str(tmp_path / "reference")}}
    )["reference"]
    trained(tmp_path, 2, {"stopped": {**case, "steps": 6}})
    for processes in (1, 4):
        shutil.copytree(tmp_path / "run", folder := tmp_path / f"run {processes}")
        rest = trained(
            tmp_path,
            processes,
            {"rest": {**case, "checkpoint": str(folder), "epochs": 2, "resume": True}},
        )["rest"]
        np.testing.assert_array_equal(rest["history loss"], reference["history loss"][6:])
        assert relative_differences(state(rest), state(reference)) == {}


UNEVEN = (
    r"epoch 1 has a different number of batches in each process: 4 (?:or more )?in process 0, 3 in "
    r"process 1"
)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("epoch", UNEVEN),
        pytest.param("save", UNEVEN, marks=SLOW),
        pytest.param(
            "evaluation",
            r"the evaluation's data has a different number of batches in each process",
            marks=SLOW,
        ),
        pytest.param(
            "rows",
            r"this process read 8 rows; with 2 processes and a batch of 32 it must be 16",
            marks=SLOW,
        ),
    ],
    ids=["epoch", "save", "evaluation", "rows"],
)
def test_uneven_data_is_reported_immediately(tmp_path, what, message):
    run = launch(
        "--processes",
        2,
        "--simulate",
        1,
        Path(__file__).parent / "uneven_job.py",
        what,
        tmp_path,
        seconds=60,
    )
    assert run.code == 1 and "DONE" not in run.text, run.text
    assert "stalled" not in run.text, "it did not need the stall timeouts"
    assert set(re.findall(rf"(?m)^\[([01])\] .*{message}", run.text)) == {"0", "1"}, run.text


@SLOW
def test_uneven_data_is_fine_if_steps_suffice(tmp_path):
    """With `steps` that all have, it does not matter that one has more."""
    run = launch(
        "--processes",
        2,
        "--simulate",
        1,
        Path(__file__).parent / "uneven_job.py",
        "enough",
        tmp_path,
        seconds=60,
    )
    assert run.code == 0 and run.text.count("DONE") == 2, run.text
    assert (tmp_path / "checkpoints" / "3").is_dir()
