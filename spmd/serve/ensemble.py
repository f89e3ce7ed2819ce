"""Ensembles."""


class Ensemble:
    """Stub."""
