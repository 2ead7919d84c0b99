"""Pure metrics of counterfactuals, heatmaps and strokes, and their confidence intervals."""
