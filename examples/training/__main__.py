"""The program; train.py has its loop."""

import faulthandler
import sys

from examples.training.train import main

faulthandler.enable()  # NCCL ends a process that waits too long; this prints where it was
sys.exit(main())
