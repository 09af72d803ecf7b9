"""PyTorch's private parts: used in two files, each with an answer for versions that do not have it."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import keepless
from keepless import recompute_activations
from keepless.recompute.passes import finder
from keepless.saved import kept_bytes
from keepless.torch_internals import all_packed_by, unpack

FOLDER = Path(keepless.__file__).parent
REPOSITORY = FOLDER.parent
COMMON = {"_version", "_base", "_is_view"}  # of tensors
COMMON |= {"_parameters", "_buffers", "_modules", "_metadata", "_backward_hooks"}  # of modules
COMMON |= {"_load_from_state_dict", "_save_to_state_dict", "_backward_pre_hooks", "_non_persistent_buffers_set"}
COMMON |= {"_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"}
OF_PYTHON = {"_replace", "_asdict", "_fields", "_getframe", "_exit", "_fn"}  # and one of ours
OF_DATASETS = {"_shutdown_workers"}  # datasets/ imports nothing of ours
PRODUCT = ("engine", "keepless", "models", "datasets", "scripts")


def private_parts(tree: ast.AST) -> set[str]:
    """Private names that a file reads from others or imports from PyTorch."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {part for part in [*node.module.split("."), *(a.name for a in node.names)] if part[0] == "_"}
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names |= {node.attr} if node.attr[0] == "_" and not node.attr.startswith("__") else set()
    return names


def test_private_parts_are_used_in_two_files():
    """The whole repository is searched, entries included."""
    files = [*REPOSITORY.glob("*.py"), *(file for folder in PRODUCT for file in (REPOSITORY / folder).rglob("*.py"))]
    names_by_file = {file: private_parts(ast.parse(file.read_text())) for file in files}
    assert {"_has_storage", "_autograd", "_pytree"} <= names_by_file.pop(FOLDER / "torch_internals.py")
    assert {"_foreach_norm", "_pytree"} <= names_by_file.pop(REPOSITORY / "models" / "private_torch.py")
    names_by_file[REPOSITORY / "datasets" / "workers.py"] -= OF_DATASETS
    private_by_file = {file.name: names - COMMON - OF_PYTHON for file, names in names_by_file.items()}
    assert {name: names for name, names in private_by_file.items() if names} == {}


def test_a_missing_part_ends_the_import_with_its_name(monkeypatch):
    spec = importlib.util.spec_from_file_location("keepless.again", FOLDER / "torch_internals.py")
    monkeypatch.delattr(torch._C, "_has_storage")
    with pytest.raises(ImportError, match="does not support torch .*_has_storage.*update keepless"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_single_tensors_are_seen_beside_lists():
    """As of cuDNN's recurrent networks: a result that is not known as the node's own would keep itself alive."""
    lstm = type("CudnnRnnBackward0", (), {"_raw_saved_result0": None, "_raw_saved_weight": ()})()
    lstm._raw_saved_result0 = SimpleNamespace(data="packed")
    assert "packed" in all_packed_by(lstm)


def test_what_a_node_does_not_show_is_kept(monkeypatch):
    torch.manual_seed(0)
    norm, relu, last = nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.MaxPool2d(2), nn.Dropout(), relu, last)
    x = torch.randn(2, 3, 16, 16)

    def gradients() -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(1)
        loss = network(x).square().mean()
        grads = torch.autograd.grad(loss, list(network.parameters()))
        return list(grads), kept_bytes(network, lambda: network(x), [x])

    plain, all_bytes = gradients()
    recompute_activations(network)
    again, few_bytes = gradients()
    monkeypatch.setattr(finder, "packed_by", lambda node, name: None)
    unseen, more_bytes = gradients()
    assert few_bytes < more_bytes <= all_bytes
    for grads in (again, unseen):
        assert all(map(torch.equal, grads, plain))


def test_compiled_autograd_does_not_trace_what_unpacks_tensors():
    traced = []

    def packed(tensor: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: traced.append(torch.compiler.is_compiling()) or tensor)

    x = torch.randn(4, requires_grad=True)
    with saved_tensors_hooks(packed, unpack):
        y = x.sin().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward()
    assert traced == [False] and torch.equal(x.grad, x.detach().cos())
