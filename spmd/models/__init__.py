"""Flax nnx, Flax linen and plain functions behind one interface; nothing here knows of devices.

`base` is the interface, `wrap` chooses who implements it (`flax_nnx`, `flax_linen`, `functional`).
`intercept` puts functions around calls of a user's modules, `patches` replaces names of libraries.
`blocks` finds siblings that are called one after the other; `linen_record` and `linen_switches`
are what linen modules do in training. `frozen`, `quantized` and `lora` are for fine-tuning.
"""
