"""The simulated parameter server: what is declared, its clock, and what servers do with the
gradients that arrive.
"""
