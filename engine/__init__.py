"""A run: configuration, training loop, evaluation, checkpoints and reports."""

from importlib.util import find_spec
from pathlib import Path

_repository = Path(__file__).resolve().parents[1]
_found = find_spec("datasets")
if _found is None or Path(_found.origin or "").resolve().parents[1] != _repository:
    raise ImportError(
        f"the package datasets of this project lies in {_repository}, and Python finds {_found and _found.origin}: "
        f'write sys.path.insert(0, "{_repository}") before any import of it, in place of sys.path.append'
    )
