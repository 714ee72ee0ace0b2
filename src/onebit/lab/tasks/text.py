"""Where the words come from. A text yields documents, each a string whose paragraphs are divided by blank lines."""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

# Not documentation, or not in every distribution of Python.
LEFT_OUT = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "lib-dynload", "pydoc_data", "site-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class PythonDocs:
    """Python's own documentation, about 2 MB that every Python carries: the text of `help()` and the docstrings.

    First the language reference in `pydoc_data.topics`, a document for each topic; then the standard library, a
    document for each source file with its docstrings. The sources are parsed, never imported, in the order of their
    paths. Other versions of Python have slightly different words: run.json names the version and the corpus.
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
    except (SyntaxError, ValueError):  # templates and the like, which are no valid source
        return ""
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return "\n\n".join(filter(None, found))


class HubText:
    """Rows with a `text` column, from the Hugging Face hub or from a file of the same schema.

    name: what the data set is called in `data_root`: DIR/<name>/<split>.parquet is read instead of the hub, if
        data_root is set.
    path, config: the hub's id, and the configuration there.
    rows: how many rows make a document; 1 where a row is an article, more where it is a sentence.

    Raises RuntimeError, with the command that fetches it, if the data is not there.
    """

    def __init__(self, *, name: str, path: str, split: str, data_root: str | None, config: str | None = None, rows: int = 1):
        self.name = name
        self.path = path
        self.config = config
        self.split = split
        self.rows = rows
        self.file = Path(data_root).expanduser() / name / f"{split}.parquet" if data_root else None

    def fingerprint(self) -> str:
        if self.file is None:
            return f"{self.path} {self.config} {self.split} {self.rows}"
        self._require_file()
        stat = self.file.stat()
        return f"{self.file.resolve()} {stat.st_size} {stat.st_mtime_ns} {self.rows}"

    def documents(self) -> Iterator[str]:
        texts = (row["text"] or "" for row in self._load())
        while document := "\n\n".join(islice(texts, self.rows)):
            yield document

    def _load(self):
        from datasets import load_dataset

        if self.file is not None:
            self._require_file()
            dataset = load_dataset("parquet", data_files=str(self.file), split="train")
        else:
            try:
                dataset = load_dataset(self.path, self.config, split=self.split)
            except (OSError, ValueError) as error:  # no connection, no such data set; offline and nothing in the cache
                raise RuntimeError(
                    f"The data set {self.path} is not here and could not be fetched ({type(error).__name__}: {error}).\n"
                    f"Fetch it on a machine with a network:\n    {self._fetch('')}\n"
                    f"or give data_root=DIR (ONEBIT_DATA_ROOT) with DIR/{self.name}/{self.split}.parquet of the same schema."
                ) from error
        if "text" not in dataset.column_names:
            raise RuntimeError(f"{self.file or self.path} has the columns {', '.join(dataset.column_names)}, and must have one named text.")
        return dataset.select_columns("text")

    def _require_file(self) -> None:
        if not self.file.exists():
            raise RuntimeError(
                f"{self.file} does not exist. It has the schema of {self.path}; fetch it with\n    "
                f"{self._fetch(f'.to_parquet({str(self.file)!r})')}\n"
                "or leave data_root (ONEBIT_DATA_ROOT) unset to use the hub."
            )

    def _fetch(self, then: str) -> str:
        arguments = ", ".join(repr(part) for part in (self.path, self.config) if part)
        return f"""python -c "from datasets import load_dataset; load_dataset({arguments}, split={self.split!r}){then}\""""


class Texts:
    """Several texts, one after the other."""

    def __init__(self, **texts):
        self.texts = texts

    def fingerprint(self) -> str:
        return "; ".join(text.fingerprint() for text in self.texts.values())

    def documents(self) -> Iterator[str]:
        for text in self.texts.values():
            yield from text.documents()
