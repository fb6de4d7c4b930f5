"""TensorBoard event files, written without the tensorboard package.

Importing its writer costs 0.2 s, and a training run should start at once; scalars need
only a few protobuf fields. A record is: length, masked CRC of the length, event, masked CRC of the event.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO


def _crc_table() -> list[int]:
    """CRC-32C (Castagnoli): zlib's crc32 has another polynomial."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """The CRC as TFRecord stores it: rotated and shifted, so that a CRC of data that holds CRCs stays useful."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _float32(value: float) -> bytes:
    """struct refuses what float32 cannot hold, but an exploding loss is what one wants to see: show it as infinite."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _event(step: int, payload: bytes) -> bytes:
    """An Event (wall_time = 1, step = 2) framed as one record."""
    data = struct.pack("<Bd", 1 << 3 | 1, time.time()) + bytes([2 << 3]) + _varint(step) + payload
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write to an unbuffered file: a full disk first writes a part, then raises OSError; nothing is kept back."""
    while data:
        data = data[file.write(data) :]


class EventFile:
    """One event file in `directory`. With `purge_step`, TensorBoard forgets earlier events of that step and later."""

    def __init__(self, directory: Path, purge_step: int | None = None) -> None:
        # TensorBoard reads files in the order of their names, so the number must separate two of the same second.
        number = sum(1 for _ in directory.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{int(time.time()):010d}.{number:04d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(directory / name, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        write_all(self._file, _event(0, _bytes_field(3, b"brain.Event:2")))  # file_version = 3
        if purge_step is not None:
            write_all(self._file, _event(purge_step, _bytes_field(7, b"\x08\x01")))  # session_log = 7, status START

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One event holding every scalar of `values` (summary = 5; value = 1; tag = 1, simple_value = 2)."""
        summary = b"".join(
            _bytes_field(1, _bytes_field(1, tag.encode()) + struct.pack("<B", 2 << 3 | 5) + _float32(value))
            for tag, value in values.items()
        )
        write_all(self._file, _event(step, _bytes_field(5, summary)))

    def close(self) -> None:
        self._file.close()
