"""Figures from times, the file that is written, and what is refused. One test, marked `system`,
measures; the others have made-up times.
"""

import dataclasses
import functools
import importlib.util
import math
import statistics
import tomllib
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import spmd
from benchmarks import plan_truth
from spmd.errors import OptionError
from spmd.launch.cli import main
from spmd.mesh import MeshSpec
from spmd.planner import calibration
from spmd.planner.calibration import (
    EXACT,
    Measurement,
    Observation,
    base_target,
    figure_of,
    fit,
    spread_of,
    with_figure,
)
from spmd.planner.cluster import Cluster
from spmd.planner.cost import KEPT, first_touch_time
from spmd.planner.hlo import parse
from spmd.planner.probes import AXIS, compile_probe, predictor, probes_of
from spmd.planner.target import Achieved, load, shipped, target_text
from spmd.planner.timeline import timeline_of

CPU, H100 = load("cpu"), load("h100")
# The fit takes the figures in turns, and stops after some turns: a program that shows one figure
# depends a little on others.
TURNS = 0.01
DIGITS = 5e-4  # a file has four digits of a figure


def observed(probes, predict, hidden, **noise):
    """Each program's time on a target that the fit does not know."""
    return [
        Observation(probe.figure, each, each(hidden), **noise)
        for probe, each in zip(probes, predict, strict=True)
    ]


SHOWN = (
    "",
    "achieved.launch",
    "achieved.matmul",
    "achieved.memory",
    "achieved.convolution",
    "inside.latency",
    "achieved.link",
)


@functools.cache
def measurement():
    """The first program for each of some figures, on two CPU devices."""
    probes = {probe.figure: probe for probe in reversed(probes_of("cpu", 2))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "probes_of", lambda *_: [probes[figure] for figure in SHOWN])
        return Measurement(jax.devices()[:2], CPU)


@functools.cache
def measured():
    """A calibration of two devices, with times that a made-up target would take."""
    hidden = dataclasses.replace(CPU, achieved=Achieved(0.3, 0.5, 0.25, 2e-5, 0.2))
    for program in measurement().programs:
        seconds = 1e-3 + (program.predict(hidden) if program.probe.figure else 0.0)
        program.times[:] = [0.9 * seconds, seconds, 1.1 * seconds]
    return measurement().calibration()


def closed_form(target):
    """Seconds of 1 GFLOP of products, 1 GB of memory and 100 launches, one after the other."""
    return (
        1e9 / (target.rate("float32") * target.achieved.matmul)
        + 1e9 / target.memory_bandwidth
        + 100 * target.achieved.launch
    )


@pytest.mark.system
def test_fit_recovers_figures_of_programs():
    figures = [figure for figure in SHOWN if figure not in ("", "achieved.convolution")]
    hidden = dataclasses.replace(
        CPU,
        achieved=Achieved(0.3, 0.5, 0.25, 2e-5),
        inside=dataclasses.replace(CPU.inside, latency=2e-4),
    )
    programs = [program for program in measurement().programs if program.probe.figure in figures]
    probes, predict = (
        [program.probe for program in programs],
        [program.predict for program in programs],
    )
    fitted, unknown = fit(CPU, observed(probes, predict, hidden))
    assert unknown == ()
    for figure in figures:
        assert figure_of(CPU, figure) != figure_of(hidden, figure)
        np.testing.assert_allclose(figure_of(fitted, figure), figure_of(hidden, figure), rtol=TURNS)
    spread = spread_of(fitted, observed(probes, predict, hidden, noise=0.07))
    assert spread == dataclasses.replace(
        CPU.spread, **dict.fromkeys(("launch", "matmul", "memory", "link"), 0.07)
    )


def test_fit_takes_the_mean_of_programs_and_their_errors_as_spread():
    slow = [
        Observation("memory_bandwidth", closed_form, 2 * factor * closed_form(CPU))
        for factor in (0.9, 1 / 0.9)
    ]
    fitted, _ = fit(CPU, slow)
    assert abs(math.log(closed_form(fitted) / (2 * closed_form(CPU)))) < EXACT
    slow = [dataclasses.replace(one, figure="achieved.memory") for one in slow]
    assert spread_of(fitted, slow).memory == round(math.log(1 / 0.9), 3)


