"""What fits on a device: `keepless.fit`, and `python -m keepless.fit`. Here are its parts for programs that plan steps.

They count a step on fake tensors (`CountedStep`), say what a device needs for it (`StepMemory`, `PlannedStep`), and
find the largest value that fits (`largest`). The constants are the parts of a device's memory that no tensor gets.
"""

from .device import CONTEXT, FRAGMENTATION, WORKSPACE
from .sizes import largest
from .step_memory import CountedStep, PlannedStep, StepMemory

__all__ = ["CONTEXT", "FRAGMENTATION", "WORKSPACE", "CountedStep", "PlannedStep", "StepMemory", "largest"]
