"""Training loops of libraries within a budget: planned, without a warning, equal to the bit, within the budget.

They run in a process of their own with keepless alone on the path: this repository's `datasets` hides Hugging Face's,
which Transformers' Trainer asks for.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import REPOSITORY

BEFORE = """
import json
import warnings

import torch
import transformers

import keepless

caught = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always", keepless.KeeplessWarning)
torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, vocab_size=99)
network = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
words = torch.randint(1, 99, (16, 48))
data = [{"input_ids": row, "labels": row} for row in words]  # four steps of four texts
peaks = []


def measured(step):
    # Call a step, and note its peak from the third on.
    if len(peaks) < 2:
        return peaks.append(0) or step()
    results = []
    peaks.append(keepless.peak_bytes(lambda: results.append(step()), "cpu"))
    return results[0]


def prepare(module):
    if BUDGET:
        keepless.recompute_activations(module, budget=BUDGET)
"""
AFTER = """
prepared = {hook.__self__ for hook in network._forward_hooks.values() if hasattr(hook, "__self__")}
result = {
    "weights": sum(value.double().sum().item() for value in network.state_dict().values()).hex(),
    "said": [str(one.message) for one in caught if issubclass(one.category, keepless.KeeplessWarning)],
    "planned": [size.plan is not None for hooks in prepared for size in hooks.signatures.recent],
    "gradients": sum(parameter.nbytes for parameter in network.parameters()),
    "peaks": peaks,
}
print(json.dumps(result))
"""
LOOPS = {
    "lightning": """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network

    def training_step(self, batch, number):
        return self.network(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def optimizer_step(self, epoch, number, optimizer, closure):
        optimizer.step(lambda: measured(closure))


class Recompute(lightning.Callback):
    def on_fit_start(self, trainer, module):
        prepare(module.network)


off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
trainer = lightning.Trainer(max_steps=4, accelerator="cpu", callbacks=[Recompute()], **off)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
""",
    "transformers": """
class Recompute(transformers.TrainerCallback):
    def on_train_begin(self, arguments, state, control, model, **others):
        prepare(model)


class Trainer(transformers.Trainer):
    def training_step(self, *arguments, **options):
        return measured(lambda: super(Trainer, self).training_step(*arguments, **options))


options = dict(max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no")
arguments = transformers.TrainingArguments("runs", disable_tqdm=True, **options)
Trainer(network, arguments, train_dataset=data, callbacks=[Recompute()]).train()
""",
    "accelerate": """
import accelerate

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
loader = torch.utils.data.DataLoader(data, batch_size=4)
prepare(network)
model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        measured(lambda: accelerator.backward(model(**batch).loss))
        optimizer.step()
        optimizer.zero_grad()
""",
}


def trained(loop: str, budget: int, folder: Path) -> dict[str, Any]:
    """What a program prints after four steps of a loop, within a budget unless this is 0."""
    folder.mkdir()
    (folder / "keepless").symlink_to(REPOSITORY / "keepless")
    (folder / "work").mkdir()
    (folder / "work" / "program.py").write_text(BEFORE.replace("BUDGET", str(budget)) + LOOPS[loop] + AFTER)
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command, place = [sys.executable, "program.py"], folder / "work"
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_within_a_budget_as_without_one(loop, tmp_path):
    """A peak includes the gradients that come in a step, which a budget leaves out."""
    baseline = trained(loop, 0, tmp_path / "baseline")
    gradients = baseline["gradients"]
    budget = int(0.7 * (max(baseline["peaks"]) - gradients))
    prepared = trained(loop, budget, tmp_path / "prepared")
    assert prepared["said"] == [] and prepared["planned"] == [True]
    assert prepared["weights"] == baseline["weights"]
    assert len(prepared["peaks"]) == 4 and max(prepared["peaks"]) <= 1.01 * budget + gradients
