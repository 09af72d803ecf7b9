"""Activated batch normalisation, standard and in place. Imports torch alone and can be lifted into another project."""

from .abn import ABN
from .inplace_abn import InPlaceABN

__all__ = ["ABN", "InPlaceABN"]
