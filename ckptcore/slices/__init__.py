"""Slices: arrays of which parts are read, as they are asked for or one after the other."""
