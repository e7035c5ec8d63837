"""Matching: compares the requested tree with the stored tree. Reads no arrays.

`leaf_matching` finds the stored leaf for each requested leaf, in the forms that `forms` allows. If the trees differ,
`parts` and `moves` find related parts, `adjustments` changes arrays, and `differences` lists the remaining differences.
"""
