"""Writes the signatures and docstrings of docs/api.md into it: `python docs/write_api.py`; --check only compares.

Between `<!-- api: NAME -->` and `<!-- end -->` stands what the docstring of NAME says, in Markdown. All else is kept.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
BLOCK = re.compile(r"<!-- api: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
WIDTH = 100
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Shapes|Dtypes)\b.*:$")
ENTRY = re.compile(r"([\w.*, ]+?): (.*)", re.DOTALL)


def resolve(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"docs/api.md names {name}, of which no part can be imported")


def signature(name: str, of: Any) -> str:
    """As a call would be written, with an argument on each line where one line is too long."""
    try:
        found = inspect.signature(of)
    except (TypeError, ValueError):
        return name
    arguments: list[str] = []
    for p in found.parameters.values():
        if p.name == "self":
            continue
        if p.kind == p.KEYWORD_ONLY and not any(a.startswith("*") for a in arguments):
            arguments.append("*")
        text = str(p.replace(annotation=p.empty) if p.annotation is p.empty else p)
        arguments.append(re.sub(r": '([^']*)'", r": \1", text).replace("'", '"'))
    line = f"{name}({', '.join(arguments)})"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {a}," for a in arguments), ")"])


def blocks(text: str) -> Iterator[list[str]]:
    """Runs of lines between empty ones; an indented run goes on over them."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip() or (block and block[0].startswith(" ")):
            if block and line.strip() and block[0].startswith(" ") and not line.startswith(" "):
                yield block
                block = []
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def entries(lines: list[str]) -> Iterator[str]:
    """A list's item for each argument or error of a section; what follows it is indented further."""
    body = textwrap.dedent("\n".join(lines)).splitlines()
    items: list[list[str]] = []
    for line in body:
        if line[:1].strip() or not items:
            items.append([line])
        elif line.strip():
            items[-1].append(line.strip())
    for item in items:
        named = ENTRY.fullmatch(" ".join(item))
        yield f"- `{named[1]}`: {named[2]}" if named else f"- {' '.join(item)}"


def markdown(docstring: str) -> str:
    lines: list[str] = []
    for block in blocks(docstring):
        if SECTION.match(block[0]) and len(block) > 1 and block[1].startswith("    "):
            lines += [f"**{block[0]}**", "", *entries(block[1:]), ""]
        elif block[0].startswith(" "):
            while not block[-1].strip():
                block.pop()
            lines += ["```text", *textwrap.dedent("\n".join(block)).splitlines(), "```", ""]
        else:
            lines += [*block, ""]
    return "\n".join(lines)


def members(of: Any) -> Iterator[tuple[str, Any]]:
    """A class's own public methods that have a docstring."""
    for name, member in vars(of).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not name.startswith("_") and isinstance(function, types.FunctionType) and function.__doc__:
            yield name, getattr(of, name)


def entry(name: str) -> str:
    of = resolve(name)
    text = [f"### {name}", "", "```python", signature(name, of), "```", "", markdown(inspect.getdoc(of) or "")]
    if isinstance(of, type):
        short = name.rpartition(".")[2]
        for method, member in members(of):
            text += [
                "```python",
                signature(f"{short}.{method}", member),
                "```",
                "",
                markdown(inspect.getdoc(member) or ""),
            ]
    return "\n".join(text)


def written(page: str) -> str:
    def block(found: re.Match[str]) -> str:
        return f"<!-- api: {found[1]} -->\n{entry(found[1])}<!-- end -->"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    page = PAGE.read_text()
    text = written(page)
    if "--check" in sys.argv[1:]:
        if text != page:
            sys.exit("docs/api.md is not what the docstrings say; run: python docs/write_api.py")
    else:
        PAGE.write_text(text)
