"""Sources of text. A text yields documents: strings with blank lines between paragraphs."""

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from onebit.lab.tasks.hub import HubRows

# Folders that hold no documentation, or are not in every distribution of Python.
LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class PythonDocs:
    """Python's own documentation, about 2 MB that come with every Python.

    First comes the language reference in `pydoc_data.topics`, with a document for each topic; then
    the docstrings of the standard library, with a document for each source file, in the order of
    their paths. The sources are parsed, not imported. Other versions of Python have slightly
    different words: run.json names the version, and has a checksum of the corpus.
    """

    def fingerprint(self) -> str:
        return f"python docs {sys.version} {sysconfig.get_path('stdlib')}"

    def documents(self) -> Iterator[str]:
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield topics[name]
        library = Path(sysconfig.get_path("stdlib"))
        for path in sorted(library.rglob("*.py")):
            if not LEFT_OUT & set(path.relative_to(library).parts):
                yield _docstrings(path)


def _docstrings(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template, for example, is no valid source
        return ""
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return "\n\n".join(filter(None, found))


class HubText(HubRows):
    """Rows with a `text` column, see `HubRows`.

    rows: so many rows make a document: 1 if a row is an article, more if it is a sentence.
    """

    def __init__(self, *, rows: int = 1, **options: Any):
        super().__init__(**options)
        self.rows = rows

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {self.rows}"

    def documents(self) -> Iterator[str]:
        texts = (row["text"] or "" for row in self.load("text"))
        while document := "\n\n".join(islice(texts, self.rows)):
            yield document


class EveryNth:
    """Every n-th document of a text, which is held out, or all the others, which are trained on.

    Since documents quote each other, the others also lose the paragraphs that are held out, however
    these are indented.
    """

    def __init__(self, text: Any, n: int, *, held_out: bool):
        self.text = text
        self.n = n
        self.held_out = held_out

    def fingerprint(self) -> str:
        which = "only" if self.held_out else "without the paragraphs of"
        return f"{self.text.fingerprint()}, {which} every {self.n}th"

    def documents(self) -> Iterator[str]:
        if self.held_out:
            yield from self._some(held_out=True)
            return
        held_out = {
            _words(paragraph)
            for document in self._some(held_out=True)
            for paragraph in _paragraphs(document)
        }
        for document in self._some(held_out=False):
            yield "\n\n".join(
                paragraph
                for paragraph in _paragraphs(document)
                if _words(paragraph) not in held_out
            )

    def _some(self, *, held_out: bool) -> Iterator[str]:
        for number, document in enumerate(filter(str.strip, self.text.documents()), 1):
            if (number % self.n == 0) == held_out:
                yield document


def _paragraphs(document: str) -> list[str]:
    return re.split(r"\n\s*\n", document)


def _words(paragraph: str) -> str:
    return " ".join(paragraph.split())


class Texts:
    """Several texts, one after the other."""

    def __init__(self, **texts: Any):
        self.texts = texts

    def fingerprint(self) -> str:
        return "; ".join(text.fingerprint() for text in self.texts.values())

    def documents(self) -> Iterator[str]:
        for text in self.texts.values():
            yield from text.documents()
