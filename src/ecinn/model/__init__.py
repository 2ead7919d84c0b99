"""The invertible network and the classifier on top of it."""
