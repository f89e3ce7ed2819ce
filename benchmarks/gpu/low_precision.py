"""Float8 products of an MLP of a billion parameters: whether the program holds them, and whether
they are faster than bfloat16.
"""

from collections.abc import Callable

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Arm, Part, run_part


def main(part: Part) -> None:
    arms = {f"ours, {products}": Arm(part, wide, products) for products in ("float8", "bfloat16")}
    part.alternate("wide", arms, 1.0, {arm: arm.replace("ours,", "wide") for arm in arms})
    part.compare_losses("wide", arms, 0.1)  # float8 has three bits of significand


def wide(part: Part, products: str) -> tuple[Callable[[], None], float]:
    step = cases.steps(part.small)[f"wide {products}"]
    trainer, batch = step.trainer(), step.data()
    run, loss = cases.compared(trainer, batch)
    text = trainer.prepare(batch)[0].compiled_text()  # of the program that took these steps
    part.write(
        f"wide {products}",
        lines_with_float8=text.count("f8e4m3fn["),
        float8_matmuls=text.count("__cublas$lt$matmul$f8"),
    )
    return run, loss


if __name__ == "__main__":
    run_part(main)
