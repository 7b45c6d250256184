"""Services below processes and files: C library, threads, environment, HTTP requests."""
