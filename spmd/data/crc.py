"""CRC-32C (Castagnoli) of many byte strings at once; a checksum is linear, so words are looked up
in tables and combined in pairs.
"""

import functools

import numpy as np

POLYNOMIAL = 0x82F63B78  # reflected
MASK = 0xA282EAD8  # TFRecord files store checksums rotated by 15 bits, plus this
_WORD = 8  # bytes of a word, looked up two at a time


def crc32c(rows: np.ndarray) -> np.ndarray:
    """uint32[n]: the checksum of each row of uint8[n, length].

    Example:
      >>> hex(crc32c(np.frombuffer(b"123456789", np.uint8)[None])[0])
      '0xe3069283'
    """
    count, length = rows.shape
    # leading zeros change nothing
    padded = np.zeros((count, -(-length // _WORD) * _WORD), np.uint8)
    padded[:, padded.shape[1] - length :] = rows
    pairs = padded.view("<u2").reshape(count, -1, _WORD // 2)
    tables = _tables()
    sums = tables[0].take(pairs[:, :, 0])
    for at in range(1, _WORD // 2):
        sums ^= tables[at].take(pairs[:, :, at])
    level = 0
    while sums.shape[1] > 1:
        if sums.shape[1] % 2:
            sums = np.concatenate([np.zeros((count, 1), np.uint32), sums], axis=1)
        sums = _shift_words(sums[:, ::2], level) ^ sums[:, 1::2]
        level += 1
    remainder = sums[:, 0] if sums.shape[1] else np.zeros(count, np.uint32)
    return remainder ^ _initial(length)


def masked(sums: np.ndarray) -> np.ndarray:
    """Checksums as TFRecord files store them."""
    return ((sums >> np.uint32(15)) | (sums << np.uint32(17))) + np.uint32(MASK)


@functools.cache
def _bytes() -> np.ndarray:
    """uint32[256]: the remainder of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(POLYNOMIAL), table >> 1).astype(
            np.uint32
        )
    return table


def _shift_byte(sums: np.ndarray) -> np.ndarray:
    """Remainders after another zero byte."""
    return _bytes().take(sums & 255) ^ (sums >> np.uint32(8))


@functools.cache
def _tables() -> list[np.ndarray]:
    """uint32[65536] for each pair of bytes of a word: their part of its remainder."""
    pairs = np.arange(1 << 16, dtype=np.uint32)
    last = _shift_byte(_bytes().take(pairs & 255)) ^ _bytes().take(pairs >> 8)
    tables = [last]
    for _ in range(_WORD // 2 - 1):
        tables.insert(0, _shift_byte(_shift_byte(tables[0])))
    return tables


@functools.cache
def _shift_tables(level: int) -> tuple[np.ndarray, np.ndarray]:
    """By the lower and the upper half of a remainder: its value after 8 * 2^level zero bytes."""
    if level:
        low, high = _shift_tables(level - 1)
        return _shift_words(low, level - 1), _shift_words(high, level - 1)
    low = np.arange(1 << 16, dtype=np.uint32)
    high = low << np.uint32(16)
    for _ in range(_WORD):
        low, high = _shift_byte(low), _shift_byte(high)
    return low, high


def _shift_words(sums: np.ndarray, level: int) -> np.ndarray:
    low, high = _shift_tables(level)
    return low.take(sums & 0xFFFF) ^ high.take(sums >> np.uint32(16))


@functools.lru_cache(4096)
def _initial(length: int) -> np.uint32:
    """The effect of the register's initial ones, and of its final inversion, on the remainder of
    `length` bytes.
    """
    words, left = divmod(length, _WORD)
    sums = np.array([0xFFFFFFFF], np.uint32)
    for _ in range(left):
        sums = _shift_byte(sums)
    for level in range(words.bit_length()):
        if words >> level & 1:
            sums = _shift_words(sums, level)
    return ~sums[0]
