"""The sections of model.edge and of the files beside it."""
