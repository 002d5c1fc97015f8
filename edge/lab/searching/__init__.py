"""`edge search`: the Pareto-optimal settings of a model on a device, predicted first, then measured."""
