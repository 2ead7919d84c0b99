"""Images: data sets, augmentation, and the files people have."""
