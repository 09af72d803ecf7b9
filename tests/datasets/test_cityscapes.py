from cityscapesscripts.helpers.labels import labels as official_labels

from datasets.cityscapes import cityscapes_classes


def test_table_is_the_official_one():
    table = cityscapes_classes()
    evaluated = sorted((label for label in official_labels if label.trainId not in (255, -1)), key=lambda x: x.trainId)
    assert table.names == tuple(label.name for label in evaluated)
    assert table.palette == tuple(label.color for label in evaluated)
    assert table.official_ids == tuple(label.id for label in evaluated)
    expected = {label.id % 256: label.trainId % 256 for label in official_labels}  # -1 (licence plates) becomes 255
    assert dict(table.label_ids) == expected
