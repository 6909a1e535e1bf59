"""A wall clock that is wrong for the processes under test alone, and that can be set while they run.

A small library is loaded before the C library. It adds the number of seconds in a file to every reading of
the wall clock; clocks that only measure durations are left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DAY = 86_400
SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
  char text[32] = {0};
  const char *path = getenv("FEDTMLE_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return 0;
  long seconds = read(file, text, sizeof text - 1) > 0 ? atol(text) : 0;
  close(file);
  return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec t;
  (void)zone;
  int result = clock_gettime(CLOCK_REALTIME, &t);
  now->tv_sec = t.tv_sec;
  now->tv_usec = t.tv_nsec / 1000;
  return result;
}

time_t time(time_t *place) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (place) *place = t.tv_sec;
  return t.tv_sec;
}
"""
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler is not installed")


class WrongClock:
    """The clock of the processes that are started within `given`."""

    def __init__(self, folder: Path) -> None:
        self._file, self._library = folder / "clock", folder / "clock.so"
        source = folder / "clock.c"
        source.write_text(SOURCE)
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(source)]
        subprocess.run(command, check=True)  # noqa: S603 - the source above

    def set(self, ahead: int) -> None:
        """Set the clock so many seconds ahead of the true time, also for processes that run."""
        scratch = self._file.with_suffix(".new")
        scratch.write_text(f"{ahead}\n")
        scratch.replace(self._file)

    def environment(self) -> dict[str, str]:
        """The environment of a process that has this clock."""
        return {**os.environ, "LD_PRELOAD": str(self._library), "FEDTMLE_CLOCK": str(self._file)}

    @contextmanager
    def given(self, ahead: int) -> Iterator[None]:
        """Give the processes that are started in this block a clock that is so many seconds ahead."""
        self.set(ahead)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment().items():
                patch.setenv(name, value)
            yield
