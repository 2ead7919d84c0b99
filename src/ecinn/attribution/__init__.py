"""Heatmaps of ECINN and of gradient methods, and counterfactuals found by search."""
