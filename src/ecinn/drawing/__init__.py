"""Sheets, heatmaps and films: knows arrays, not networks."""
