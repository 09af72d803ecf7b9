"""The segmentation task: predictions of whole images, losses, scores and pictures."""
