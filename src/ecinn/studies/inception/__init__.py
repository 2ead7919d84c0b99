"""Inception-V3, the network that the paper compares with."""
