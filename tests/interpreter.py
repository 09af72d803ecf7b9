"""Triton's interpreter: kernels on CPU tensors."""

import importlib.util
from types import ModuleType

import numpy as np
import pytest


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Let Triton interpret the kernels that are defined from now on."""
    triton = pytest.importorskip("triton")
    patch.setattr(triton.knobs.runtime, "interpret", True)


def interpreted(module: ModuleType) -> ModuleType:
    """A second copy of a module, whose kernels are interpreted, even if Triton was imported before."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_interpreted", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        spec.loader.exec_module(copy)
    return copy


def interpret_language(patch: pytest.MonkeyPatch) -> None:
    """Interpret the functions of `triton.language` itself too (sum, zeros), until the patch is undone.

    The interpreter does not revert its own changes to `triton.language.core`, after which nothing would compile, so the
    patch restores those as well. Skips the test if Triton is 3.6 (of torch 2.11) and NumPy 2.4 or newer, which refuses
    how that Triton turns a loop's bounds into integers.
    """
    triton = pytest.importorskip("triton")
    if triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6 interprets no loops with NumPy 2.4: install numpy<2.4 or torch>=2.12")
    interpret(patch)
    for module in (triton.language, triton.language.core):
        for name, function in filter(lambda item: callable(item[1]), vars(module).copy().items()):
            again = triton.jit(function.fn) if isinstance(function, triton.JITFunction) else function
            patch.setattr(module, name, again)
