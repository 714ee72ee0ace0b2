"""The experiments' shared code. It needs the packages of the extra `lab`."""

from importlib.util import find_spec

# One package for each large part of the extra; a plain install has none of them.
_NEEDED = ("hydra", "datasets", "transformers", "matplotlib", "pandas")
_missing = [name for name in _NEEDED if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"onebit.lab needs {', '.join(_missing)}, which {'is' if len(_missing) == 1 else 'are'} "
        "not installed. In a clone of the repository, install the extra: pip install -e '.[lab]'"
    )
