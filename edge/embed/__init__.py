"""What `edge export` makes: a C library, one model file and bindings, with which an app runs a model without Python."""
