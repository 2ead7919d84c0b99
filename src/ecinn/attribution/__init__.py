"""Heatmaps of ECINN and of gradient methods, and counterfactuals found by search."""

from ecinn.attribution.heatmaps import METHODS, Attribution, HeatmapSettings, attribute

__all__ = ["METHODS", "Attribution", "HeatmapSettings", "attribute"]
