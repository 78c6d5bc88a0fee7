"""Memory: window attention with sinks on a frozen decoder, and states that keep all text before."""

from graftlm.grafts.memory.method import DeltaState, MemoryConfig, WindowedMemory
from graftlm.grafts.memory.window import WindowLayer, WindowShape
