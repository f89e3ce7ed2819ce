"""Weights of others: folders of safetensors files, read to where a layout keeps them, and written again."""
