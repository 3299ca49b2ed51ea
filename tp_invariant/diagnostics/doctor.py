"""What this machine has, and which of the library's claims hold on it.

tp-invariant doctor                     tables for people; --json for machines
tp-invariant doctor --all               on a machine without GPUs also the settings that matter on GPUs alone
tp-invariant doctor --layer 8192,2048   also what owner_map="auto" picks for a layer of yours
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from . import doctor_facts
from .doctor_claims import FAILS, HOLDS, UNCHECKED, Claim, claims

_STYLES = {HOLDS: "green", FAILS: "bold red", UNCHECKED: "yellow"}


def collect(layers: Sequence[tuple[int, int]] = (), *, tokens: int = 8192, measure: bool = False) -> dict[str, Any]:
    """All facts and claims, as JSON values. Starts CUDA if there is a GPU; `measure` also starts ranks."""
    device = "cuda" if doctor_facts.gpu_count() else "cpu"
    own = [(f"yours, {k} to {n}", k, n) for k, n in layers]
    facts = {
        "versions": doctor_facts.versions(),
        "devices": doctor_facts.devices(),
        "links": doctor_facts.links(measure),
        "gate": doctor_facts.gate(),
        "settings": doctor_facts.settings(),
        "attention": doctor_facts.attention(device),
        "gemm": doctor_facts.gemm(device),
        "owner maps": doctor_facts.owner_maps([*doctor_facts.QWEN3_8B, *own], (2, 4, 8), tokens),
    }
    return facts | {"claims": [dataclasses.asdict(claim) for claim in claims(facts)]}


_SETTINGS = "Settings for code around the layers, which do not need them (tpi.determinism)"

# --- printing -------------------------------------------------------------------------------------------------------

Rows = list[tuple[str, ...]]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def tables(facts: dict[str, Any], everything: bool) -> list[tuple[str, Rows]]:
    """(title, heading and rows) of every table; everything: also rows that have no effect on this machine."""
    versions: Rows = [("what", "version"), *((name, _shown(value)) for name, value in facts["versions"].items())]
    devices: Rows = [("device", "what it is")]
    for found in facts["devices"]:
        others = (f"{name} {_shown(value)}" for name, value in found.items() if name not in ("device", "name"))
        devices.append((found["device"], ", ".join([found["name"], *others])))
    links: Rows = [("GPUs", "peer access", "link")]
    links += [(pair["pair"], _shown(pair["peer access"]), pair["link"]) for pair in facts["links"]["pairs"]]
    measured = facts["links"].get("all-gather")
    if measured:
        links.append(("all-gather", f"{measured['GB/s received by a rank']} GB/s a rank", measured["of"]))
    gate: Rows = [("gate", "value"), *((name, _shown(value)) for name, value in facts["gate"].items())]
    settings: Rows = [("not set", "profiles", "now", "wanted", "without it")]
    has_gpu = len(facts["devices"]) > 1
    for row in facts["settings"]:
        if not row["set"] and (everything or has_gpu):
            shown = (_shown(row["now"]), _shown(row["wanted"]), row["without it"])
            settings.append((row["setting"], ", ".join(row["profiles"]), *shown))
    runs: Rows = [("for", "what runs")]
    runs.append((f"16-bit GEMM on {facts['attention']['device']}", facts["gemm"]["kernel"]))
    runs.append(("large blocks between GPUs", facts["links"]["transport"]))
    runs += [(f"attention: {choice['case']}", choice["runs"]) for choice in facts["attention"]["choices"]]
    on = [name for name, enabled in facts["attention"]["SDPA backends enabled"].items() if enabled]
    runs.append(("SDPA, the mode off", f"one of {', '.join(on)}" if on else "no backend is enabled"))
    owner_maps: Rows = [("layer", "K", "N", "TP", "auto", "estimates (all terms: --json)")]
    for row in facts["owner maps"]:
        estimates = ", ".join(line.partition("=")[0].strip() for line in row["why"].splitlines()[1:-1])
        owner_maps.append((row["layer"], *(str(row[name]) for name in ("K", "N", "TP", "auto")), estimates))
    tokens, count = facts["owner maps"][0]["tokens"], sum(row["set"] for row in facts["settings"])
    return [
        ("Versions", versions),
        ("Devices", devices),
        *([("Links", links)] if len(links) > 1 else []),
        ("Gate", gate),
        *([(f"{_SETTINGS}; {count} are set", settings)] if len(settings) > 1 else []),
        ("What runs with the mode on", runs),
        (f"Owner maps that auto picks: {tokens} tokens, sequence-parallel", owner_maps),
    ]


def _claim_rows(found: Sequence[Claim]) -> Rows:
    return [("claim", "status", "detail", "next step")] + [dataclasses.astuple(claim) for claim in found]


def print_table(title: str, rows: Rows) -> None:
    """With rich where it is installed, else plain text."""
    heading, *body = rows
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(f"\n{title}")
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    console = Console(highlight=False)
    if not console.is_terminal:  # a log: lines need not fit a window
        console = Console(highlight=False, width=200)
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in heading:
        table.add_column(name, overflow="fold")
    for row in body:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print()
    console.print(table)


def verdict(found: Sequence[Claim]) -> str:
    counts = {status: [claim.status for claim in found].count(status) for status in _STYLES}
    names = {HOLDS: "hold", FAILS: "do not hold here", UNCHECKED: "were not checked"}
    return f"Verdict: of {len(found)} claims {', '.join(f'{n} {names[s]}' for s, n in counts.items() if n)}."


# --- the command ----------------------------------------------------------------------------------------------------


def _layer(text: str) -> tuple[int, int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of positive whole numbers K,N, as in 8192,2048")
    return int(parts[0]), int(parts[1])


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """The `doctor` command. Exit status 0 if every claim that was checked holds, 1 if one does not; 2: bad usage."""
    parser = argparse.ArgumentParser(
        prog="tp-invariant doctor",
        description="What this machine has, and which of the library's claims hold on it.",
        epilog="Exit status: 0 if all that was checked holds, 1 if something does not, 2 for a wrong option.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--all", action="store_true", help="without GPUs: also the settings of cuBLAS, cuDNN and NCCL")
    parser.add_argument("--measure", action="store_true", help="measure an all-gather between ranks too")
    parser.add_argument(
        "--layer",
        type=_layer,
        action="append",
        default=[],
        metavar="K,N",
        help="also pick the owner map of a layer with K summed features, sharded, and N others; may be repeated",
    )
    parser.add_argument("--tokens", type=_positive, default=8192, metavar="T", help="tokens of them (default: 8192)")
    options = parser.parse_args(list(argv))
    facts = collect(options.layer, tokens=options.tokens, measure=options.measure)
    found = [Claim(**claim) for claim in facts["claims"]]
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        shown = tables(facts, options.all)
        for title, rows in shown:
            print_table(title, rows)
        if not any(title.startswith(_SETTINGS) for title, _ in shown):
            print(f"\n{_SETTINGS} matter on GPUs; --all lists them.")
        print_table("Claims", _claim_rows(found))
        print(verdict(found))
    return 1 if any(claim.status == FAILS for claim in found) else 0
