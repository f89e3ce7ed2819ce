"""Flax nnx, Flax linen and plain functions behind one interface; nothing here knows of devices."""
