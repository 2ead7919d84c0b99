"""Benchmarks of counterfactuals, heatmaps and models; every command writes tables and JSON.

`side_by_side` compares methods of counterfactuals, `authors` scores the authors' published ones,
`consistency` compares requested and obtained confidences, `heatmaps` compares attribution methods,
`faces` measures models of faces. `quality` holds what several of them share.
"""
