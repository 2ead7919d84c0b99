"""The web service: a page to explore counterfactuals, and a JSON API."""
