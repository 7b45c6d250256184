"""What people type: exec, cp, ls, cat, rm, info, targets and completion, on top of the client."""
