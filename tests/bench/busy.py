"""What a measuring process holds in a test: it is never done."""

import os
import time


class Busy:
    def pid(self) -> int:
        return os.getpid()

    def sleep(self) -> None:
        time.sleep(600)
