"""Builders and drivers that tests of several rooms share."""
