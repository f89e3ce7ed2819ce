"""One training step: state, objective, gradients, update.

Begin with `train_step` in `step.py`. `compiled_step.py` compiles it, after `loss_trace.py` has
traced the loss and the lists of `program_checks.py` have raised no error; `evaluation.py`
evaluates. `worker_gradients.py` has the forward and backward pass of a worker, and
`update_rules.py` says how workers' gradients become an update.
"""
