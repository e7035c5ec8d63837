"""Versions of weights: a trainer publishes what changed since the version before, and inference engines follow."""

from __future__ import annotations
