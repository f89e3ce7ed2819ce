"""The layout's `[[precision]]` in a step: layers that its rules match compute their products in a
low precision.

*Unmeasured*: no GPU has timed products in float8 or int8. Plans name those that the compiled
program really has.
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
    """The function `Call.products`: by a layer's path, the function for its products. It records
    the layers for which it was called.
    """

    def __init__(self, rules: tuple[Precision, ...]):
        self._rules = rules
        self._matching_rules = rule_matcher(rules)
        # functions for products in a low precision, by path
        self._functions: dict[str, Callable[..., jax.Array]] = {}
        # names of functions that the model gives to its layers, by path
        self._function_names: dict[str, str] = {}
        # indices of the rules that match a layer, by the path of each that has a `dot_general`
        self._claims: dict[str, list[int]] = {}
        # paths of layers that have computed a product in a low precision
        self._called: set[str] = set()

    def __call__(self, path: str, dot_general: Any) -> Any:
        """Return the function for the products of the layer at `path`.

        Args:
          dot_general: the function that the layer has; it is returned where no rule is for this
            layer.
        """
        rules = self._claims[path] = self._matching_rules(path)
        if not rules or dot_general in self._functions.values():
            return dot_general
        if dot_general is not None and dot_general is not jax.lax.dot_general:
            name = getattr(dot_general, "__name__", type(dot_general).__name__)
            self._function_names[path] = name
            return dot_general
        if path not in self._functions:
            product = low_precision_product(self._rules[rules[0]].products)
            self._functions[path] = self._recorded(path, product)
        return self._functions[path]

    def _recorded(self, path: str, product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Return a product that records its layer as called, and whose errors name the layer."""

        def dot_general(*args: Any, **kwargs: Any) -> jax.Array:
            self._called.add(path)
            try:
                # The compiled program keeps the name, by which a plan finds the products of the
                # layer.
                with jax.named_scope(scope_of(path)):
                    return product(*args, **kwargs)
            except OptionError as error:
                raise LayoutError(
                    f"[[precision]]: {path}: {error.summary}",
                    fix=f'except = ["{path}"] in its rule, or {error.fix}',
                ) from error

        return dot_general

    @property
    def layers(self) -> dict[str, str]:
        """The products that the rules ask for in every layer that has computed some, by path."""
        called = [path for path in self._claims if path in self._called]
        return {path: self._rules[self._claims[path][0]].products for path in called}

    def notes(self) -> list[str]:
        """Return a note on layers that a rule matches, and whose products are computed by something
        else: a loss that multiplies by a head's kernel.
        """
        paths = []
        for path, claimed in self._claims.items():
            if claimed and path not in self._called:
                paths.append(path)
        if not paths:
            return []
        line = (
            f"note: [[precision]] leaves {', '.join(paths)} as the model computes it, because "
            "the loss never calls it."
        )
        return [line]

    def check(self, modules: Iterable[str], source: str) -> None:
        """Check the rules against the traced loss, whose model has these `modules`.

        Raises:
          LayoutError: with every rule that does nothing, or that contradicts another one.
        """
        problems = list(self._problems(list(modules)))
        raise_problems(LayoutError, f"{source} does not fit the model", problems)

    def _problems(self, modules: list[str]) -> Iterator[Problem]:
        """Yield the problems of all rules."""
        patterns: list[str] = []
        for rule in self._rules:
            patterns += [rule.path, *rule.except_]
        matches = match_all(patterns, filter(None, dict.fromkeys([*self._claims, *modules])))
        for index, rule in enumerate(self._rules):
            where = f'[[precision]] rule {index + 1}, path "{rule.path}"'
            if rule.line:
                where = f"line {rule.line}: {where}"
            place: dict[str, Any] = {"rule": index + 1, "line": rule.line}
            named = matches[rule.path]
            for pattern in rule.except_:
                if named and not set(named).intersection(matches[pattern]):
                    nearest = closest(pattern, named)
                    fix = f"one of {first_names(named)}."
                    if nearest:
                        fix = f'did you mean "{nearest}"?'
                    why = "it matches no layer of this rule."
                    yield Problem(f'{where}, except "{pattern}"', [why], fix, **place)
            layers = [path for path, claimed in self._claims.items() if index in claimed]
            problem = self._layer_problem(index, layers)
            is_used = any(path in self._called for path in layers)
            if problem is None and not is_used:
                problem = self._unused_problem(rule, named, layers)
            if problem is not None:
                why, fix, kind = problem
                yield Problem(where, [why], fix, **place, kind=kind)

    def _layer_problem(self, index: int, layers: list[str]) -> tuple[str, str, str] | None:
        """Return a problem of the layers of a rule that have another function, with its fix and its
        kind; None if there is none.

        Args:
          index: of the rule.
          layers: paths of layers that the rule claims.
        """
        for path in layers:
            first = self._claims[path][0]
            if first < index:
                why = f"{path} has a rule already, rule {first + 1}."
                return why, f'except = ["{path}"] in one of the two.', "conflict"
        for path in layers:
            if path in self._function_names:
                name = self._function_names[path]
                why = f"{path} computes its products by a function of its own, {name}."
                fix = f'except = ["{path}"], or a model that does not set dot_general.'
                return why, fix, "conflict"
        return None

    def _unused_problem(
        self, rule: Precision, named: list[str], layers: list[str]
    ) -> tuple[str, str, str]:
        """Return the problem of a rule by which no product is computed, its fix and its kind.

        Args:
          named: modules that the rule's path matches, excepted ones too.
          layers: paths of layers that the rule claims.
        """
        if layers:
            fix = "a layer that the loss calls as layer(x), or no such rule."
            return f"the loss never calls {layers[0]}.", fix, "conflict"
        if not self._claims.keys().isdisjoint(named):
            fix = "an except that leaves some, or no such rule."
            return "its except leaves no layer of it.", fix, "conflict"
        fix = "this model has no such layer."
        if self._claims:
            fix = f"layers that can: {first_names(sorted(self._claims))}."
        if named:
            why = f"it matches {first_names(named)}, and products can be replaced in {LAYERS} only."
            return why, fix, "conflict"
        pattern = compiled(rule.path)
        for path in self._claims:
            if pattern.fullmatch(f"{path}/kernel") or pattern.fullmatch(f"{path}/bias"):
                layer = rule.path.rpartition("/")[0]
                why = "it matches parameters, and here a path names layers."
                return why, f'path = "{layer}".', "no_match"
        nearest = closest(rule.path, self._claims)
        if nearest:
            fix = f'did you mean "{nearest}"? {fix}'
        return "it matches no module of the model.", fix, "no_match"
