"""Where pretrained weights come from: the hub, a folder, or a Python package that carries them."""

import importlib.util
from pathlib import Path

from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from onebit.lab.tasks.tokenizer import LoadedWordPiece


class HubWeights:
    """A BERT of the hub, "google-bert/bert-base-uncased", or a folder that transformers' `save_pretrained` has written.

    Raises RuntimeError, with the command that fetches it, if it is not there.
    """

    def __init__(self, *, name: str):
        self.name = name
        self.title = Path(name).name  # what a caption calls them

    def path(self) -> str:
        folder = Path(self.name).expanduser()
        return str(folder) if folder.exists() else self.name

    def require(self) -> None:
        self._config()

    def load_into(self, encoder: BertModel) -> None:
        """All of the encoder's weights. ValueError if the network is another than the one they were trained in."""
        self._check_size(encoder.config)
        saved = BertModel.from_pretrained(self.path()).state_dict()
        encoder.load_state_dict({name: saved[name] for name in encoder.state_dict()})

    def _check_size(self, config) -> None:
        saved, own = self._config(), config.to_dict()
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings"):
            if saved[name] != own[name]:
                raise ValueError(f"{self.title} has {name} {saved[name]}, not {own[name]}: set task.model.{name}={saved[name]}.")

    def _config(self) -> dict:
        try:
            return BertConfig.from_pretrained(self.path()).to_dict()
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
        raise RuntimeError(f"The package {package}, which carries pretrained weights, is not installed:\n    pip install --no-deps {requirement}")
    return str(Path(spec.origin).parent / path)
