"""The client: the modules that users import; `engine` and `transfer` are internal."""
