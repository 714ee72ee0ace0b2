"""Where pretrained weights come from: the hub, a folder, or a Python package that carries them."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

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

FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
PRETRAINING = "pretraining.json"  # what `onebit.lab.export` writes beside the weights: run.json of the pre-training, and the step


class HubWeights:
    """A BERT of the hub, "google-bert/bert-base-uncased", or a folder that transformers' `save_pretrained` has written.

    Raises RuntimeError, with the command that fetches it, if it is not there, or not all of it.
    """

    def __init__(self, *, name: str):
        self.name = name
        self.title = Path(name).name  # what a caption calls them

    def path(self) -> str:
        folder = Path(self.name).expanduser()
        return str(folder) if folder.exists() else self.name

    def description(self) -> dict:
        """For run.json: of weights that were pre-trained here, how."""
        path = Path(self.path()) / PRETRAINING
        return {"pretraining": json.loads(path.read_text())} if path.exists() else {}

    def require(self, model: dict) -> None:
        """Raise if the weights are not there, or not of a BERT with these keywords of BertConfig."""
        self._check_kind(BertConfig(**model))
        self._fetched(self._file)

    def load_into(self, encoder: BertModel) -> None:
        """All of the encoder's weights. ValueError if the network is another than the one they were trained in.

        A pooler that they lack, as those of a model of masked words do, begins at random like the head.
        """
        self._check_kind(encoder.config)
        saved, report = self._fetched(
            lambda: BertModel.from_pretrained(self.path(), output_loading_info=True)
        )
        lacking = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
        if lacking:
            raise ValueError(
                f"{self.title} lacks {', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}: it is not the whole network."
            )
        saved = saved.state_dict()
        encoder.load_state_dict({name: saved[name] for name in encoder.state_dict()})

    def _check_kind(self, config) -> None:
        saved, own = (
            self._fetched(lambda: AutoConfig.from_pretrained(self.path())).to_dict(),
            config.to_dict(),
        )
        if saved["model_type"] != "bert":
            raise ValueError(f"{self.title} is a {saved['model_type']}, not a bert.")
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        ):
            if saved[name] != own[name]:
                raise ValueError(
                    f"{self.title} has {name} {saved[name]}, not {own[name]}: set task.model.{name}={saved[name]}."
                )

    def _file(self) -> str:
        """Where the first file of the weights is, which is fetched. OSError if there is none."""
        found = (
            cached_file(self.path(), name, _raise_exceptions_for_missing_entries=False)
            for name in FILES
        )
        if file := next(filter(None, found), None):
            return file
        raise FileNotFoundError(f"{self.name} has none of {', '.join(FILES)}")

    def _fetched(self, fetch: Callable):
        """What `fetch` gives; its OSError becomes the RuntimeError of the class."""
        try:
            return fetch()
        except OSError as error:
            raise RuntimeError(
                f"The weights {self.name} are not here and could not be fetched ({type(error).__name__}).\nFetch them on a machine with "
                f"a network:\n    hf download {self.name}\nor give a folder that transformers' save_pretrained has written: task.weights.name=DIR."
            ) from error


class PackagedWeights(HubWeights):
    """A BERT that a Python package carries.

    package, folder: the folder with config.json and model.safetensors is PACKAGE/FOLDER, where the package is installed.
    requirement: what pip installs. title: what a caption calls them.

    Raises RuntimeError, with the command that installs it, if it is not there.
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

    def build(self, documents) -> Tokenizer:
        return Tokenizer.from_file(packaged(self.package, self.file, self.name))


def packaged(package: str, path: str, requirement: str) -> str:
    """The path of a file or folder inside an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise RuntimeError(
            f"The package {package}, which carries pretrained weights, is not installed:\n    "
            f"{sys.executable} -m pip install --no-deps {requirement}"
        )
    return str(Path(spec.origin).parent / path)
