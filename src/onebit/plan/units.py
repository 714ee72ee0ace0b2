"""Quantities with units, as a person writes them on the command line and reads them in a table."""

import argparse
import re
from collections.abc import Callable

PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
NUMBER = r"([0-9.]+(?:[eE][+-]?[0-9]+)?)"


def bits_per_second(text: str) -> float:
    """'10Gbit', '100 Mbit/s' or '1.25GB/s' -> bits a second; a capital B is a byte."""
    found = re.fullmatch(rf"{NUMBER}\s*([kKMGT]?)(bit|b|B)(?:/s|ps)?", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no bandwidth: write it as 10Gbit, 100Mbit/s or 1.25GB/s"
        )
    number, prefix, unit = found.groups()
    return _positive(text, number) * PREFIXES[prefix] * (8 if unit == "B" else 1)


def seconds(text: str) -> float:
    """'0.2', '200ms' or '50us' -> seconds."""
    found = re.fullmatch(rf"{NUMBER}\s*(s|ms|us|µs)?", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write it as 0.2, 200ms or 50us")
    return _positive(text, found[1]) * SECONDS[found[2] or ""]


def count(text: str) -> int:
    """'340e6', '340M' or '340000000' -> a whole number above zero."""
    found = re.fullmatch(rf"{NUMBER}\s*([kKMGT]?)", text.strip())
    value = _positive(text, found[1]) * PREFIXES[found[2]] if found else 0.5
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number: write it as 340e6 or 340M")
    return int(value)


def share(text: str) -> float:
    """'0.15' or '15%' -> a number from 0 to 1."""
    number = text.strip().removesuffix("%")
    percent = number != text.strip()
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write it as 0.15 or 15%")
    return value


def _positive(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above zero")
    return value


def show(value: float, unit: str) -> str:
    """1.5e10, 'bit/s' -> '15 Gbit/s', to three digits."""
    for prefix in ("P", "T", "G", "M", "k"):
        if value >= PREFIXES[prefix]:
            return f"{value / PREFIXES[prefix]:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def show_time(value: float) -> str:
    """0.0123 -> '12.3 ms', to three digits."""
    if value >= 1:
        return f"{value:,.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def table(header: list[str], lines: list[list[str]]) -> str:
    """Columns padded with blanks: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    align: list[Callable] = [str.ljust] + [str.rjust] * (len(header) - 1)
    rows = [header, ["-" * width for width in widths], *lines]
    return "\n".join(
        "  ".join(put(cell, width) for put, cell, width in zip(align, row, widths)).rstrip()
        for row in rows
    )
