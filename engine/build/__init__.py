"""Build objects from configuration keys. Besides the entries, no other code knows both."""

from engine.build.classification import (
    IMAGENET_CLASSES,
    classification_network,
    classified_counts,
    classified_crops,
    classified_images,
    classified_split,
    classified_splits,
    evaluated_split,
)
from engine.build.data import (
    dataset,
    evaluation_loader,
    labelled_dataset,
    labelled_splits,
    loader,
    official_images,
    order_of,
    training_crops,
    training_loader,
)
from engine.build.memory import classes_of, fake_step, fitted, fitting, gib, share_of, step_memory, training_images
from engine.build.network import body, forward, norm_act, trained_forward
from engine.build.optimization import lr_schedule, optimizer
from engine.build.segmentation import loss, segmentation_network, views
from engine.build.training import arithmetic, learner, schedule_of
