"""The layout `slime`: the directories ``weight_v000007`` of slime, miles, SGLang, vime and stitch.

layout        writes full versions and deltas, and finds them
delta_index   the index and the state of a delta
frames        the frames of changed tensors
chains        arrays that a read computes from a full version and deltas
"""