def test_fit_keeps_shares_below_their_limit():
    fast = [Observation("achieved.matmul", closed_form, closed_form(CPU) / 3)]
    assert fit(CPU, fast)[0].achieved.matmul == 1.0
    assert fit(CPU, fast, most_share=1e3)[0].achieved.matmul > 1.0


def test_fit_reports_figures_that_no_program_depends_on():
    one = Observation("flops.bfloat16", closed_form, 1.0)
    fitted, unknown = fit(CPU, [one])
    assert unknown == ("flops.bfloat16",) and fitted == CPU


def test_first_touch_is_timed_above_what_is_kept():
    target = dataclasses.replace(CPU, first_touch=1e9)
    assert first_touch_time(KEPT, target) == first_touch_time(2 * KEPT, CPU) == 0.0
    assert first_touch_time(2 * KEPT, target) == 2 * KEPT / 1e9
    module = parse(
        "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n}\n"
    )

    def seconds(target, temporaries):
        return timeline_of(
            module,
            MeshSpec.parse("data=1"),
            Cluster(1, 1, target),
            ("data",),
            temporaries=temporaries,
        ).seconds

    assert seconds(target, 2 * KEPT) == 2 * KEPT / 1e9 > seconds(CPU, 2 * KEPT) == 0.0


@pytest.mark.parametrize("name", shipped())
def test_target_text_is_read_as_the_same_target(tmp_path, name):
    target = load(name)
    (tmp_path / f"{name}.toml").write_text(target_text(target), encoding="utf-8")
    written = load(str(tmp_path / f"{name}.toml"))
    assert target_text(written) == target_text(target)
    assert dataclasses.replace(written, memory_bandwidth=0, flops={}) == dataclasses.replace(
        target, memory_bandwidth=0, flops={}
    )
    np.testing.assert_allclose([*written.flops.values()], [*target.flops.values()], rtol=DIGITS)


@pytest.mark.system
def test_calibration_is_written_as_a_target(tmp_path):
    path = measured().save(tmp_path / "new" / "mine.toml")
    target = Cluster.parse(f"2x{path}").target
    assert (target.platform, target.simulated, target.devices_per_node) == ("cpu", 2, 2)
    np.testing.assert_allclose(
        target.rate("float32") * target.achieved.matmul, 0.3 * CPU.rate("float32"), rtol=TURNS
    )
    np.testing.assert_allclose(
        target.rate("float32") * target.achieved.convolution, 0.2 * CPU.rate("float32"), rtol=TURNS
    )
    np.testing.assert_allclose(target.memory_bandwidth, 0.5 * CPU.memory_bandwidth, rtol=TURNS)
    np.testing.assert_allclose(target.inside.bandwidth, 0.25 * CPU.inside.bandwidth, rtol=TURNS)
    assert (target.achieved.memory, target.achieved.link) == (1.0, 1.0), (
        "on a CPU the figures themselves are measured"
    )
    table = tomllib.loads(path.read_text())
    assert table["sources"].keys() >= {
        "memory",
        "flops",
        "inside",
        "between",
        "achieved",
        "spread",
        "first_touch",
    }
    assert (
        "2 at once, medians of 3 rounds" in table["sources"]["achieved"]
        and "20" in table["sources"]["achieved"]
    )
    assert 0.05 < target.spread.matmul < 0.2


@pytest.mark.system
def test_calibration_prints_programs_and_figures():
    text = str(measured())
    assert "one of 2 devices simulated on" in text and "3 rounds" in text
    assert (
        all(one.name.split(",")[0][:20] in text for one in measured().measured)
        and "PREDICTED / MEDIAN" in text
    )
    assert "matrix products, float32" in text and "27 GFLOP/s" in text and repr(measured()) == text


