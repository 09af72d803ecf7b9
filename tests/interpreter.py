"""Triton's interpreter: kernels on CPU tensors."""

import importlib.util
from types import ModuleType

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
    patch restores those as well.
    """
    triton = pytest.importorskip("triton")
    interpret(patch)
    for module in (triton.language, triton.language.core):
        for name, function in filter(lambda item: callable(item[1]), vars(module).copy().items()):
            again = triton.jit(function.fn) if isinstance(function, triton.JITFunction) else function
            patch.setattr(module, name, again)
