"""Derived arrays that only transforms make: quantised arrays as numbers."""
