"""Checkpoints: read their headers, cut them for ranks, put them back together, load them.

Nothing here imports torch but what loads a model (load.py), and the proof that `convert` asks for.
"""

from autotp.checkpoint.convert import convert
from autotp.checkpoint.integrity import Integrity, check_shards
from autotp.checkpoint.inventory import inventory
from autotp.checkpoint.merge import merge
from autotp.checkpoint.reshard import reshard
from autotp.checkpoint.written import Written

__all__ = ["Integrity", "Written", "check_shards", "convert", "inventory", "merge", "reshard"]
