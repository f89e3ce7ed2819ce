"""One training step: state, objective, gradients, update.

Begin with `train_step` in `step.py`. `compiled_step.py` compiles it, `worker_gradients.py` has the
forward and backward pass of a worker, and `synchronous.py`, `asynchronous.py` and `local_sgd.py`
say how workers' gradients become an update.
"""
