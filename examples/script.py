"""The API without `async`, for scripts and notebooks."""

import sys

from exec_server import sync

target = sys.argv[1] if len(sys.argv) > 1 else None

with sync.connect(target) if target else sync.Environment.local() as env:
    print(env.run(["echo", "hello"]).text.strip())
    folder = env.run(["mktemp", "-d"], check=True).text.strip()
    env.files.write(f"{folder}/note", b"remember the milk")
    print(env.files.read(f"{folder}/note").decode())
    with env.start(["sh", "-c", "for n in 1 2 3; do echo $n; done"]) as process:
        print(b"".join(chunk.data for chunk in process).split())
    env.files.remove(folder, recursive=True)
