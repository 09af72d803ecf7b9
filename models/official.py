"""`load_released`, under the name that it has always had."""

from models.checkpoints.official import load_released

__all__ = ["load_released"]
