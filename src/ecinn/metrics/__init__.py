"""How good counterfactuals are, and the published benchmark they are compared on."""
