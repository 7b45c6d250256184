"""The client commands: exec, cp, ls, cat, rm, info, targets and completion."""
