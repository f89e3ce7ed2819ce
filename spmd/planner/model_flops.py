"""The model's own operations in a step, which MFU counts: those of its products, without recomputation, replicas and bubbles."""

import math
from typing import Any

import jax

from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.cost import attention_products
from spmd.train.activations import Seen
from spmd.train.compiled_step import Program
from spmd.train.loss_trace import trace_objective

PASSES = 3  # a backward pass takes twice the operations of the forward pass (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)


def model_flops(program: Program) -> float:
    """FLOPs of the model in a step on a full batch, of all devices: three times those of the loss, traced for a single device."""
    placed = program.placed.with_layout(abstract_mesh(MeshSpec((("data", 1),))), Layout(), accumulate=1)
    _, jaxpr = trace_objective(placed, placed.objective.for_training(), program.sample, program.rows, Seen(placed.resolved), {})
    return PASSES * flops(jaxpr.jaxpr)


def flops(jaxpr: Any) -> float:
    """FLOPs of the matrix products, convolutions and attention kernels of a jaxpr; a loop of unknown length counts once.

    >>> w = jax.numpy.ones((8, 8))
    >>> def run(x):
    ...     return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]
    >>> flops(jax.make_jaxpr(run)(jax.numpy.ones((4, 8))).jaxpr) == 5 * 2 * 4 * 8 * 8
    True
    """
    return sum(map(_flops, jaxpr.eqns))


def _flops(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    inputs = [variable.aval for variable in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * equation.outvars[0].aval.size * math.prod(inputs[0].shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel = inputs[1]
        return 2.0 * equation.outvars[0].aval.size * kernel.size / kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    if name.startswith("ragged_dot"):
        return 2.0 * inputs[0].size * inputs[1].shape[-1]
    if name.startswith("dot_product_attention_fwd"):  # cuDNN's, whose primitives JAX keeps private
        return attention_products("", inputs[0].shape, inputs[1].shape)
    if name == "pallas_call" and (attention := attention_products(params.get("name") or "", *(x.shape for x in inputs[:2]))):
        return attention
    inner = [flops(jaxpr) for jaxpr in _jaxprs(params)]
    if name == "pallas_call":
        return sum(inner) * math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    return max(inner, default=0.0) if name == "cond" else sum(inner) * params.get("length", 1) if name == "scan" else sum(inner)


def _jaxprs(params: Any) -> list[Any]:
    """The jaxprs that an equation runs."""
    leaves = jax.tree.leaves(list(params.values()), is_leaf=lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr"))
    jaxprs = [getattr(leaf, "jaxpr", leaf) for leaf in leaves]
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]