def test_existing_files_are_not_overwritten(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("mine")
    with pytest.raises(OptionError, match=r"exists\.\n    fix: another name, or overwrite=True\."):
        measured().save(path)
    assert path.read_text() == "mine"
    assert measured().save(path, overwrite=True).read_text().startswith("title")
    with pytest.raises(OptionError, match=r"mine\.json(.|\n)*mine\.toml"):
        measured().save(tmp_path / "mine.json")


def device(platform="gpu", kind="NVIDIA H100 80GB HBM3", process=0):
    return SimpleNamespace(platform=platform, device_kind=kind, process_index=process)


def test_base_target_is_that_of_the_device():
    assert base_target([device()] * 8).name == "h100"
    assert base_target([device(kind="NVIDIA H800")], "h100").name == "h100"
    assert base_target([device("cpu", "cpu")]).name == "cpu"


@pytest.mark.parametrize(
    "devices, like, text",
    [
        ([], None, "devices: none"),
        ([device(), device("cpu", "cpu")], None, r"NVIDIA H100 80GB HBM3 \(gpu\), cpu \(cpu\)"),
        ([device(), device(process=1)], None, "of one process"),
        (
            [device(kind="NVIDIA H800")],
            None,
            r"no shipped target describes NVIDIA H800\.\n    fix: like= and the target of a "
            r"similar device(.|\n)*h100",
        ),
        (
            [device("tpu", "TPU v5 lite")],
            None,
            r"no shipped target describes TPU v5 lite(.|\n)*tpu_v5e",
        ),
        ([device("cpu", "cpu")], "h100", r'platform "cuda", and here is "cpu"'),
        ([device()], "h101", r'no target "h101"(.|\n)*h100'),
    ],
)
def test_unsuitable_devices_are_refused(devices, like, text):
    with pytest.raises(OptionError, match=text):
        base_target(devices, like)


def test_invalid_options_are_refused():
    invalid: list = [0, -1, math.nan, math.inf, "60", True]
    for seconds in invalid:
        with pytest.raises(OptionError, match="seconds="):
            spmd.calibrate(seconds=seconds)


def test_programs_that_take_no_time_are_left_out(monkeypatch):
    programs = measurement().programs
    for number, program in enumerate(programs):
        monkeypatch.setattr(program, "times", [1e-3 if number < 2 else 2e-3] * 3)
    found = measurement().calibration()
    assert [one.figure for one in found.measured] == list(SHOWN[2:])
    assert (
        found.notes[0]
        == f"note: {programs[1].probe.name} took no longer than a program without it."
    )


def test_programs_that_cannot_be_compiled_are_noted(monkeypatch):
    nothing = measurement().programs[0].probe
    attention = dataclasses.replace(
        nothing, name="attention", figure="achieved.attention", function=refused
    )
    monkeypatch.setattr(calibration, "probes_of", lambda *_: [nothing, attention])
    tried = Measurement(jax.devices()[:2], CPU)
    assert [program.probe for program in tried.programs] == [nothing]
    why = "RuntimeError: cuDNN is not detected."
    assert tried.notes == [
        f"note: attention could not be compiled, so achieved.attention stays that of cpu: {why}"
    ]


def refused(*arrays):
    raise RuntimeError("cuDNN is not detected.")


def test_command(tmp_path, capsys, monkeypatch):
    path, options = tmp_path / "mine.toml", []
    monkeypatch.setattr(
        calibration, "calibrate", lambda **given: options.append(given) or measured()
    )
    assert main(["calibrate", "--devices", "8", "--out", str(path), "--seconds", "5"]) == 0
    assert f"spmd plan SCRIPT --target 2x{path}" in capsys.readouterr().out
    assert (options[0]["seconds"], options[0]["like"]) == (5.0, None) and load(
        str(path)
    ).simulated == 2
    for arguments, text in (
        (["--devices", "8", "--out", str(path)], "exists"),
        (["--devices", "8", "--out", str(tmp_path / "mine")], "ends in .toml"),
        (["--devices", "3", "--out", str(tmp_path / "other.toml")], "too late"),
        (["--devices", "8", "--out", "/proc/mine.toml"], "cannot be written"),
        (
            ["--devices", "0", "--out", str(tmp_path / "other.toml")],
            "--devices 0: not a number of devices, from 1.",
        ),
        (
            ["--devices", "8", "--seconds", "0", "--out", str(tmp_path / "other.toml")],
            "--seconds 0: not a positive number",
        ),
        (["--out", str(tmp_path / "other.toml")], "there is no GPU or TPU here"),
    ):
        assert main(["calibrate", *arguments]) == 2
        assert text in capsys.readouterr().err
    assert len(options) == 1
    assert main(["calibrate", "--devices", "8", "--out", str(path), "--overwrite"]) == 0


@pytest.mark.system
def test_plans_for_another_number_of_devices_say_so(tmp_path):
    path = measured().save(tmp_path / "mine.toml")
    model = spmd.FunctionalModel(
        lambda key: {"w": jax.numpy.zeros((64, 8))}, lambda params, x: x @ params["w"]
    )
    batch = {
        "x": jax.ShapeDtypeStruct((32, 64), "float32"),
        "y": jax.ShapeDtypeStruct((32, 8), "float32"),
    }
    for count in (1, 2):
        plan = spmd.plan(
            model,
            batch,
            loss=spmd.losses.mean_squared_error,
            optimizer=optax.sgd(0.1),
            target=f"{count}x{path}",
        )
        assert any("spmd calibrate --devices 1" in note for note in plan.notes) == (count == 1)


@pytest.mark.system
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="pip install '.[gpu-compiler]'"
)
def test_programs_for_gpus_compile_and_show_their_figures(without_compilation_cache):
    """By XLA:GPU, without a GPU."""
    from jax.experimental import topologies

    from spmd.planner.compile import topology
    from spmd.planner.gpu_kernels import gpu_of

    mesh = Mesh(
        np.array(topologies.get_topology_desc(**topology(Cluster.parse("8xh100"))).devices),
        (AXIS,),
        axis_types=(AxisType.Auto,),
    )
    probes = {probe.figure: probe for probe in probes_of("gpu", 8)[1:]}
    with gpu_of(H100):
        predict = [predictor(compile_probe(probe, mesh), 8) for probe in probes.values()]
    hidden = dataclasses.replace(H100, achieved=Achieved(0.6, 0.7, 0.6, 6e-6, 0.4, 0.5, 0.3))
    hidden = with_figure(with_figure(hidden, "inside.latency", 8e-6), "flops.float32", 300e12)
    fitted, unknown = fit(H100, observed(probes.values(), predict, hidden))
    assert unknown == ()
    for figure in probes:
        np.testing.assert_allclose(figure_of(fitted, figure), figure_of(hidden, figure), rtol=TURNS)


