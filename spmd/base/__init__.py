"""The modules that every package stands on.

Trees and paths of arrays (`tree`, `path_match`, `specs`, `rng`), files that are complete or an
error (`user_paths`, `output_files`), differences between versions of JAX and XLA (`xla`), and what
messages share (`tracebacks`, `fields`, `ranking`, `log_info`, `deprecated`).
"""
