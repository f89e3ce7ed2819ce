"""Parameters that are not trained, and adapters: in the step, its program, its state and its
checkpoints.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd import Adapter, Train
from spmd.base.tree import flatten
from spmd.errors import ModelError
from spmd.models.flax_nnx import hand_over
from spmd.models.lora import merge_adapters
from spmd.models.quantized import dequantize, quantize
from spmd.train.state import State

WIDTH, LAYERS = 16, 4
NAMED = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
ADAPTERS = (Adapter("{stack,blocks}/**", rank=2, alpha=4.0),)
ALL, HEAD = Train(), Train(include="head/**")
ONE = {"mesh": spmd.make_mesh("data=1", devices=jax.devices()[:1]), "layout": spmd.Layout()}
AXES = (("embed", None), ("mlp", "model"))
ALL_REDUCE = spmd.Gradients("all_reduce")


def fsdp(gather="layer", **gradients):
    layout = spmd.Layout.load("fsdp")
    return dataclasses.replace(
        layout, gradients=dataclasses.replace(layout.gradients, gather=gather, **gradients)
    )


LAYOUTS = {
    "one device": ONE,
    "fsdp": {"mesh": "data=8", "layout": fsdp()},
    "fsdp, gathered in full": {"mesh": "data=8", "layout": fsdp("full")},
    "fsdp by XLA": {
        "mesh": "data=8",
        "layout": dataclasses.replace(fsdp(), gradients=spmd.Gradients()),
    },
    "int8 with error feedback": {
        "mesh": "data=8",
        "layout": fsdp(codec="int8", error_feedback=True),
    },
    "tensor parallel": {
        "mesh": "data=4,model=2",
        "layout": spmd.Layout(axes=AXES, gradients=ALL_REDUCE),
    },
    "pipeline": {
        "mesh": "data=4,stage=2",
        "layout": spmd.Layout(pipeline=spmd.Pipeline("stage"), gradients=ALL_REDUCE),
    },
    "circular": {
        "mesh": "data=4,stage=2",
        "layout": spmd.Layout(
            pipeline=spmd.Pipeline("stage", schedule="circular", groups=2), gradients=ALL_REDUCE
        ),
    },
    "1f1b": {
        "mesh": "data=4,stage=2",
        "layout": spmd.Layout(
            pipeline=spmd.Pipeline("stage", schedule="1f1b"), gradients=ALL_REDUCE
        ),
    },
    "parameter server": {"mesh": "data=8", "layout": spmd.Layout.load("parameter_server")},
}


class Net(nnx.Module):
    """A stack of layers, or a list of blocks, between two layers."""

    def __init__(self, blocks=False, width=WIDTH, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, width, rngs=rngs)
        layers = [nnx.Linear(width, width, rngs=rngs, kernel_init=NAMED) for _ in range(LAYERS)]
        self.blocks, self.stack = (
            (nnx.List(layers), None) if blocks else (None, spmd.nn.LayerStack(layers))
        )
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        for block in self.blocks or ():
            x = jnp.tanh(block(x))
        return self.head(x if self.stack is None else self.stack(x))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)


def batch(number=0):
    rng = np.random.default_rng(number)
    return {
        "x": rng.normal(size=(16, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(16, 4)).astype(np.float32),
    }


def made(**options):
    """The model with its arrays."""
    with nnx.use_eager_sharding(False):
        return Net(**options)


def trainer_of(name, train=ALL, adapters=(), model=None, optimizer=None, **options):
    chosen = LAYOUTS[name]
    layout = dataclasses.replace(chosen["layout"], train=train, adapters=adapters)
    model, optimizer = model or (lambda: Net()), optimizer or optax.adam(1e-2)
    return spmd.Trainer(
        model, loss=loss, optimizer=optimizer, mesh=chosen["mesh"], layout=layout, **options
    )


def train(trainer, steps=3, state=None):
    state = trainer.init() if state is None else state
    for number in range(steps):
        state, metrics = trainer.step(state, batch(number))
    return state, metrics["loss"]


def arrays(tree):
    return {path: np.asarray(leaf) for path, leaf in flatten(jax.device_get(tree)).items()}


def trained_arrays(trainer, state):
    return arrays(trainer.placed.states.unpacked(state.params))


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)


def only_head(optimizer):
    """The optimizer for the head, and nothing for the rest."""

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "head" if path[0].key == "head" else "rest", params
        )

    return optax.multi_transform({"head": optimizer, "rest": optax.set_to_zero()}, labels)


@pytest.mark.sampled(system=4)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "parameter server"])
def test_included_parameters_train_as_with_multi_transform(name):
    trainer, everything = (
        trainer_of(name, HEAD),
        trainer_of(name, optimizer=only_head(optax.adam(1e-2))),
    )
    (state, last), (reference, expected) = train(trainer), train(everything)
    theirs = {
        path: leaf
        for path, leaf in trained_arrays(everything, reference).items()
        if path.startswith("head/")
    }
    assert_equal(trained_arrays(trainer, state), theirs)
    assert last == expected
    assert not np.array_equal(theirs["head/kernel"], made().head.kernel.get_value())


@pytest.mark.system
def test_included_parameters_train_as_in_a_loop_by_hand():
    trainer = trainer_of("one device", HEAD)
    state, _ = train(trainer)
    graphdef, params = nnx.split(made())
    params, optimizer = nnx.to_pure_dict(params), only_head(optax.adam(1e-2))
    opt = optimizer.init(params)

    @jax.jit
    def step(params, opt, rows):
        grads = jax.grad(lambda params: loss(nnx.merge(graphdef, params), rows).sum())(params)
        updates, opt = optimizer.update(
            jax.tree.map(lambda g: g / len(rows["x"]), grads), opt, params
        )
        return optax.apply_updates(params, updates), opt

    for number in range(3):
        params, opt = step(params, opt, batch(number))
    assert_equal(
        arrays(state.params),
        {path: leaf for path, leaf in arrays(params).items() if path.startswith("head/")},
    )


FLOAT_LAYOUTS = [name for name in LAYOUTS if "int8" not in name]
STACKS_AND_LISTS = [(name, False) for name in FLOAT_LAYOUTS]
# a pipeline is made of a stack
STACKS_AND_LISTS += [
    (name, True) for name in FLOAT_LAYOUTS if not LAYOUTS[name]["layout"].pipeline.axis
]


@pytest.mark.sampled(quick=45, system=8)
@pytest.mark.parametrize("kept", [None, "int8", "nf4"])
@pytest.mark.parametrize(("name", "blocks"), STACKS_AND_LISTS)
def test_adapters_train_alike_under_every_layout(name, kept, blocks):
    how = {
        "train": Train(frozen=kept, block=4 if kept else 64),
        "adapters": ADAPTERS,
        "model": lambda: Net(blocks),
    }
    (state, last), (reference, expected) = (
        train(trainer_of(one, **how)) for one in (name, "one device")
    )
    assert abs(last - expected) < 2e-6
    ours, theirs = trained_arrays(trainer_of(name, **how), state), arrays(reference.params)
    assert ours.keys() == theirs.keys() and all(
        path.endswith(("lora_a", "lora_b")) for path in ours
    )
    for path in ours:
        np.testing.assert_allclose(ours[path], theirs[path], rtol=0, atol=1e-4, err_msg=path)


@pytest.mark.system
@pytest.mark.parametrize("kept", ["int8", "nf4"])
def test_quantized_weights_compute_with_their_values(kept):
    trainer = trainer_of("fsdp", Train(frozen=kept, block=4), ADAPTERS)
    state, _ = train(trainer, 1)
    model = made()
    for layer in (model.first, model.stack.layers, model.head):
        layer.kernel.set_value(dequantize(quantize(layer.kernel.get_value(), kept, 4)))
    exact = trainer_of("fsdp", Train(), ADAPTERS, model=model)
    reference, _ = train(exact, 1)
    for path, leaf in arrays(state.params).items():
        np.testing.assert_allclose(leaf, arrays(reference.params)[path], rtol=1e-6, atol=1e-6)
    rebuilt = trainer.rebuild(state)
    np.testing.assert_array_equal(
        rebuilt.stack.layers.kernel.get_value(), model.stack.layers.kernel.get_value()
    )
    assert trainer.evaluate(state, batch())["loss"] == pytest.approx(
        exact.evaluate(reference, batch())["loss"], abs=1e-6
    )


@pytest.mark.system
def test_merged_weights_compute_what_adapters_do():
    trainer = trainer_of("fsdp", Train(), ADAPTERS)
    state, _ = train(trainer, 5)
    adapted, x = trainer.rebuild(state), batch()["x"]
    merged = merge_adapters(adapted)
    assert type(merged.stack.layers) is nnx.Linear
    np.testing.assert_allclose(merged(x), adapted(x), rtol=0, atol=1e-6)
    np.testing.assert_allclose(trainer.predict(state, x), adapted(x), rtol=0, atol=1e-6)
    # a thousand times what merged weights may differ by: adapters do something
    assert np.abs(adapted(x) - made()(x)).max() > 1e-3


@pytest.mark.system
def test_given_module_stays_as_it_is():
    model = made()
    before = arrays(nnx.to_pure_dict(nnx.state(model)))
    trainer = trainer_of("fsdp", Train(), ADAPTERS, model=model)
    train(trainer, 1)
    assert type(model.stack.layers) is nnx.Linear
    assert_equal(arrays(nnx.to_pure_dict(nnx.state(model))), before)


def test_handed_over_weights_are_not_copied():
    model = made()
    on_mesh = jax.NamedSharding(ONE["mesh"], jax.P())
    nnx.update(model, jax.device_put(nnx.state(model), on_mesh))
    before = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(model))}
    hand_over(model)
    state = trainer_of("one device", Train(), ADAPTERS, model=model).init()
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.frozen)} == before
    with pytest.raises(ModelError, match="handed over"):
        model(batch()["x"])


@pytest.mark.system
def test_adapters_follow_the_seed():
    first, same, other = (
        trainer_of("one device", Train(), ADAPTERS, seed=seed).init().params for seed in (1, 1, 2)
    )
    assert_equal(arrays(first), arrays(same))
    assert not np.array_equal(
        arrays(first)["stack/layers/lora_a"], arrays(other)["stack/layers/lora_a"]
    )


def reduced_bytes(program):
    """Bytes of the results of all collectives that reduce, in a compiled program."""
    lines = re.findall(
        r"= (.*?) (?:all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", program.as_text()
    )
    arrays = [dims for line in lines for dims in re.findall(r"f32\[([\d,]*)\]", line)]
    return 4 * sum(
        int(np.prod([int(dim) for dim in dims.split(",") if dim] or [1])) for dims in arrays
    )


@pytest.mark.system
@pytest.mark.parametrize("name", ["fsdp", "fsdp, gathered in full", "tensor parallel"])
def test_only_trained_parameters_have_gradients_moments_and_bytes_on_the_wire(name):
    trainer = trainer_of(name, HEAD)
    moments = [path for path, leaf in flatten(trainer.abstract_state.opt).items() if leaf.ndim]
    assert len(moments) == 4 and all(path.rpartition("/")[0].endswith("/head") for path in moments)
    program, _ = trainer.prepare(batch())
    kernel, bias, metrics = 4 * WIDTH * 4, 4 * 4, 4 + 8
    sent = {op.where.partition("/")[0]: 0 for op in trainer.wire.ops if op.kind != "all_gather"}
    for op in trainer.wire.ops:
        if op.kind != "all_gather":
            sent[op.where.partition("/")[0]] += op.count * 4 * int(np.prod(op.shape))
    assert sent == {"metrics": metrics, "reduce_gradients": kernel + bias}
    if name != "tensor parallel":  # where activations are reduced, too
        assert reduced_bytes(program.compile()) == kernel // 8 + bias + metrics
        assert reduced_bytes(trainer_of(name).prepare(batch())[0].compile()) > 4 * (
            kernel // 8 + bias
        )


def test_residuals_are_those_of_trained_parameters():
    exchange = trainer_of("int8 with error feedback", Train(), ADAPTERS).abstract_state.exchange
    assert exchange and all(path.rpartition("/")[2].startswith("lora_") for path in exchange)


@pytest.mark.system
@pytest.mark.parametrize(("kept", "blocks"), [(None, False), ("int8", True)])
def test_workers_that_train_adapters_alone_send_nothing_else(kept, blocks):
    """DiLoCo (arXiv:2311.08105, algorithm 1) against a loop over its workers on one device, in
    which frozen weights are constants.
    """
    workers, every, inner, outer = 8, 2, optax.adam(1e-2), optax.sgd(0.7, 0.9, nesterov=True)
    server = spmd.ParameterServer(mode="local", every=every, outer_rate=0.7, outer_momentum=0.9)
    layout = spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=server)
    layout = dataclasses.replace(
        layout, train=Train(frozen=kept, block=4 if kept else 64), adapters=ADAPTERS
    )
    trainer = spmd.Trainer(
        lambda: Net(blocks), loss=loss, optimizer=inner, mesh="data=8", layout=layout
    )
    state = trainer.init()
    frozen, start = arrays(state.frozen), trained_arrays(trainer, state)
    graphdef, params = nnx.split(trainer.rebuild(state), nnx.Param)

    @jax.jit
    def local_step(adapters, opt, rows):
        def mean_loss(adapters):
            merged = {
                path: adapters.get(path, leaf)
                for path, leaf in flatten(nnx.to_pure_dict(params)).items()
            }
            leaves = jax.tree.unflatten(jax.tree.structure(params), list(merged.values()))
            return loss(nnx.merge(graphdef, leaves), rows).mean()

        updates, opt = inner.update(jax.grad(mean_loss)(adapters), opt, adapters)
        return optax.apply_updates(adapters, updates), opt

    synchronized, momentum = start, outer.init(start)
    local, opts, sent = [start] * workers, [inner.init(start)] * workers, []
    for number in range(4):
        state, metrics = trainer.step(state, batch(number))
        sent.append(metrics["wire_bytes"] - trainer.wire.bytes(where="metrics"))
        for worker in range(workers):
            rows = {
                name: value[2 * worker : 2 * worker + 2] for name, value in batch(number).items()
            }
            local[worker], opts[worker] = local_step(local[worker], opts[worker], rows)
        if (number + 1) % every == 0:
            delta = jax.tree.map(
                lambda read, *each: read - sum(each) / workers, synchronized, *local
            )
            updates, momentum = outer.update(delta, momentum)
            synchronized = optax.apply_updates(synchronized, updates)
            local = [synchronized] * workers
    ours = trained_arrays(trainer, state)
    assert ours.keys() == start.keys() and all(
        path.rpartition("/")[2].startswith("lora_") for path in ours
    )
    for path, value in ours.items():
        np.testing.assert_allclose(value, synchronized[path], rtol=0, atol=1e-6, err_msg=path)
        assert np.abs(value - start[path]).max() > 1e-3, path
    assert_equal(arrays(state.frozen), frozen)
    assert state.exchange.keys() == flatten(state.params).keys()
    adapters = sum(
        4 * (workers - 1) * leaf.size // workers
        for leaf in jax.tree.leaves(trainer.abstract_state.params)
    )
    assert sent == [0, 2 * adapters, 0, 2 * adapters]  # there and back


@pytest.mark.system
@pytest.mark.parametrize("name", ["one device", "fsdp"])
def test_memory_is_that_of_codes_and_one_layer(name):
    width = 256
    layer, model = 4 * width * width, lambda: Net(width=width)

    def memory(kept):
        program, _ = trainer_of(
            name, Train(frozen=kept, block=16 if kept else 64), ADAPTERS, model=model
        ).prepare(batch())
        analysis = program.compile().memory_analysis()
        return analysis.argument_size_in_bytes / layer, analysis.temp_size_in_bytes / layer

    shards = 1 if name == "one device" else 8
    for kept, share in (("int8", 1 / 4 + 1 / 16), ("nf4", 1 / 8 + 1 / 16)):
        arguments, temporaries = memory(kept)
        others = 0.3 + 1.5 / shards  # adapters with their moments, and the other layers
        assert arguments < LAYERS * share / shards + others
        # a layer's values, and codes of two layers; with all layers it would be more than 4
        assert temporaries < 2.5
    assert memory(None)[0] > LAYERS / shards


@pytest.mark.system
def test_gradients_of_a_list_of_blocks_do_without_frozen_ones():
    trainer = trainer_of("fsdp", Train(), ADAPTERS, model=lambda: Net(blocks=True))
    program, _ = trainer.prepare(batch())
    assert {"blocks/0/kernel", "blocks/3/lora_a"} <= program.sync.layerwise
    mixed = trainer_of(
        "fsdp, gathered in full",
        Train(include="{blocks/3,head}/**"),
        model=lambda: Net(blocks=True),
    )
    reference = trainer_of(
        "one device", Train(include="{blocks/3,head}/**"), model=lambda: Net(blocks=True)
    )
    ours, theirs = arrays(train(mixed)[0].params), arrays(train(reference)[0].params)
    for path in ours:
        np.testing.assert_allclose(ours[path], theirs[path], rtol=1e-4, atol=1e-5)


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2}, {"precision": "bfloat16"}, {"precision": "bfloat16", "accumulate": 2}],
)
def test_accumulation_and_precision(options):
    how = {
        "train": Train(frozen="bfloat16" if "precision" in options else "int8", block=64),
        "adapters": ADAPTERS,
    }
    how["train"] = dataclasses.replace(
        how["train"], block=4 if how["train"].frozen == "int8" else 64
    )
    (state, last), (_, expected) = (
        train(trainer_of(name, **how, **options)) for name in ("fsdp", "one device")
    )
    assert abs(last - expected) < (2e-2 if "precision" in options else 1e-5)
    assert isinstance(state, State)
    if "precision" in options:
        dtypes = {path: leaf.dtype.name for path, leaf in flatten(state.frozen).items()}
        assert (
            dtypes["stack/layers/kernel"] == "bfloat16"
            and dtypes["stack/layers/bias"] == dtypes["head/bias"] == "float32"
        )


@pytest.mark.system
def test_loss_may_read_a_quantized_kernel_itself():
    def by_hand(model, batch):
        x = model.stack(jnp.tanh(model.first(batch["x"])))
        return jnp.mean((x @ model.head.kernel[...] + model.head.bias - batch["y"]) ** 2, -1)

    layout = dataclasses.replace(fsdp(), train=Train(frozen="int8", block=4), adapters=ADAPTERS)
    how = {"optimizer": optax.adam(1e-2), "mesh": "data=8", "layout": layout}
    (_, ours), (_, theirs) = (
        train(spmd.Trainer(lambda: Net(), loss=one, **how)) for one in (by_hand, loss)
    )
    assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.system
def test_plan_has_a_line_for_frozen_parameters():
    layout = dataclasses.replace(fsdp(), train=Train(frozen="nf4", block=4), adapters=ADAPTERS)
    plan = spmd.plan(
        lambda: Net(), batch(), loss=loss, optimizer=optax.adam(1e-2), target="8xcpu", layout=layout
    )
    state = trainer_of("fsdp", layout.train, ADAPTERS).init()
    on_device = [
        sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        for tree in (state.params, state.frozen)
    ]
    assert [plan.memory.parameters, plan.memory.frozen] == on_device and plan.memory.per_device[
        "frozen"
    ] == on_device[1]
    assert "frozen parameters" in str(plan)
    assert "it is not trained" in str(plan.explain("stack/layers/kernel/codes"))
    assert "frozen/stack/layers/kernel/codes  int8" not in str(
        plan.placements()
    ) and "frozen/stack/layers/kernel/codes" in str(plan.placements())


@pytest.mark.system
@pytest.mark.parametrize("kept", [None, "int8"])
def test_exported_model_computes_the_same(kept, tmp_path):
    trainer = trainer_of("fsdp", Train(frozen=kept, block=4 if kept else 64), ADAPTERS)
    state, _ = train(trainer)
    x = batch()["x"]
    spmd.export(trainer, state, tmp_path / "exact")
    np.testing.assert_allclose(
        spmd.load_exported(tmp_path / "exact")(x), trainer.predict(state, x), rtol=1e-6, atol=1e-6
    )
    report = spmd.export(trainer, state, tmp_path / "int8", weights="int8", check=batch())
    low = {stored.path for stored in report.arrays if stored.int8}
    assert ("frozen/stack/layers/kernel" in low) == (
        kept is None
    ) and "params/stack/layers/lora_a" in low
    assert not any(path.endswith(("/codes", "/scales")) for path in low)
