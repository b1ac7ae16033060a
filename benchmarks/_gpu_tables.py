"""The Markdown tables of benchmarks/gpu.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks._limited import LIMIT_GIB


def tables(results: Mapping[str, Any]) -> str:
    """The Markdown tables of the report."""
    parts = []
    if "codecs" in results:
        parts += [
            "| codec | dtype | MiB | bits | pack / copy | unpack / copy | pack GB/s of input |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {row['codec']} | {row['dtype']} | {row['mebibytes']} | {row['bits']:.2f} "
                f"| {row['pack_share']:.2f} | {row['unpack_share']:.2f} "
                f"| {row['pack_input_bytes_a_second'] / 1e9:.0f} |"
                for row in results["codecs"]
            ),
            "",
        ]
    if "networks" in results:
        parts += [
            "| network | arm | peak MiB | x less | split MiB | time / compiled | noise | conv bits | waits |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for name, rows in results["networks"].items():
            for arm, row in rows.items():
                if arm == "batch":
                    continue
                if "error" in row:
                    parts.append(f"| {name} | {arm} | {row['error']} | | | | | | |")
                    continue
                plain = rows.get("plain", row).get("peak_bytes", 0)
                ratio, bits = row["ratio"], row["conv_input_bits"]
                parts.append(
                    f"| {name} | {arm} | {row['peak_bytes'] / 2**20:.0f} "
                    f"| {plain / max(row['peak_bytes'], 1):.2f} | {row['split_bytes'] / 2**20:.0f} "
                    f"| {ratio['median']:.2f} ({ratio['minimum']:.2f}..{ratio['maximum']:.2f}) "
                    f"| {_figure(row['noise'], '.1e')} | {_figure(bits, '.2f')} | {row['host_waits']} |"
                )
        parts.append("")
    if results.get("limited"):
        parts += [
            f"| in {LIMIT_GIB:g} GiB | batch | samples a second |",
            "|---|---|---|",
            *(
                f"| {arm} | {row['batch']} | {row['samples_a_second']:.0f} |"
                if row
                else f"| {arm} | not run: out of time | |"
                for arm, row in results["limited"].items()
            ),
        ]
    return "\n".join(parts)


def _figure(value: float | None, figures: str) -> str:
    return "" if value is None else f"{value:{figures}}"
