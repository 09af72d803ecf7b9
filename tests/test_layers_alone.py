"""The layers' tests for GPUs start on a machine that has torch, triton and pytest alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

MISSING = ("hydra", "omegaconf", "rich", "hypothesis", "cv2", "matplotlib", "torchvision", "tensorboard", "PIL", "timm")

COLLECT = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1].split(","))  # importing one of them fails
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def collected(missing: tuple[str, ...], where: str) -> set[str]:
    found = subprocess.run(
        [sys.executable, "-c", COLLECT, ",".join(missing), where],
        cwd=REPOSITORY,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # Hydra is a plugin of pytest too
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    return set(re.findall(r"^tests/\S+::.*$", found.stdout, re.MULTILINE))


@pytest.mark.slow
def test_every_gpu_test_of_the_layers_is_collected_without_the_packages_of_trainings():
    found = collected(MISSING, "tests")
    assert found == collected(("unknown",), "tests/keepless")
    assert {name.partition("::")[0] for name in found} >= {
        "tests/keepless/norms/test_abn_cuda.py",
        "tests/keepless/norms/test_triton.py",
        "tests/keepless/recompute/test_cuda.py",
        "tests/keepless/test_losses_cuda.py",
    }
