"""The pages of the documentation, and the fenced blocks in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
USING = ROOT / "docs" / "using.md"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = TOP + sorted((ROOT / "docs").rglob("*.md"))
CLAIMS = re.compile(r"<!-- claims: .*<!-- end of claims -->\n", re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        place: file and line, as an error names it.
        section: the heading above it.
    """

    place: str
    section: str
    language: str
    text: str


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, section, language, lines, start = [], "", None, [], 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if language is None and line.startswith("#"):
            section = line
        elif language is None and line.startswith("```"):
            language, lines, start = line[3:].strip(), [], number
        elif line.startswith("```"):
            place = f"{path.name}:{start}"
            found.append(Block(place, section, language, "\n".join(lines)))
            language = None
        elif language is not None:
            lines.append(line)
    return found


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
