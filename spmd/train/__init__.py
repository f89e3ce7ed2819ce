"""One training step: state, objective, gradients, update."""
