"""The scores of a segmentation as a table for the console."""

from rich.table import Table


def iou_table(scores: dict) -> Table:
    """The scores of `all_scores` in percent, official ones on the right."""
    official = scores["official"]
    iiou = official.get("iiou", {})
    has_iiou = any(value is not None for value in iiou.values())
    on_the_right = "iIoU %" if has_iiou else "official %" if official and not iiou else None
    table = Table(caption_justify="left", min_width=40)
    table.add_column("class")
    for column in filter(None, ("IoU %", on_the_right)):
        table.add_column(column, justify="right")

    def row(name: str, *values: float | str | None, style: str | None = None) -> None:
        cells = [
            value if isinstance(value, str) else "–" if value is None else f"{100 * value:.2f}" for value in values
        ]
        table.add_row(name, *cells[: len(table.columns) - 1], style=style)

    beside = iiou or official.get("iou", {})
    for name in {**scores["iou"], **beside}:
        row(name, scores["iou"].get(name, ""), beside.get(name, ""))
    table.add_section()
    row("mean (mIoU)", scores["miou"], official.get("mean_iiou" if has_iiou else "miou", ""), style="bold")
    row("pixel accuracy", scores["pixel_accuracy"], official.get("pixel_accuracy", ""))
    if "mean_accuracy" in official:
        row("mean accuracy", "", official["mean_accuracy"])
        row("frequency-weighted IoU", "", official["frequency_weighted_iou"])
    if "category_iou" in official:
        table.add_section()
        row("category", "IoU %", "iIoU %" if has_iiou else "", style="bold")
        for name, iou in official["category_iou"].items():
            row(name, iou, official["category_iiou"].get(name, ""))
        row("mean of categories", official["mean_category_iou"], official["mean_category_iiou"], style="bold")
    if iiou and not has_iiou:
        table.caption = "no iIoU: it needs the instanceIds file of every image"
    return table
