"""Float8 products of an MLP of a billion parameters: whether the program holds them, and whether they are faster than bfloat16."""

from collections.abc import Callable

import spmd
from benchmarks.gpu import cases
from benchmarks.gpu.measure import Arm, Part, run_part


def main(part: Part) -> None:
    arms = {f"ours, {products}": Arm(part, wide, products) for products in ("float8", "bfloat16")}
    part.alternate("wide", arms, 1.0, plan="wide float8")


def wide(part: Part, products: str) -> Callable[[], None]:
    step = cases.steps(part.small)[f"wide {products}"]
    trainer = spmd.Trainer(step.model, **step.options)
    run = step.run(trainer)
    batch = step.data()
    program, _ = trainer.prepare(batch)
    placed = trainer.place(batch)
    lowered = program._function(("step", step.rows, True)).lower(trainer.abstract_state, placed.leaves, placed.weights, {})
    text = lowered.compile().as_text()
    part.write(f"wide {products}", lines_with_float8=text.count("f8e4m3fn["), float8_matmuls=text.count("__cublas$lt$matmul$f8"))
    return run


if __name__ == "__main__":
    run_part(main)
