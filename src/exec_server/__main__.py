"""python -m exec_server"""

from exec_server.cli.main import main

main()
