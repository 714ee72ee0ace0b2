"""The time model beside what the papers print: its inputs, its predictions, and their errors.

`papers` knows the clusters and the computing times of the papers, `points` lists every number that
they print or draw, each with its prediction, and `check` compares the two.
"""
