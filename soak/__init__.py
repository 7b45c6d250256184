"""The soak test: mixed traffic with faults for minutes or hours, then a count of what is left."""
