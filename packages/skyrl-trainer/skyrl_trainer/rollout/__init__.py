"""Rollouts: samples in, trajectories out, each exactly once, whatever fails on the way."""
