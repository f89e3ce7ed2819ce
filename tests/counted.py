"""Texts that count how often they are compared: the work of a function, without a clock."""


def counted_names():
    """Return a class of texts that counts comparisons in `compared`."""

    class Name(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

    return Name
