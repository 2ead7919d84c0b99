"""Heatmaps and search-based counterfactuals of other methods."""
