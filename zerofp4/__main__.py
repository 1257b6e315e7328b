"""python -m zerofp4"""

import sys

from zerofp4.inspect import main

sys.exit(main())
