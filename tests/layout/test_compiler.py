"""The `[compiler]` table: from the file to the options that XLA is given, on each platform, and
what is wrong with it.
"""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import CompileError, LayoutError, OptionError
from spmd.layout.compiler import (
    CPU_DEFAULTS,
    GPU_DEFAULTS,
    THRESHOLDS,
    UNROLLING,
    XLA_NAMES,
    Compiler,
    compiler_notes,
    xla_options,
)
from spmd.layout.toml_reader import loads
from spmd.layout.toml_writer import dumps
from spmd.run import fit_checks
from spmd.train.compiled_functions import CompiledFunctions
from spmd.train.compiler_options import BUFFERING, BUFFERING_ERROR, check_buffering
from tests.layout.applied import MODEL, X, Y, error_text, fits

EVERY_KEY = Compiler(
    latency_hiding=False,
    combine_all_gather="512 MiB",
    combine_reduce_scatter=2**28,
    combine_all_reduce="1GB",
    pipelined_collectives=True,
    double_buffering=False,
    command_buffers=False,
    deterministic=True,
    options={
        "xla_gpu_autotune_level": 0,
        "xla_cpu_enable_fast_math": False,
        "xla_dump_to": "a folder",
    },
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def one(key, value):
    return Compiler(**{key: value})


def test_every_key_round_trips_and_reaches_xla_on_gpus(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    layout = spmd.Layout(compiler=EVERY_KEY)
    assert loads(dumps(layout)) == layout != spmd.Layout()
    assert set(EVERY_KEY.keys) == set(XLA_NAMES)
    assert (
        loads(
            dumps(layout)
            .replace("options = {", "[compiler.options]\n")
            .replace(", ", "\n")
            .replace(" }", "")
        )
        == layout
    )
    assert xla_options(EVERY_KEY, "cuda") == {
        "xla_gpu_enable_latency_hiding_scheduler": False,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**29,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**28,
        "xla_gpu_all_reduce_combine_threshold_bytes": 10**9,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_NO_UNROLL",
        "xla_gpu_enable_command_buffer": "",
        "xla_gpu_deterministic_ops": True,
        **dict(EVERY_KEY.options),
    }


def test_defaults_are_for_gpus_and_give_way_to_the_layout_and_to_xla_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    (name,) = XLA_NAMES["latency_hiding"]
    assert xla_options(Compiler(), "gpu") == {name: GPU_DEFAULTS["latency_hiding"]} == {name: True}
    assert (
        xla_options(Compiler(), "cpu", layerwise=True)
        == xla_options(Compiler(), "tpu", layerwise=True)
        == {}
    )
    gathering = {
        "xla_gpu_all_gather_combine_threshold_bytes": 2**28,
        "xla_gpu_enable_while_loop_unrolling": UNROLLING[True],
    }
    assert xla_options(Compiler(), "gpu", layerwise=True) == {name: True} | gathering
    # by XLA's name or the plain one, a layout's own value replaces it
    own = {"xla_gpu_enable_while_loop_unrolling": UNROLLING[False]}
    assert (
        xla_options(Compiler(options=own), "gpu", layerwise=True) == {name: True} | gathering | own
    )
    assert (
        xla_options(Compiler(double_buffering=False), "gpu", layerwise=True)
        == {name: True} | gathering | own
    )
    assert xla_options(Compiler(latency_hiding=False), "gpu") == {name: False}
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=false")
    assert xla_options(Compiler(), "gpu") == {}
    assert xla_options(Compiler(latency_hiding=True), "gpu") == {name: True}


def test_cpus_that_wait_for_each_other_order_their_programs(monkeypatch):
    (name,) = CPU_DEFAULTS
    assert (
        xla_options(Compiler(), "cpu", devices=8) == CPU_DEFAULTS
        and xla_options(Compiler(), "gpu", devices=8).keys() & {name} == set()
    )
    assert xla_options(
        Compiler(options={name: "CPU_SCHEDULER_TYPE_DEFAULT"}), "cpu", devices=8
    ) == {name: "CPU_SCHEDULER_TYPE_DEFAULT"}
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=CPU_SCHEDULER_TYPE_DEFAULT")
    assert xla_options(Compiler(), "cpu", devices=8) == {}


def test_plain_names_are_not_used_on_cpus_and_a_note_says_so():
    trainer = fits("[compiler]\nlatency_hiding = true\ncommand_buffers = false\n")
    assert trainer._program.functions.options == CPU_DEFAULTS
    note = "note: [compiler] latency_hiding, command_buffers: for GPUs, not used on cpu."
    assert [line for line in trainer.notes() if "[compiler]" in line] == [note]
    assert not compiler_notes(EVERY_KEY, "gpu") and not compiler_notes(
        Compiler(options={"xla_cpu_enable_fast_math": True}), "cpu"
    )


def test_values_that_no_platform_can_take(golden):
    golden(
        "compiler_values_that_no_platform_can_take",
        error_text(
            '[compiler]\nlatency_hiding = 3\ncombine_all_gather = "5 apples"\ncombine_all_reduce = '
            "4.5\ncombine_gather = 3\n"
            "command_buffers = false\n\n[compiler.options]\n"
            'xla_gpu_autotune_level = [3]\n"no name" = 3\nxla_gpu_enable_command_buffer = '
            '"FUSION"\n'
        ),
    )
    fixed = (
        '[compiler]\nlatency_hiding = true\ncombine_all_gather = "5 MiB"\ncommand_buffers = false\n'
    )
    assert loads(fixed).compiler == Compiler(
        latency_hiding=True, combine_all_gather="5 MiB", command_buffers=False
    )


def test_python_table_is_checked():
    with pytest.raises(OptionError, match="latency_hiding='yes' is"):
        Compiler(latency_hiding="yes")
    with pytest.raises(OptionError, match="option 'xla_dump_to' is None"):
        Compiler(options={"xla_dump_to": None})
    for key in THRESHOLDS:
        assert "is not a size" in error_text(spmd.Layout(compiler=one(key, "5 apples")))
        assert "-1 is not a size" in error_text(spmd.Layout(compiler=one(key, -1)))


UNKNOWN = (
    "[compiler.options]\nxla_cpu_enable_fast_maths = true\nxla_backend_optimization_level = "
    '"high"\nxla_cpu_enable_fast_math = false\n'
)


def test_options_that_xla_refuses_are_reported_before_the_first_step(golden):
    text = error_text(UNKNOWN)
    golden("compiler_options_that_xla_refuses", text.replace(jax.lib.__version__, "VERSION"))
    fits(
        UNKNOWN.replace("maths", "math")
        .replace('"high"', "1")
        .replace("xla_cpu_enable_fast_math = false\n", "")
    )


def fit(layout):
    optimizer = optax.adam(1e-2)
    mesh = {"mesh": "data=8", "layout": layout}
    result = spmd.fit(
        MODEL,
        (X, Y),
        loss=spmd.losses.cross_entropy,
        optimizer=optimizer,
        batch_size=8,
        steps=3,
        progress=False,
        **mesh,
    )
    return jax.device_get(result.state.params), result


@pytest.mark.system
def test_options_reach_the_program_that_trains(folder):
    """XLA writes each program that it compiles, if asked by an option."""
    dumps = {}
    for level in (1, 2):
        where = folder / str(level)
        options = {"xla_dump_to": str(where), "xla_backend_optimization_level": level}
        layout = spmd.Layout(compiler=Compiler(options=options), mesh=(("data", -1),))
        fit(layout)
        dumps[level] = [path.read_text() for path in where.glob("*train_step*.debug_options")]
        assert len(dumps[level]) == 1, "one step, compiled once"
        assert f"xla_backend_optimization_level: {level}" in dumps[level][0]
    assert dumps[1] != dumps[2]


def test_sweep_compiles_with_the_options(folder):
    layout = spmd.Layout(compiler=Compiler(options={"xla_dump_to": str(folder / "dump")}))
    spmd.sweep(
        lambda: MODEL,
        (X, Y),
        loss=spmd.losses.cross_entropy,
        optimizer=lambda rate: optax.sgd(rate),
        space={"rate": [0.1, 0.2]},
        search="grid",
        batch_size=8,
        steps=1,
        layout=layout,
        progress=False,
    )
    assert list((folder / "dump").glob("*.debug_options"))


def test_training_with_the_table_gives_the_same_bits():
    plain, _ = fit(spmd.Layout(mesh=(("data", -1),)))
    keys = dataclasses.replace(EVERY_KEY, options={"xla_cpu_enable_fast_math": False})
    tabled, result = fit(spmd.Layout(compiler=keys, mesh=(("data", -1),)))
    assert result.trainer._program.functions.options == CPU_DEFAULTS | {
        "xla_cpu_enable_fast_math": False
    }
    jax.tree.map(np.testing.assert_array_equal, plain, tabled)


def test_processes_compare_their_options(monkeypatch):
    """Facts of two processes whose layouts differ in the table alone."""
    facts = []
    monkeypatch.setattr(fit_checks, "check_consistency", facts.append)
    for fast in (True, False):
        trainer = fits(
            f"[compiler]\nlatency_hiding = {json.dumps(fast)}\n[compiler.options]\n"
            f"xla_cpu_enable_fast_math = {json.dumps(fast)}\n"
        )
        with monkeypatch.context() as several:
            several.setattr(jax, "process_count", lambda: 2)
            layout = trainer.layout.to_toml()
            fit_checks.check_processes_agree(trainer._program, {"layout": layout})
    differing = {
        name: (facts[0][name], facts[1][name])
        for name in facts[0]
        if facts[0][name] != facts[1].get(name)
    }
    assert differing == {
        "compiler option xla_cpu_enable_fast_math": ("True", "False"),
        "layout compiler.latency_hiding": ("True", "False"),
        "layout compiler.options.xla_cpu_enable_fast_math": ("True", "False"),
    }


UNSCHEDULED = (
    f"INTERNAL: RET_CHECK failure: get-tuple-element.1034 {BUFFERING_ERROR} loop_add_fusion.1\nmore"
)


def cannot_schedule(monkeypatch, error=UNSCHEDULED):
    """XLA fails, unless it compiles without double buffering."""
    compiled = CompiledFunctions.jit

    def jit(self, function, **options):
        if self.options.get(BUFFERING) == UNROLLING[False]:
            return compiled(self, function, **options)

        def failing(*arguments):
            raise jax.errors.JaxRuntimeError(error)

        return failing

    monkeypatch.setattr(CompiledFunctions, "jit", jit)
    monkeypatch.setenv("XLA_FLAGS", "")


def test_fit_compiles_again_without_double_buffering_where_xla_cannot_schedule_it(
    monkeypatch, caplog
):
    layout = spmd.Layout(mesh=(("data", -1),))
    plain, _ = fit(layout)
    cannot_schedule(monkeypatch)
    retried, result = fit(layout)
    assert result.trainer._program.functions.options == CPU_DEFAULTS | {BUFFERING: UNROLLING[False]}
    jax.tree.map(np.testing.assert_array_equal, plain, retried)
    why = UNSCHEDULED.partition("\n")[0]
    fix = "[compiler] double_buffering = false does so at once."
    said = [line for line in caplog.messages if "double buffering" in line]
    assert said == [
        f"note: compiled again without double buffering, because XLA failed: {why}; {fix}"
    ]


@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        ("key", Compiler(double_buffering=True)),
        ("option", Compiler(options={BUFFERING: UNROLLING[True]})),
    ],
)
def test_double_buffering_that_the_layout_chose_is_an_error_where_xla_cannot_schedule_it(
    name, compiler, monkeypatch, golden
):
    cannot_schedule(monkeypatch)
    with pytest.raises(LayoutError) as refused:
        fit(spmd.Layout(compiler=compiler, mesh=(("data", -1),)))
    golden(f"double_buffering_that_xla_cannot_schedule_{name}", str(refused.value))
    with pytest.raises(LayoutError) as planned:
        check_buffering(
            f"compiling for 8xh100 failed:\n    JaxRuntimeError: {UNSCHEDULED}",
            compiler,
            "this layout",
        )
    assert planned.value.problems[0].why == refused.value.problems[0].why


