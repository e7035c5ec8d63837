"""Matching: compares the tree that a caller asks for with the stored tree. Reads no arrays.

`leaf_matching` finds the stored leaf for each requested one, in the forms that `forms` allows. Only if the trees
differ, `parts` and `moves` find what belongs together, `adjustments` change arrays, and `differences` lists the rest.
"""
