import subprocess

assert subprocess.check_output(["python3", "app.py"]) == b"Hello, World\n"
