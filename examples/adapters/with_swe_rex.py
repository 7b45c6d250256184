"""SWE-ReX: a deployment on a machine, with a session. pip install '.[swe-rex]'"""

import asyncio
import sys

from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

from exec_server.adapters.swe_rex import ExecServerDeployment

target = sys.argv[1] if len(sys.argv) > 1 else None  # None is a server of this machine


async def main() -> None:
    deployment = ExecServerDeployment(target)
    await deployment.start()
    runtime = deployment.runtime
    await runtime.create_session(CreateBashSessionRequest())
    await runtime.run_in_session(BashAction(command="cd /tmp; export WORD=kept"))
    done = await runtime.run_in_session(BashAction(command="pwd; echo $WORD; uname -s"))
    print(done.exit_code, done.output.split())
    await deployment.stop()


asyncio.run(main())
