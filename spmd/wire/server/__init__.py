"""The simulated parameter server: what its servers do with the gradients that arrive."""
