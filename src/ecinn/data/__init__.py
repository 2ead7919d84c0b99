"""8-bit images: datasets by name, loaders, photographs, augmentation and planted cues."""
