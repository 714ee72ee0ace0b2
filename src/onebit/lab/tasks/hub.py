"""Rows of a data set: from the Hugging Face hub, or from a file of the same schema."""

from pathlib import Path


class HubRows:
    """The rows of one split, with the columns that are asked for.

    name: what the data set is called in `data_root`: DIR/<name>/<split>.parquet is read instead of the hub, if
        data_root is set.
    path, config: the hub's id, and the configuration there.

    Raises RuntimeError, with the command that fetches it, if the data is not there.
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
        """What is read, without the path of this machine: a hub's id, or a file below data_root."""
        return self.path if self.file is None else f"{self.name}/{self.file.name}"

    def fingerprint(self) -> str:
        if self.file is None:
            return f"{self.path} {self.config} {self.split}"
        self._require_file()
        stat = self.file.stat()
        return f"{self.file.resolve()} {stat.st_size} {stat.st_mtime_ns}"

    def load(self, *columns: str):
        """A `datasets.Dataset` of these columns."""
        from datasets import load_dataset

        if self.file is not None:
            self._require_file()
            dataset = load_dataset("parquet", data_files=str(self.file), split="train")
        else:
            try:
                dataset = load_dataset(self.path, self.config, split=self.split)
            except (
                OSError,
                ValueError,
            ) as error:  # no connection, no such data set; offline and nothing in the cache
                raise RuntimeError(
                    f"The data set {self.path} is not here and could not be fetched ({type(error).__name__}: {error}).\n"
                    f"Fetch it on a machine with a network:\n    {self._fetch('')}\n"
                    f"or give data_root=DIR (ONEBIT_DATA_ROOT) with DIR/{self.name}/{self.split}.parquet of the same schema."
                ) from error
        for column in columns:
            if column not in dataset.column_names:
                raise RuntimeError(
                    f"{self.file or self.path} has the columns {', '.join(dataset.column_names)}, and must have one named {column}."
                )
        return dataset.select_columns(list(columns))

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
