"""Build objects from configuration keys. Besides, only the entries, `training` and `prediction` handle both."""

from engine.assemble.classification import (
    classified_crops,
    classified_split,
    classified_splits,
    cross_entropy,
    evaluation_minibatches,
)
from engine.assemble.data import (
    at_once,
    check_classes,
    class_index,
    dataset,
    evaluation_loader,
    labelled_dataset,
    labelled_splits,
    official_classes,
    official_images,
    root_named,
    sampler_arguments,
    shortfalls,
    training_crops,
    training_loader,
)
from engine.assemble.network import arithmetic, body, forward, norm_act
from engine.assemble.optimization import lr_schedule, optimizer, schedule_of
from engine.assemble.tasks import loss, network_of, split_of, views
