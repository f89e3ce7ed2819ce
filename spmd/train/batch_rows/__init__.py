"""The loss of a full batch, computed by workers that hold parts of it: what each value is of the
rows, and which sums workers share.
"""
