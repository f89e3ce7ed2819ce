"""The bytes that a transformation sends, counted from its traced program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from spmd.base.tree import Tree
from spmd.base.xla import shard_map
from spmd.wire.comm_log import CommLog, read_collectives
from spmd.wire.states import check_mesh, check_transformation, local_params, model_axes_of


def comm_log(
    tx: optax.GradientTransformation | Callable,
    shapes: Tree,
    mesh: Mesh | AbstractMesh,
    **extra: Any,
) -> CommLog:
    """Every collective of one update; prints as a table. Nothing is compiled, and no device is
    needed.

    Args:
      tx: one of `spmd.wire`, or an optimizer that contains some. For `local_sgd` it is a step in
        which all fragments are synchronized. Or a function that calls `jax.shard_map`, such as a
        step with `gather` in its model.
      shapes: of the parameters on one worker (arrays, or `jax.ShapeDtypeStruct`); for a function,
        the tuple of its arguments.
      mesh: with the axes that `tx` names. A `jax.sharding.AbstractMesh` will do.
      extra: what `tx.update` needs beside, such as `events=clock.step_inputs(0)` for
        `parameter_server`.

    Returns:
      The collectives, with axes, payload, times and bytes.

    Example:
      >>> from spmd import wire
      >>> sent = wire.log(
      ...     wire.all_reduce("data"), {"w": jnp.zeros((1024, 1024))}, AbstractMesh((8,), ("data",))
      ... )
      >>> print(str(sent).splitlines()[2])
      reduce_gradients/exact/0  all_reduce  data (8)  float32[1024, 1024]  1      7.0 MiB
    """
    check_mesh(mesh)
    sizes = dict(mesh.shape)
    if callable(tx):
        return read_collectives(jax.make_jaxpr(tx)(*shapes).jaxpr, sizes)

    check_transformation("tx", tx)

    def update(params: Tree) -> Any:
        state = tx.init(params)
        # Local parameters stand for the gradients, which have their shapes; what workers receive
        # from servers is thus counted, too. The state is not returned, but `jax.make_jaxpr` keeps
        # the equations that make it.
        updates, _ = tx.update(local_params(state, params), state, params, **extra)
        return updates

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))

    spec = PartitionSpec()
    params = jax.tree.map(abstract, shapes)
    # Asked for in a region: the `init` of a user's transformation may ask which worker it is.
    model_axes: list[str] = []

    def find_model_axes(params: Tree) -> None:
        model_axes.extend(model_axes_of(tx.init(params)))

    probe = shard_map(
        find_model_axes, mesh=mesh, in_specs=spec, out_specs=None, axis_names=mesh.axis_names
    )
    jax.eval_shape(probe, params)
    manual = tuple(axis for axis in mesh.axis_names if axis not in model_axes)
    mapped = shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=manual)
    program = jax.make_jaxpr(mapped)(params)
    return read_collectives(program.jaxpr, sizes)


def bytes_sent(
    tx: optax.GradientTransformation | Callable,
    shapes: Tree,
    mesh: Mesh | AbstractMesh,
    **extra: Any,
) -> int:
    """Bytes that one device sends in one update (in one synchronization of all parameters, for
    `local_sgd`).

    >>> from spmd import wire
    >>> mesh = AbstractMesh((8,), ("data",))
    >>> exact = bytes_sent(wire.all_reduce("data"), {"w": jnp.zeros((1024, 1024))}, mesh)
    >>> int8 = bytes_sent(
    ...     wire.all_reduce("data", wire.int8()), {"w": jnp.zeros((1024, 1024))}, mesh
    ... )
    >>> exact, int8, round(exact / int8, 2)
    (7340032, 1863680, 3.94)

    Args:
      tx, shapes, mesh, extra: as for `log`.

    Returns:
      Bytes.
    """
    return comm_log(tx, shapes, mesh, **extra).bytes()
