"""Writers of record files that share no code with the readers under test."""

import struct

import numpy as np


def csv(path, rows, header="age,height,kind"):
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def crc(data):
    """CRC-32C bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    value ^= 0xFFFFFFFF
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value):
    value &= (1 << 64) - 1
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def example(packed=True, **features):
    """A `tf.train.Example`: float arrays, lists of whole numbers, or bytes."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            kind, inner = 1, field(1, value)
        elif np.asarray(value).dtype.kind == "f":
            numbers = [struct.pack("<f", number) for number in np.ravel(value)]
            kind, inner = (
                2,
                field(1, b"".join(numbers))
                if packed
                else b"".join(b"\x0d" + number for number in numbers),
            )
        else:
            numbers = [varint(int(number)) for number in np.ravel(value)]
            kind, inner = (
                3,
                field(1, b"".join(numbers))
                if packed
                else b"".join(b"\x08" + number for number in numbers),
            )
        entries += field(1, field(1, name.encode()) + field(2, field(kind, inner)))
    return field(1, entries)


def framed(record):
    head = struct.pack("<Q", len(record))
    return head + struct.pack("<I", crc(head)) + record + struct.pack("<I", crc(record))


def tfrecord(path, records):
    path.write_bytes(b"".join(map(framed, records)))
    return path
