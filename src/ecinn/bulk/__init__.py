"""Whole datasets: blocks of pictures in, numbered parts of rows out, on one machine or many."""
