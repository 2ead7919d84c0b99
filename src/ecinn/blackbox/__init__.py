"""Black-box classifiers: only their predictions are used."""
