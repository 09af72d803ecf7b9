"""`to_inplace` and `to_standard`, under the name that they have always had."""

from models.layers.conversion.convert import Report, to_inplace, to_standard

__all__ = ["Report", "to_inplace", "to_standard"]
