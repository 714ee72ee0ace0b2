"""Pretrained weights: from the hub, a folder, or a Python package that carries them."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer
from transformers import AutoConfig, BertConfig, BertModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from onebit.lab.tasks.tokenizer import LoadedWordPiece

T = TypeVar("T")

# The files that may hold the weights.
FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
# The keywords of BertConfig that the weights decide.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
# Written by `onebit.lab.export` beside the weights: run.json of the pre-training, and the step.
PRETRAINING = "pretraining.json"


class HubWeights:
    """A BERT of the hub, or of a folder that transformers' `save_pretrained` has written.

    name: the id, such as "google-bert/bert-base-uncased", or the path.

    Raises:
        RuntimeError: it is not there, or incomplete; the message has the command that fetches it.
    """

    def __init__(self, *, name: str):
        self.name = name
        self.title = Path(name).name  # what a caption calls them

    def path(self) -> str:
        """What transformers is asked for."""
        folder = Path(self.name).expanduser()
        return str(folder) if folder.exists() else self.name

    def description(self) -> dict:
        """For run.json: how the weights were pre-trained, if that was done here."""
        path = Path(self.path()) / PRETRAINING
        return {"pretraining": json.loads(path.read_text())} if path.exists() else {}

    def require(self, model: dict) -> None:
        """Raise if the weights are missing, or are not of a BERT with these keywords of BertConfig.

        ValueError: another kind of model; RuntimeError: missing weights.
        """
        self._check_kind(BertConfig(**model))
        self._fetched(self._file)

    def load_into(self, encoder: BertModel) -> None:
        """Load the encoder's weights.

        A pooler keeps its random weights if there are none for it, as in a model of masked words.

        Raises:
            ValueError: the weights are of another network, or incomplete.
        """
        self._check_kind(encoder.config)
        saved, report = self._fetched(
            lambda: BertModel.from_pretrained(self.path(), output_loading_info=True)
        )
        lacking = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
        if lacking:
            raise ValueError(
                f"{self.title} lacks {', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}: "
                "it is not the complete network."
            )
        saved = saved.state_dict()
        encoder.load_state_dict({name: saved[name] for name in encoder.state_dict()})

    def _check_kind(self, config: BertConfig) -> None:
        saved = self._fetched(lambda: AutoConfig.from_pretrained(self.path())).to_dict()
        own = config.to_dict()
        if saved["model_type"] != "bert":
            raise ValueError(f"{self.title} is a {saved['model_type']}, not a bert.")
        for name in SIZES:
            if saved[name] != own[name]:
                raise ValueError(
                    f"{self.title} has {name} {saved[name]}, not {own[name]}: set "
                    f"task.model.{name}={saved[name]}."
                )

    def _file(self) -> str:
        """The path of the first file of the weights, which is fetched. OSError if there is none."""
        found = (
            cached_file(self.path(), name, _raise_exceptions_for_missing_entries=False)
            for name in FILES
        )
        if file := next(filter(None, found), None):
            return file
        raise FileNotFoundError(f"{self.name} has none of {', '.join(FILES)}")

    def _fetched(self, fetch: Callable[[], T]) -> T:
        """What `fetch` returns. An OSError becomes the RuntimeError of the class."""
        try:
            return fetch()
        except OSError as error:
            raise RuntimeError(
                f"The weights {self.name} are not here and could not be fetched "
                f"({type(error).__name__}).\n"
                f"Fetch them on a machine with a network:\n    hf download {self.name}\n"
                "or give a folder that transformers' save_pretrained has written: "
                "task.weights.name=DIR."
            ) from error


class PackagedWeights(HubWeights):
    """A BERT that a Python package carries.

    package, folder: the folder in the installed package with config.json and model.safetensors.
    requirement: what pip installs.
    title: what a caption calls the weights.

    Raises:
        RuntimeError: the package is not installed; the message has the command that installs it.
    """

    def __init__(self, *, package: str, folder: str, requirement: str, title: str):
        super().__init__(name=requirement)
        self.title = title
        self.package, self.folder = package, folder

    def path(self) -> str:
        return packaged(self.package, self.folder, self.name)


class PackagedWordPiece(LoadedWordPiece):
    """The file `file` (tokenizer.json) of a Python package, see `PackagedWeights`."""

    def __init__(self, *, package: str, file: str, requirement: str):
        super().__init__(name=requirement)
        self.package, self.file = package, file

    def build(self, documents: Iterable[str]) -> Tokenizer:
        return Tokenizer.from_file(packaged(self.package, self.file, self.name))


def packaged(package: str, path: str, requirement: str) -> str:
    """The path of a file or folder in an installed package, which is not imported for that."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise RuntimeError(
            f"The package {package}, which carries pretrained weights, is not installed:\n    "
            f"{sys.executable} -m pip install --no-deps {requirement}"
        )
    return str(Path(spec.origin).parent / path)
