"""The layout's `[[precision]]` in a step: layers that its rules match compute their products in a
low precision.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from spmd.base.path_match import compiled, match_all
from spmd.errors import LayoutError, OptionError, Problem, closest, raise_problems
from spmd.layout.fixes import first_names
from spmd.layout.precision import Precision
from spmd.layout.resolve import rule_matcher
from spmd.nn.low_precision import low_precision_product, scope_of

LAYERS = "nnx.Linear, nnx.LinearGeneral, linen.Dense or linen.DenseGeneral"


class Products:
    """What `Call.products` is: by a layer's path, the function for its products. It records what it
    was asked for.
    """

    def __init__(self, rules: tuple[Precision, ...]):
        self._rules = rules
        self._matching_rules = rule_matcher(rules)
        self._functions: dict[str, Callable[..., jax.Array]] = {}  # by path
        # names of functions that the model gives to its layers, by path
        self._own: dict[str, str] = {}
        # indices of the rules that match a layer, by the path of each that takes such a function
        self._claims: dict[str, list[int]] = {}
        self._called: set[str] = set()  # paths of layers that have computed a product by it

    def __call__(self, path: str, given: Any) -> Any:
        """The function for the products of the layer at `path`.

        Args:
          given: what the layer has as its `dot_general`; it is returned where no rule is for this
            layer.
        """
        rules = self._claims[path] = self._matching_rules(path)
        if not rules or given in self._functions.values():
            return given
        if given is not None and given is not jax.lax.dot_general:
            self._own[path] = getattr(given, "__name__", type(given).__name__)
            return given
        if path not in self._functions:
            self._functions[path] = self._recorded(
                path, low_precision_product(self._rules[rules[0]].products)
            )
        return self._functions[path]

    def _recorded(self, path: str, product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def dot_general(*args: Any, **kwargs: Any) -> jax.Array:
            self._called.add(path)
            try:
                with jax.named_scope(scope_of(path)):
                    return product(*args, **kwargs)
            except OptionError as error:
                why = f"[[precision]]: {path}: {error.summary}"
                raise LayoutError(
                    why, fix=f'except = ["{path}"] in its rule, or {error.fix}'
                ) from error

        return dot_general

    @property
    def layers(self) -> dict[str, str]:
        """The products that the rules ask for in every layer that has computed some, by path."""
        return {
            path: self._rules[claimed[0]].products
            for path, claimed in self._claims.items()
            if path in self._called
        }

    def notes(self) -> list[str]:
        """Layers that a rule matches, and whose products are computed by something else: a loss
        that multiplies by a head's kernel.
        """
        left = [
            path for path, claimed in self._claims.items() if claimed and path not in self._called
        ]
        return (
            [
                f"note: [[precision]] leaves {', '.join(left)} as the model computes it, because "
                "the loss never calls it."
            ]
            if left
            else []
        )

    def check(self, modules: Iterable[str], source: str) -> None:
        """Hold the rules against the traced loss, whose model has these `modules`.

        Raises:
          LayoutError: with every rule that does nothing, or that contradicts another one.
        """
        raise_problems(
            LayoutError, f"{source} does not fit the model", list(self._problems(list(modules)))
        )

    def _problems(self, modules: list[str]) -> Iterator[Problem]:
        patterns = [pattern for rule in self._rules for pattern in (rule.path, *rule.except_)]
        found = match_all(patterns, filter(None, dict.fromkeys([*self._claims, *modules])))
        layers: list[list[str]] = [[] for _ in self._rules]
        for path, claimed in self._claims.items():
            for index in claimed:
                layers[index].append(path)
        for index, rule in enumerate(self._rules):
            where = (
                f"{f'line {rule.line}: ' if rule.line else ''}[[precision]] rule {index + 1}, path "
                f'"{rule.path}"'
            )
            named = found[rule.path]
            for excepted in rule.except_ if named else ():
                if not set(named).intersection(found[excepted]):
                    fix = (
                        f'did you mean "{near}"?'
                        if (near := closest(excepted, named))
                        else f"one of {first_names(named)}."
                    )
                    yield Problem(
                        f'{where}, except "{excepted}"',
                        ["it matches no layer of this rule."],
                        fix,
                        rule=index + 1,
                        line=rule.line,
                    )
            if problem := self._problem(index, rule, named, layers[index]):
                why, fix, kind = problem
                yield Problem(where, [why], fix, rule=index + 1, line=rule.line, kind=kind)

    def _problem(
        self, index: int, rule: Precision, named: list[str], layers: list[str]
    ) -> tuple[str, str, str] | None:
        """What is wrong with a rule, the fix, and the kind.

        Args:
          named: modules that its path matches, excepted ones too; `layers`: those that take its
            function.
        """
        twice = [path for path in layers if self._claims[path][0] < index]
        own = [path for path in layers if path in self._own]
        if twice:
            why = f"{twice[0]} has a rule already, rule {self._claims[twice[0]][0] + 1}."
            return why, f'except = ["{twice[0]}"] in one of the two.', "conflict"
        if own:
            why = f"{own[0]} computes its products by a function of its own, {self._own[own[0]]}."
            return (
                why,
                f'except = ["{own[0]}"], or a model that does not set dot_general.',
                "conflict",
            )
        if any(path in self._called for path in layers):
            return None
        known = (
            f"layers that can: {first_names(sorted(self._claims))}."
            if self._claims
            else "this model has no such layer."
        )
        if layers:
            return (
                f"the loss never calls {layers[0]}.",
                "a layer that the loss calls as layer(x), or no such rule.",
                "conflict",
            )
        if any(path in self._claims for path in named):
            return (
                "its except leaves no layer of it.",
                "an except that leaves some, or no such rule.",
                "conflict",
            )
        if named:
            return (
                f"it matches {first_names(named)}, and products can be replaced in {LAYERS} only.",
                known,
                "conflict",
            )
        if any(
            compiled(rule.path).fullmatch(f"{path}/{name}")
            for path in self._claims
            for name in ("kernel", "bias")
        ):
            return (
                "it matches parameters, and here a path names layers.",
                f'path = "{rule.path.rpartition("/")[0]}".',
                "no_match",
            )
        near = closest(rule.path, self._claims)
        return (
            "it matches no module of the model.",
            (f'did you mean "{near}"? ' if near else "") + known,
            "no_match",
        )
