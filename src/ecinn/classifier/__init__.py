"""Gaussians on latents: the classifier, its recipes, checkpoint and model card."""
