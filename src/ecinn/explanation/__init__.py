"""The method: counterfactuals, their certificates, and the path to them."""
