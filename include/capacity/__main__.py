"""``python -m include.capacity``: each stage without Airflow."""

import sys

from include.capacity.cli import main

if __name__ == "__main__":
    sys.exit(main())
