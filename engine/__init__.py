"""A run: configuration, training loop, evaluation, checkpoints and reports."""

from importlib.util import find_spec
from pathlib import Path

_repository = Path(__file__).resolve().parents[1]
_spec = find_spec("datasets")
if _spec is None or Path(_spec.origin or "").resolve().parents[1] != _repository:
    raise ImportError(
        f"the package datasets of this project lies in {_repository}, and Python finds {_spec and _spec.origin}: "
        f'write sys.path.insert(0, "{_repository}") before any import of it, in place of sys.path.append'
    )
