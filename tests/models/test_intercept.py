"""Functions around calls of modules, and names of other libraries that are replaced for a while."""

import functools
import math
import threading

import jax.numpy as jnp
import pytest
from flax import nnx

from spmd.models.intercept import LASTING, ORDER, intercept, original_class
from spmd.models.patches import Patches


class Scaled(nnx.Module):
    def __call__(self, x, *, call=1, module=1):
        return x * call * module


def test_intercept_calls_functions_in_one_order_with_the_arguments_of_the_user():
    calls = []

    def record(name, call, module, /, *args, **kwargs):
        calls.append(name)
        return call(module, *args, **kwargs)

    module = Scaled()
    # one after the other, the innermost of the order last and the outermost in the middle
    for name in (*ORDER[1::2], *ORDER[::2]):
        intercept(module, {name: functools.partial(record, name)})
    assert module(2, call=3, module=5) == 30
    assert calls == [*ORDER]
    assert type(module).__bases__ == (Scaled,) and original_class(module) is Scaled
    assert type(module).__name__ == "Scaled" and isinstance(module, Scaled)


def test_intercept_makes_one_class_for_functions_that_outlive_a_trace():
    def around(call, module, /, *args, **kwargs):
        return -call(module, *args, **kwargs)

    kinds = {}
    for name in ("scope", "outputs"):
        modules = Scaled(), Scaled()
        for module in modules:
            intercept(module, {name: around})
            assert module(jnp.ones(())) == -1
        kinds[name] = {type(module) for module in modules}
    assert "scope" in LASTING and len(kinds["scope"]) == 1
    # a class that were kept would keep arrays of its trace
    assert "outputs" not in LASTING and len(kinds["outputs"]) == 2


def test_patches_are_seen_by_all_threads_and_their_value_by_one():
    patches = Patches("answer", [(math, "tau", "replaced")])
    before, inside, leave = math.tau, threading.Event(), threading.Event()
    values = []

    def stay():
        with patches.scope("other"):
            inside.set()
            leave.wait(60)
            values.append(patches.value)

    thread = threading.Thread(target=stay)
    with pytest.raises(ZeroDivisionError), patches.scope("outer"):
        thread.start()
        assert inside.wait(60)
        with patches.scope("inner"):
            assert patches.value == "inner"
        assert patches.value == "outer" and math.tau == "replaced"
        raise ZeroDivisionError
    assert patches.value is None and math.tau == "replaced"  # the other thread has a scope
    leave.set()
    thread.join(60)
    assert values == ["other"] and math.tau == before


def test_patches_remove_an_attribute_that_was_inherited():
    class Parent:
        name = 1

    class Child(Parent):
        pass

    patches = Patches("name", [(Child, "name", 2)])
    with patches.scope(()):
        assert Child.name == 1
    with patches.scope("a value"):
        assert (Parent.name, Child.name) == (1, 2)
    assert Child.name == 1 and "name" not in vars(Child)
