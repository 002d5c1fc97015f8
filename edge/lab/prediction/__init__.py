"""Prediction of a plan's speed and energy, from counted work, a device's ceilings, and earlier runs."""
