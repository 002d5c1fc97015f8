"""`edge search`: the settings of a model on a device that no others surpass, predicted first, then measured."""
