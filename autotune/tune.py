"""The path itself: survey the workload, resolve what was asked, search, and write what was found."""

import os
import platform
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from autotune.errors import Interrupted, OptionInvalid, WorkloadInvalid
from autotune.facts import Survey
from autotune.space import Config

if TYPE_CHECKING:
    from torch import nn

