"""``python -m include.capacity.simulator --profile NAME|FILE --port P``: serve a profile until SIGTERM."""

from __future__ import annotations

import argparse
import sys

from include.capacity.errors import CapacityError
from include.capacity.simulator.server import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="include.capacity.simulator", description=__doc__)
    parser.add_argument("--profile", required=True, help="name in include/config/profiles, or a file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed")
    parser.add_argument("--served-model-name", default=None, help="instead of the profile's")
    arguments = parser.parse_args()
    try:
        sys.exit(main(arguments.profile, arguments.host, arguments.port, arguments.served_model_name))
    except CapacityError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_status)
