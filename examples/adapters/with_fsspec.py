"""fsspec: files of a machine by URL. pip install '.[fsspec]'"""

import sys

import fsspec

# Without a target it is a server of this machine.
options = {"target": sys.argv[1]} if len(sys.argv) > 1 else {}
fs = fsspec.filesystem("exec-server", **options)

folder = "/tmp/exec-server-fsspec-example"
with fsspec.open(f"exec-server://{folder}/notes/greeting.txt", "wt", **options) as file:
    file.write("hello")
fs.mv(f"{folder}/notes/greeting.txt", f"{folder}/greeting.txt")
print(fs.cat_file(f"{folder}/greeting.txt").decode())
print(sorted(path.removeprefix(folder) for path in fs.find(folder, withdirs=True)))
fs.rm(folder, recursive=True)
print(fs.exists(folder))
fs.close()
