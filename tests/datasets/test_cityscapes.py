import cv2
import numpy as np
from cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling import args as official_args
from cityscapesscripts.helpers.labels import labels as official_labels

from datasets import cityscapes
from datasets.cityscapes import cityscapes_classes

official_labels_by_id = {label.id: label for label in official_labels}


def test_table_is_the_official_one():
    table = cityscapes_classes()
    evaluated = sorted((label for label in official_labels if label.trainId not in (255, -1)), key=lambda x: x.trainId)
    assert table.names == tuple(label.name for label in evaluated)
    assert table.palette == tuple(label.color for label in evaluated)
    assert table.official_ids == tuple(label.id for label in evaluated)
    expected = {label.id % 256: label.trainId % 256 for label in official_labels}  # -1 (licence plates) becomes 255
    assert dict(table.label_ids) == expected
    by_name = {label.name: label for label in official_labels}
    assert table.categories == tuple(by_name[name].category for name in table.names)
    assert set(table.instance_sizes) == {name for name in table.names if by_name[name].hasInstances}
    assert table.instance_sizes == {name: official_args.avgClassSize[name] for name in table.instance_sizes}


def test_instances_are_numbered_by_train_id_and_groups_are_none(cityscapes_root):
    dataset = cityscapes(cityscapes_root, "val")
    sample, instances = dataset.scored(0)
    raw = cv2.imread(str(dataset.files[0].instances), cv2.IMREAD_UNCHANGED).astype(int)
    assert {29_000, 26_001, 26} <= set(raw.flatten())  # an ignored caravan, a car, a group of cars
    expected = [
        1000 * official_labels_by_id[value // 1000].trainId + value % 1000
        if value >= 1000 and not official_labels_by_id[value // 1000].ignoreInEval
        else -1
        for value in raw.flatten()
    ]
    assert instances.dtype == np.int32 and instances.flatten().tolist() == expected
    assert np.array_equal(sample.label, dataset[0].label) and sample.name == dataset[0].name
