"""`wire.gather`: parameters gathered where they are used, their gradients reduced in the backward
pass.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd import wire
from spmd.errors import CommunicationError, OptionError
from tests.wire.test_transformations import MESH, make_batches

LAYERS, WIDTH = 4, 16
# [layers, ...], the arrays sharded along dim 1
SPEC = {"kernel": jax.P(None, "data"), "bias": jax.P(None, "data")}


def make_stack(layers=LAYERS, width=WIDTH):
    keys = jax.random.split(jax.random.key(0), layers)
    kernel = jnp.stack([jax.random.normal(key, (width, width)) / width**0.5 for key in keys])
    return {"kernel": kernel, "bias": jnp.zeros((layers, width)) + 0.01}


def apply_layer(layer, x):
    return jnp.tanh(x @ layer["kernel"] + layer["bias"])


def gathered_loss(codec, shards, residuals, batch):
    """The loss of a scanned, checkpointed stack whose layers are gathered one at a time."""

    @jax.checkpoint
    def body(x, layer):
        shards, residual = layer
        return apply_layer(wire.gather(shards, "data", codec, residual=residual), x), None

    x, _ = jax.lax.scan(body, batch[0], (shards, residuals))
    return jnp.mean((x[:, :1] - batch[1]) ** 2)


def full_loss(layers, batch):
    x, _ = jax.lax.scan(lambda x, layer: (apply_layer(layer, x), None), batch[0], layers)
    return jnp.mean((x[:, :1] - batch[1]) ** 2)


def grads_of(codec, feedback):
    """Gradients of the shards, joined, and the next residuals of each worker, [workers, layers,
    ...].
    """

    def run(shards, residuals, batch):
        own = jax.tree.map(lambda x: x[0], residuals) if feedback else None
        if not feedback:
            return jax.grad(functools.partial(gathered_loss, codec))(shards, None, batch), residuals
        grads, after = jax.grad(functools.partial(gathered_loss, codec), (0, 1))(shards, own, batch)
        return grads, jax.tree.map(lambda x: x[None], after)

    specs = (SPEC, jax.P("data"))
    return jax.jit(
        jax.shard_map(
            run, mesh=MESH, in_specs=(*specs, jax.P("data")), out_specs=specs, check_vma=False
        )
    )


def zero_residuals(layers=LAYERS, width=WIDTH):
    return jax.tree.map(lambda leaf: jnp.zeros((8, *leaf.shape)), make_stack(layers, width))


def test_exact_gradients_are_the_means_of_full_ones():
    batch = make_batches(1)[0]
    grads, _ = grads_of(wire.exact(), feedback=False)(make_stack(), zero_residuals(), batch)
    full = jax.grad(full_loss)(make_stack(), batch)
    for path, grad in full.items():
        np.testing.assert_allclose(grads[path], grad, atol=1e-7)
    assert max(np.abs(grad).max() for grad in jax.tree.leaves(full)) > 1e-3


@pytest.mark.system
def test_int8_with_feedback_in_a_scanned_checkpointed_stack_equals_the_exchange_after_the_fact():
    """Three steps of gradients at fixed parameters: the same bits as full local gradients,
    exchanged per layer by `reduce_bucket`.
    """
    codec = wire.int8(block=16)
    stack, batches = make_stack(), make_batches(3)

    def afterwards(layers, residuals, batch):
        from spmd.wire.codec.base import Bucket
        from spmd.wire.reduction import reduce_bucket
        from spmd.wire.shard_layout import ShardLayout
        from spmd.wire.transfer import Transfer

        grads = jax.grad(full_loss)(layers, batch)
        transfers = []
        for path in ("bias", "kernel"):
            layout = ShardLayout(layers[path].shape[1:], ("data",), ("data",), (8,))
            used = codec if codec.compresses(layout, layout.shape) else wire.exact()
            transfers.append(Transfer(layout, used, not used.lossless))
        means, after = {"bias": [], "kernel": []}, {"bias": [], "kernel": []}
        for layer in range(LAYERS):
            for path, transfer in zip(("bias", "kernel"), transfers, strict=True):
                memory = [
                    {"residual": residuals[path][:, layer]} if transfer.error_feedback else {}
                ]
                mean, entry = reduce_bucket(
                    [transfer], [grads[path][layer]], memory, Bucket((transfer.shard_layout,))
                )
                means[path].append(mean[0])
                after[path].append(entry[0].get("residual", residuals[path][:, layer]))
        stacked = {path: jnp.stack(parts) for path, parts in means.items()}
        return stacked, {path: jnp.stack(parts, axis=1) for path, parts in after.items()}

    late = jax.jit(
        jax.shard_map(
            afterwards,
            mesh=MESH,
            in_specs=(jax.P(), jax.P("data"), jax.P("data")),
            out_specs=(SPEC, jax.P("data")),
            check_vma=False,
        )
    )
    early, ours, theirs = grads_of(codec, feedback=True), zero_residuals(), zero_residuals()
    for batch in batches:
        grads, ours = early(stack, ours, batch)
        expected, theirs = late(stack, theirs, batch)
        for path in grads:
            np.testing.assert_array_equal(grads[path], expected[path])
            np.testing.assert_array_equal(ours[path], theirs[path])
    assert np.any(np.asarray(ours["kernel"]))
    exact, _ = grads_of(wire.exact(), feedback=False)(stack, zero_residuals(), batches[-1])
    assert np.abs(np.asarray(exact["kernel"]) - np.asarray(grads["kernel"])).max() > 1e-6


@pytest.mark.system
def test_temporaries_do_not_grow_with_the_number_of_layers():
    def temporaries(layers, width=64):
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            (make_stack(layers, width), zero_residuals(layers, width)),
        )
        batch = (
            jax.ShapeDtypeStruct((32, width), jnp.float32),
            jax.ShapeDtypeStruct((32, 1), jnp.float32),
        )
        program = grads_of(wire.int8(block=16), feedback=True).lower(*shapes, batch)
        return program.compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(4), temporaries(32)
    layer = 64 * 64 * 4
    # the activation [4 rows, 64] of each further layer, kept for the backward pass
    carried = 28 * 4 * 64 * 4
    # 28 further layers; their full gradients would be 28 * 16 KiB
    assert many - few < carried + layer, (few, many)
    assert 28 * layer > 5 * (carried + layer)


def test_all_arrays_of_a_layer_are_sent_in_one_bucket():
    arguments = (make_stack(), zero_residuals(), make_batches(1)[0])
    ops = wire.log(grads_of(wire.exact(), feedback=False), arguments, MESH).ops
    counts = {
        kind: sum(op.count for op in ops if op.kind == kind)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    layer = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of its parameters, and of their gradients
    assert (
        wire.bytes_sent(grads_of(wire.exact(), feedback=False), arguments, MESH)
        == LAYERS * 3 * layer * 7 // 8
    )
    # gathered again in the backward pass
    assert counts == {"all_gather": 2 * LAYERS, "reduce_scatter": LAYERS, "all_reduce": 0}


def test_parameters_may_be_gathered_as_bfloat16():
    def gather(shard):
        return wire.gather(shard, "data", weights="bfloat16")

    shard = jax.random.normal(jax.random.key(0), (16, 4))
    full = jax.jit(
        jax.shard_map(gather, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False)
    )(shard)
    np.testing.assert_array_equal(full, shard.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dim_may_be_sharded(dim):
    full = jax.random.normal(jax.random.key(0), (8, 16, 24))
    spec = jax.P(*[None] * dim, "data")
    weight = jax.random.normal(jax.random.key(1), (8, *full.shape))

    def run(shard, weight):
        return jax.grad(lambda shard: jnp.sum(wire.gather(shard, "data", dim=dim) * weight[0]))(
            shard
        ), wire.gather(shard, "data", dim=dim)

    mapped = jax.jit(
        jax.shard_map(
            run,
            mesh=MESH,
            in_specs=(spec, jax.P("data")),
            out_specs=(spec, jax.P()),
            check_vma=False,
        )
    )
    grad, back = mapped(full, weight)
    np.testing.assert_array_equal(back, full)
    np.testing.assert_allclose(grad, weight.mean(0), atol=1e-6)


def test_bad_input_is_named():
    def run(function, *arrays):
        mapped = jax.shard_map(
            function, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False
        )
        return jax.jit(mapped)(*arrays)

    with pytest.raises(CommunicationError, match=r"dim=2 of a shard float32\[2, 4\]"):
        run(lambda shard: wire.gather(shard, "data", dim=2), jnp.ones((16, 4)))
    with pytest.raises(
        CommunicationError,
        match=r"the residual of w is float32\[2, 4\]; its full gradient is \[16, 4\]",
    ):
        run(
            lambda shard: wire.gather({"w": shard}, "data", wire.int8(), residual={"w": shard})[
                "w"
            ],
            jnp.ones((16, 4)),
        )
    with pytest.raises(CommunicationError, match=r"gather: residual is a tree(.|\n)*residual_like"):
        run(
            lambda shard: wire.gather({"w": shard}, "data", wire.int8(), residual=shard)["w"],
            jnp.ones((16, 4)),
        )
    with pytest.raises(CommunicationError, match="gather: dim is a tree"):
        run(lambda shard: wire.gather({"w": shard}, "data", dim={"v": 0})["w"], jnp.ones((16, 4)))
    with pytest.raises(CommunicationError, match="dim='a' of a shard"):
        run(lambda shard: wire.gather(shard, "data", dim="a"), jnp.ones((16, 4)))
    with pytest.raises(CommunicationError, match=r"n is int32\[2\](.|\n)*jax.lax.all_gather"):
        run(lambda n: wire.gather({"n": n}, "data")["n"], jnp.arange(16))
    with pytest.raises(
        OptionError,
        match=r"without error feedback(.|\n)*residual=wire.residual_like\(shards, axes\)",
    ):
        run(lambda shard: wire.gather(shard, "data", wire.sign()), jnp.ones((16, 4)))
    with pytest.raises(OptionError, match='"exact" or "bfloat16"'):
        run(lambda shard: wire.gather(shard, "data", weights="int8"), jnp.ones((16, 4)))
    with pytest.raises(CommunicationError, match="not a manual mesh axis"):
        wire.gather(jnp.ones((16, 4)), "data")


def test_a_codec_that_keeps_arrays_is_refused_by_gather():
    codec = wire.power_sgd(rank=1, min_compression=1.0)

    def run(shard):
        return wire.gather(shard, "data", codec, residual=wire.residual_like(shard, "data"))

    with pytest.raises(OptionError, match=r"keeps arrays from step to step(.|\n)*wire.int8"):
        jax.jit(
            jax.shard_map(
                run, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False
            )
        )(jnp.ones((64, 32)))


@pytest.mark.parametrize("like, said", [
    ({"w": jnp.ones((65, 4))},
        r"the shard of w is float32\[8, 4\]; that of float32\[65, 4\] is \[65, 4\]"),
    ({"w": jnp.ones((8, 4))}, r"that of float32\[8, 4\] is \[1, 4\]"),
    ({"v": jnp.ones((64, 4))}, "all_gather: like is a tree"),
])  # fmt: skip
def test_all_gather_refuses_full_arrays_that_the_shards_are_not_of(like, said):
    def run(shard, like):
        return wire.all_gather({"w": shard}, "data", like)["w"]

    run = jax.jit(
        jax.shard_map(
            run, mesh=MESH, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P(), check_vma=False
        )
    )
    full = jnp.arange(256.0).reshape(64, 4)
    np.testing.assert_array_equal(run(full, {"w": full}), full)
    with pytest.raises(CommunicationError, match=said):
        run(full, like)
