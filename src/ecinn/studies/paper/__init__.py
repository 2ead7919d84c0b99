"""Every figure and table of the paper, made with our models."""
