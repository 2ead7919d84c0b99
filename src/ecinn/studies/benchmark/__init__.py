"""Counterfactuals measured: beside other methods, beside the authors' own, against what was asked.

`methods` makes them, `quality` judges them, `side_by_side`, `authors` and `consistency` are the
three benchmarks; `tables`, `figure` and `record` lay out what they found and compute nothing.
"""
