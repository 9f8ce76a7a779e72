"""The content of voxels and clouds: augmentations, losses, metrics."""
