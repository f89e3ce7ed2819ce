"""The simulated parameter server: who keeps which parameter, when whose gradient arrives, and what
is made of it.
"""