@pytest.mark.slow
@pytest.mark.optimized
def test_predictions_are_near_what_is_measured():
    """In one run, in turns; more rounds are taken while other processes disturb the medians."""
    devices, (_, gpt, _, _) = jax.devices()[:8], plan_truth.cases(large=False)["gpt"]
    tokens = jax.ShapeDtypeStruct((16, 64), "int32")

    def rows(count):
        return {
            "x": jax.ShapeDtypeStruct((count, 256), "float32"),
            "label": jax.ShapeDtypeStruct((count,), "int32"),
        }

    def mlp():
        return plan_truth.MLP(512, nnx.Rngs(0))

    steps = [plan_truth.Step(mlp, rows(128)), plan_truth.Step(mlp, rows(1024))]
    steps.append(plan_truth.Step(gpt, {"tokens": tokens, "targets": tokens}, layout="fsdp"))
    measurement = Measurement(devices, base_target(devices))
    for _ in range(4):
        for _ in range(4):
            measurement.measure()
            for step in steps:
                step.run()
        found = measurement.calibration()
        times = [statistics.median(step.times) for step in steps]
        planned = [step.plan(found.cluster).timeline.seconds for step in steps]
        if all(
            0.5 < predicted / seconds < 2 for predicted, seconds in zip(planned, times, strict=True)
        ):
            break
    else:
        pytest.fail(f"predicted {planned}, measured {times}\n{found}")
    assert planned == sorted(planned) and times == sorted(times)
