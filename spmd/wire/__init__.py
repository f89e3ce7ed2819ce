"""How gradients meet: the wire, the reductions, the codecs."""
