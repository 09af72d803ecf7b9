"""Report of a conversion: which layers were replaced, and which were not and why."""

import logging
from dataclasses import dataclass, field

SHOWN_NAMES = 4  # listed per reason

logger = logging.getLogger(__name__)


@dataclass
class ConversionReport:
    """The result of a conversion. Names are as in `network.named_modules()`; "" is the converted module itself."""

    replaced: dict[str, str] = field(default_factory=dict)  # name of the layer -> "old layer -> new layer"
    kept: dict[str, str] = field(default_factory=dict)  # name of the layer -> why it was not replaced

    def __str__(self) -> str:
        lines = []
        for title, entries in (("replaced", self.replaced), ("not replaced", self.kept)):
            lines.append(f"{title}: {len(entries)}")
            for text in dict.fromkeys(entries.values()):
                names = [name or "(the module itself)" for name, value in entries.items() if value == text]
                hidden = len(names) - SHOWN_NAMES
                shown = ", ".join(names[:SHOWN_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")
                lines += [f"  {len(names)} x {text}", f"      {shown}"]
        return "\n".join(lines)


def log_report(report: ConversionReport) -> None:
    """Log a report: as a warning if some layers were not replaced, otherwise at level INFO."""
    logger.log(logging.WARNING if report.kept else logging.INFO, "%s", report)