def test_other_errors_of_xla_and_options_in_xla_flags_are_no_reason_to_compile_again(monkeypatch):
    for error, flags in (("INTERNAL: something else", ""), (UNSCHEDULED, f"--{BUFFERING}=X")):
        with monkeypatch.context() as patch:
            cannot_schedule(patch, error)
            patch.setenv("XLA_FLAGS", flags)
            with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
                fit(spmd.Layout(mesh=(("data", -1),)))


def plan(layout, target="2xcpu"):
    return spmd.plan(
        MODEL,
        (X, Y),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1),
        layout=layout,
        target=target,
    )


def test_plan_compiles_with_the_options_and_prints_them():
    planned = plan(
        spmd.Layout(
            compiler=Compiler(latency_hiding=True, options={"xla_backend_optimization_level": 1})
        )
    )
    options = CPU_DEFAULTS | {"xla_backend_optimization_level": 1}
    assert planned.compiled.options == options == json.loads(planned.to_json())["compiler_options"]
    assert "\ncompiler options: xla_backend_optimization_level=1\n" in str(planned)
    assert "<br>compiler options: xla_backend_optimization_level=1</p>" in planned._repr_html_()
    assert "note: [compiler] latency_hiding: for GPUs, not used on cpu." in planned.notes
    with pytest.raises(
        CompileError,
        match=r"\[compiler.options\] xla_nope = 1\n +XLA refuses it: No such compile option",
    ):
        plan(spmd.Layout(compiler=Compiler(options={"xla_nope": 1})))
