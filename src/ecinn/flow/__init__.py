"""f, f⁻¹ and log|det J|: bijections, and the network that they form."""
