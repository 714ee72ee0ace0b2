"""Rows of a data set: from the Hugging Face hub, or from a file of the same schema."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


class HubRows:
    """The rows of one split of a data set.

    name: if data_root is set, data_root/<name>/<split>.parquet is read instead of the hub.
    path, config: the id on the hub, and the configuration there.

    Raises:
        RuntimeError: the data is not there; the message has the command that fetches it.
    """

    def __init__(
        self, *, name: str, path: str, split: str, data_root: str | None, config: str | None = None
    ):
        self.name = name
        self.path = path
        self.config = config
        self.split = split
        self.file = Path(data_root).expanduser() / name / f"{split}.parquet" if data_root else None

    @property
    def source(self) -> str:
        """What is read: an id on the hub, or a file as its path below data_root."""
        return self.path if self.file is None else f"{self.name}/{self.file.name}"

    def fingerprint(self) -> str:
        """A text that changes if the rows may have changed: a part of a cache's key."""
        if self.file is None:
            return f"{self.path} {self.config} {self.split}"
        self._require_file()
        stat = self.file.stat()
        return f"{self.file.resolve()} {stat.st_size} {stat.st_mtime_ns}"

    def load(self, *columns: str) -> "Dataset":
        """The rows, with these columns."""
        from datasets import load_dataset  # takes seconds, and few tasks need it

        if self.file is not None:
            self._require_file()
            dataset = load_dataset("parquet", data_files=str(self.file), split="train")
        else:
            try:
                dataset = load_dataset(self.path, self.config, split=self.split)
            except (OSError, ValueError) as error:  # no connection, no such data set, or offline
                raise RuntimeError(
                    f"The data set {self.path} is not here and could not be fetched "
                    f"({type(error).__name__}: {error}).\n"
                    f"Fetch it on a machine with a network:\n    {self._fetch('')}\n"
                    f"or set data_root=DIR (ONEBIT_DATA_ROOT), where DIR/{self.name}/"
                    f"{self.split}.parquet has the same schema."
                ) from error
        for column in columns:
            if column not in dataset.column_names:
                raise RuntimeError(
                    f"{self.file or self.path} has the columns {', '.join(dataset.column_names)}, "
                    f"and must have one named {column}."
                )
        return dataset.select_columns(list(columns))

    def _require_file(self) -> None:
        if not self.file.exists():
            raise RuntimeError(
                f"{self.file} does not exist. It should have the schema of {self.path}; fetch it "
                "with\n    "
                f"{self._fetch(f'.to_parquet({str(self.file)!r})')}\n"
                "or leave data_root (ONEBIT_DATA_ROOT) unset to use the hub."
            )

    def _fetch(self, then: str) -> str:
        arguments = ", ".join(repr(part) for part in (self.path, self.config) if part)
        load = f"load_dataset({arguments}, split={self.split!r}){then}"
        return f'python -c "from datasets import load_dataset; {load}"'
