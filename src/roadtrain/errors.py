"""The error tree. A message says what is wrong, with both numbers; `hint` says the way out.

RoadtrainError
+-- UserError                 the job, the model or the call is wrong; nothing was changed
|   +-- ConfigError           an unknown or contradictory setting
|   |   +-- UnitError         a size or a rate without a known unit
|   +-- BudgetError           what is asked for cannot fit (Rule 4): both numbers, and the least
|   |                         change that would fit
|   +-- ModelError            a model or a block that cannot be streamed exactly
|   +-- RuleError             an optimizer that cannot run next to the storage
|   +-- LoopError             the training loop did something that would make a step inexact
|       +-- DifferError       workers mean different things by one operation (also a RuntimeError,
|       |                     as Horovod's)
|       +-- TwiceError        an operation of that name is already under way (also a ValueError, as
|                             Horovod's)
+-- StoreError                bytes at rest; the last committed step stays usable (Rule 3)
|   +-- DamagedError          a checksum does not match: file, chunk, step
|   +-- ForeignError          the store belongs to another job, model or format
|   +-- FullError             the device is full
|   +-- GoneError             a directory or a file has vanished
|   +-- StaleError            the store is behind what is known to be committed
|   +-- ForkedError           two copies of a store trained on without each other: nobody can say
|   |                         which one is meant
|   +-- DivergedError         two servers that hold the same chunk made different bytes of it in one
|                             step
+-- LaunchError               a host or a process of a launched run cannot be used; what was begun
|                             is ended
+-- PeerError                 a node that this one waits for
    +-- DeadlineError         a wait passed its deadline (Rule 5): role, step, block, peer
    +-- LostError             the peer ended with an error of its own (the cause)
    +-- WireError             the peer sent no valid frame or handshake, or refused to talk
    |   +-- BusyError         the peer serves other workers, who may be leaving
    +-- AuthError             a token, a certificate or a user id does not match (Rule 8)
"""

from __future__ import annotations


class RoadtrainError(Exception):
    """The base of all errors that are raised on purpose. `hint` is the way out, shown under the
    message."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message + (f"\nhint: {hint}" if hint else ""))
        self.hint = hint


class UserError(RoadtrainError): ...


class ConfigError(UserError): ...


class UnitError(ConfigError): ...


class BudgetError(UserError): ...


class ModelError(UserError): ...


class RuleError(UserError): ...


class LoopError(UserError): ...


class DifferError(LoopError, RuntimeError): ...


class TwiceError(LoopError, ValueError): ...


class StoreError(RoadtrainError): ...


class DamagedError(StoreError): ...


class ForeignError(StoreError): ...


class FullError(StoreError): ...


class GoneError(StoreError): ...


class StaleError(StoreError): ...


class ForkedError(StoreError): ...


class DivergedError(StoreError): ...


class LaunchError(RoadtrainError): ...


class PeerError(RoadtrainError): ...


class DeadlineError(PeerError): ...


class LostError(PeerError): ...


class WireError(PeerError): ...


class BusyError(WireError): ...


class AuthError(PeerError): ...
