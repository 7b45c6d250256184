"""python -m exec_server"""

from exec_server.cli import main

main()
